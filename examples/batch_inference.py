"""A text file of prompts in, a file of answers out, through OpenAI's batch format.

    python examples/batch_inference.py examples/prompts.txt answers.txt
    python examples/batch_inference.py examples/prompts.txt answers.txt --url http://127.0.0.1:8000

Without --url the model runs in the batch process; with it a running server answers.  The batch
file and its results are kept beside the answers.  Interrupt it, even with kill -9, and start it
again: lines that have an answer are not asked a second time.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Write the batch file, run it, and put the answers in the order of the prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, help="one prompt per line")
    parser.add_argument("answers", type=Path, help="one answer per line, as a JSON string")
    parser.add_argument("--url", help="a running server; the model runs here if absent")
    parser.add_argument("--model", help="path or name; the demo model if absent")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    requests, results = (args.answers.with_suffix(s) for s in (".batch.jsonl", ".results.jsonl"))
    prompts = [line for line in args.prompts.read_text().splitlines() if line]
    with requests.open("w") as file:
        for number, prompt in enumerate(prompts):
            file.write(json.dumps(request(number, prompt, args.max_tokens)) + "\n")

    command = [sys.executable, "-m", "jaxserve", "run-batch", "-i", requests, "-o", results]
    command += ["--url", args.url] if args.url else []
    command += ["--model", args.model] if args.model else []
    code = subprocess.run([*map(str, command), "--resume"], check=False).returncode
    if code != 0:
        raise SystemExit(f"the batch ended with code {code}; start again to continue it")

    texts = {}
    for line in results.read_text().splitlines():
        record = json.loads(line)
        texts[record["custom_id"]] = record["response"]["body"]["choices"][0]["message"]["content"]
    lines = [json.dumps(texts[f"line-{number}"]) for number in range(len(prompts))]
    args.answers.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} answers: {args.answers}")


def request(number: int, prompt: str, max_tokens: int) -> dict:
    """One line of the batch file."""
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": max_tokens,
            "temperature": 0,
        },
    }


if __name__ == "__main__":
    main()
