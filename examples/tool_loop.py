"""A loop of tool calls: the model asks for a tool, the program runs it, the model goes on.

    jaxserve serve &
    python examples/tool_loop.py --url http://127.0.0.1:8000/v1

The first turn requires a call, which a grammar enforces: the name is one of the tools and the
arguments fit its schema, whatever the model.  The turns after it leave the choice to the model
(--first-choice auto does so from the start).
"""

import argparse
import json

from openai import OpenAI

STOCK = {"apples": 12, "pears": 0, "plums": 31}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "How many pieces of a fruit are in stock.",
            "parameters": {
                "type": "object",
                "properties": {"fruit": {"type": "string", "enum": sorted(STOCK)}},
                "required": ["fruit"],
                "additionalProperties": False,
            },
        },
    },
]
SYSTEM = (
    "You work in a fruit shop. Call the function stock to find out what is there, then answer the "
    "customer in one sentence."
)


def stock(fruit: str) -> dict[str, int | str]:
    """The tool itself."""
    return {"fruit": fruit, "pieces": STOCK[fruit]}


def main() -> None:
    """Talk until the model answers without a call, a few turns at most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what --api-key of the server says")
    parser.add_argument("--question", default="Do you have any plums?")
    parser.add_argument("--first-choice", default="required", choices=("required", "auto"))
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id

    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": args.question},
    ]
    for turn in range(4):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=args.first_choice if turn == 0 else "auto",
            parallel_tool_calls=False,
            temperature=0,
            max_completion_tokens=60,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            print(f"answer: {message.content!r}")
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = stock(**json.loads(call.function.arguments))
            print(f"call: {call.function.name}({call.function.arguments}) -> {result}")
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )


if __name__ == "__main__":
    main()
