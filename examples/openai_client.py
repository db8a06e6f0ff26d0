"""The official `openai` client against a running server: whole answers, streams, samples.

jaxserve serve &
python examples/openai_client.py --url http://127.0.0.1:8000/v1
"""

import argparse

from openai import OpenAI

QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]


def main() -> None:
    """Ask in four ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what --api-key of the server says")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id
    print(f"model: {model}")

    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_completion_tokens=40, temperature=0
    )
    print(f"whole: {answer.choices[0].message.content!r}")
    print(f"usage: {answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens")

    print("stream: ", end="")
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, max_completion_tokens=40, temperature=0, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()

    # Fields beyond OpenAI's, such as top_k, go into `extra_body`.
    samples = client.completions.create(
        model=model,
        prompt="Once upon a time, in a small village by the sea,",
        n=3,
        max_tokens=16,
        temperature=0.9,
        seed=7,
        extra_body={"top_k": 50},
    )
    for choice in samples.choices:
        print(f"sample {choice.index}: {choice.text!r}")

    likely = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is water wet? Answer yes or no."}],
        max_completion_tokens=1,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    for entry in likely.choices[0].logprobs.content[0].top_logprobs:
        print(f"first token {entry.token!r}: log-probability {entry.logprob:.2f}")


if __name__ == "__main__":
    main()
