"""Prompts and texts from arguments, a file or stdin.

Knows two file formats: a prompt per line, and JSON lines.  Does not know what is done with them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from jaxserve.cli.base import Decorated


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text or as token ids."""

    text: str | None
    token_ids: list[int] | None = None
    priority: int = 0


class _JsonPrompt(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    priority: int = 0


def prompt_file_option(function: Decorated) -> Decorated:
    """Add `--prompt-file`."""
    return click.option(
        "--prompt-file",
        metavar="FILE",
        help='One prompt per line, or JSON lines with "prompt" or "prompt_token_ids" (and, if '
        'wanted, "priority"); - is stdin.  JSON lines are known by the suffix .jsonl or by their '
        "first line.",
    )(function)


def read_prompts(arguments: Sequence[str], file: str | None) -> list[Prompt]:
    """Collect the prompts: arguments first, then the file; stdin if there is neither.

    Raises:
        ValueError: there are none, or one is malformed, naming where.
        OSError: the file cannot be read.
    """
    prompts = [Prompt(argument) for argument in arguments]
    if file is not None or not arguments:
        prompts += _read_file(file)
    if not prompts:
        raise ValueError("no prompt; give one as an argument, in --prompt-file or on stdin")
    for number, prompt in enumerate(prompts, start=1):
        try:
            (prompt.text or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt {number} is not valid UTF-8") from error
    return prompts


def _read_file(file: str | None) -> list[Prompt]:
    if file is None and sys.stdin.isatty():
        return []
    if file is None or file == "-":
        name, content = "stdin", sys.stdin.buffer.read()
    else:
        name, content = file, Path(file).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not valid UTF-8 at byte {error.start}") from error
    # Not splitlines, which also splits at form feeds and Unicode separators inside a prompt.
    lines = [
        (number, line.removesuffix("\r"))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if lines and (name.endswith(".jsonl") or _is_json_prompt(lines[0][1])):
        return [_parse(line, f"{name}, line {number}") for number, line in lines]
    return [Prompt(line) for _, line in lines]


def _is_json_prompt(line: str) -> bool:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.keys() & {"prompt", "prompt_token_ids"})


def _parse(line: str, where: str) -> Prompt:
    try:
        parsed = msgspec.json.decode(line, type=_JsonPrompt)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error
    if (parsed.prompt is None) == (parsed.prompt_token_ids is None):
        raise ValueError(f"{where}: give one of prompt and prompt_token_ids")
    return Prompt(parsed.prompt, parsed.prompt_token_ids, parsed.priority)
