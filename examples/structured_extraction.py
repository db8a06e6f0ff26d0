"""Facts out of texts, as JSON that always parses: the schema comes from a pydantic model.

    jaxserve serve &
    python examples/structured_extraction.py --url http://127.0.0.1:8000/v1

The schema constrains every token, so that even a small model answers in the right form.  What it
writes into the form is as good as the model.
"""

import argparse
import json

from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

TEXTS = (
    "Ada Lovelace, born in London in 1815, wrote what many call the first computer program.",
    "In 1867 Maria Sklodowska was born in Warsaw; as Marie Curie she won two Nobel Prizes.",
    "The mathematician Emmy Noether (born 1882 in Erlangen) linked symmetry and conservation.",
)


class Person(BaseModel):
    """What is to be found in a text, and nothing else: a schema allows more unless it says so."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=40)
    birth_year: int = Field(ge=1000, le=2100)
    birth_place: str = Field(max_length=30)


def main() -> None:
    """Extract a person from each text, then sort texts by a list of choices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what --api-key of the server says")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id

    for text in TEXTS:
        messages = [
            {"role": "system", "content": "Extract the person from the text as JSON."},
            {"role": "user", "content": text},
        ]
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_completion_tokens=100,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "person",
                    "strict": True,
                    "schema": Person.model_json_schema(),
                },
            },
        )
        person = Person.model_validate(json.loads(answer.choices[0].message.content))
        print(person)

    # vLLM's extra field knows more kinds of constraint: here one of a few words.
    for text in TEXTS:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"{text}\nWhat is the text about?"}],
            temperature=0,
            extra_body={"structured_outputs": {"choice": ["computing", "physics", "mathematics"]}},
        )
        print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
