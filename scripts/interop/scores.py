"""lm-eval's log-likelihoods against those of `jaxserve score`, request by request.

Knows lm-eval's sample files.  A request is a context and a continuation; its log-likelihood is the
sum over the tokens of the whole that come after those of the context.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Request:
    """One log-likelihood of lm-eval."""

    context: str
    continuation: str
    log_likelihood: float


def read_samples(out: Path) -> list[Request]:
    """The log-likelihoods of the newest sample file of `facts_mc`."""
    path = max(out.rglob("samples_facts_mc_*.jsonl"), key=lambda path: path.stat().st_mtime)
    requests = []
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        arguments = sample["arguments"]
        pairs = arguments.values() if isinstance(arguments, dict) else arguments
        for pair, answer in zip(pairs, sample["resps"], strict=True):
            context, continuation = pair.values() if isinstance(pair, dict) else pair
            requests.append(Request(context, continuation, float(answer[0][0])))
    return requests


def compare(out: Path, model: Path) -> dict[str, Any]:
    """Score the same texts with the command line, in a process of its own.

    Args:
        out: directory of lm-eval's results.
        model: what was served.
    """
    requests = read_samples(out)
    texts = [text for r in requests for text in (r.context, r.context + r.continuation)]
    scores = _score(texts, out / "texts.jsonl", model)
    differences = []
    for request, context, whole in zip(requests, scores[::2], scores[1::2], strict=True):
        new = whole["token_logprobs"][len(context["token_ids"]) :]
        differences.append(abs(math.fsum(new) - request.log_likelihood))
    return {
        "requests": len(requests),
        "largest difference from `jaxserve score`": max(differences),
        "bound": MAX_DIFFERENCE,
    }


def _score(texts: list[str], path: Path, model: Path) -> list[dict[str, Any]]:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    command = [sys.executable, "-m", "jaxserve", "score", "--json", "--prompt-file", str(path)]
    done = subprocess.run([*command, "--model", str(model)], check=True, capture_output=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
