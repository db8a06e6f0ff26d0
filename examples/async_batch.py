"""Many prompts through `AsyncLLM` in one process: each is handled as it ends, none waits for all.

python examples/async_batch.py
python examples/async_batch.py --at-once 8 --prompts my_prompts.txt
"""

import argparse
import asyncio
from pathlib import Path

from jaxserve import AsyncLLM, SamplingParams


async def main() -> None:
    """Answer every line of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or name; the demo model if absent")
    parser.add_argument("--prompts", default=Path(__file__).with_name("prompts.txt"), type=Path)
    parser.add_argument("--at-once", type=int, default=16, help="most prompts under way")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()

    llm = AsyncLLM(args.model, max_num_seqs=args.at_once)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    room = asyncio.Semaphore(args.at_once)
    prompts = args.prompts.read_text().splitlines()

    async def answer(prompt: str) -> str:
        async with room:
            async for output in llm.generate(prompt, params):
                last = output  # each one has all of the text so far
        return prompt + last.outputs[0].text

    try:
        for done in asyncio.as_completed([answer(prompt) for prompt in prompts]):
            print(repr(await done), flush=True)
        # Leaving a stream early gives its slot and its pages back at once.
        async for output in llm.generate("One, two, three,", SamplingParams(max_tokens=500)):
            if len(output.outputs[0].token_ids) >= 5:
                break
        print(f"left early: {output.outputs[0].text!r}")
    finally:
        await llm.close()


if __name__ == "__main__":
    asyncio.run(main())
