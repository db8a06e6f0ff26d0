"""Texts that the model did not write: prose, code and a sum."""

TEXTS = (
    "Plants make their own food by a process called photosynthesis. Light is absorbed by "
    "chlorophyll, a green pigment in the leaves, and its energy is used to split water into "
    "hydrogen and oxygen. The oxygen is released into the air, while the hydrogen is combined "
    "with carbon dioxide to form sugars. Some of the sugar is used at once; the rest is "
    "stored as starch or built into cellulose, the material of cell walls. At night there is "
    "no light, and the plant breathes as animals do.",
    "The old lighthouse keeper had not spoken to anyone for eleven days when the boat came. "
    "He saw it first as a speck beyond the reef, then as a red hull that rose and fell "
    "between the waves. Two men were rowing, and a girl of perhaps nine sat in the stern with "
    "a basket on her knees. He went down the iron steps slowly, holding the rail with both "
    'hands, and waited on the wet stones. "We brought you bread," the girl said, before the '
    "boat had even touched the landing.",
    "def binary_search(items, target):\n"
    '    """Return the index of target in the sorted list items, or -1 if it is not there."""\n'
    "    low, high = 0, len(items) - 1\n"
    "    while low <= high:\n"
    "        middle = (low + high) // 2\n"
    "        if items[middle] == target:\n"
    "            return middle\n"
    "        if items[middle] < target:\n"
    "            low = middle + 1\n"
    "        else:\n"
    "            high = middle - 1\n"
    "    return -1\n",
    "Question: A farmer has 48 apples and puts them into boxes of 6. He sells 5 boxes for 3 "
    "dollars each and keeps the rest. How much money does he earn, and how many apples are "
    "left? Answer: There are 48 / 6 = 8 boxes. He sells 5 of them for 5 * 3 = 15 dollars. "
    "Then 8 - 5 = 3 boxes are left, which is 3 * 6 = 18 apples. So he earns 15 dollars and 18 "
    "apples are left.",
)
