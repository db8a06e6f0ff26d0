"""The page for people: tables and text from the document of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.peers.labels import labels

Document = Mapping[str, Any]


def markdown(doc: Document, plot: str | None) -> str:
    """The whole page.

    Args:
        doc: made by `document`.
        plot: file name of the picture beside the page; None for none.
    """
    names = labels(doc["engines"])
    parts = [
        "# jaxserve beside other engines on a CPU",
        _introduction(doc),
        f"![Decode throughput and ragged wall times]({plot})" if plot else "",
        _decode(doc, names),
        _ragged(doc, names),
        _ratios(doc, names),
        _agreement(doc, names),
        _engines(doc, names),
        _failures(doc, names),
        _how(doc),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    every = [list(header), ["---"] * len(header), *map(list, lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def quiet_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many of the turns had the machine for themselves."""
    quiet, turns = (sum(row[key] for row in rows) for key in ("quiet", "repeats"))
    return f"{quiet} of {turns} turns were quiet"


def _introduction(doc: Document) -> str:
    m, s = doc["machine"], doc["settings"]
    kind = "virtual machine" if m["virtual"] else "machine"
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct, greedy, on a {kind} with {m['num_cores']} cores: {m['cpu']} "
            f"(family/model {m['cpu_family_model']}), with {', '.join(m['features'])}, without "
            f"{', '.join(m['without']) or 'none of those looked for'}; "
            f"{m['memory_bytes'] / 1e9:.0f} GB of memory, transparent huge pages "
            f"{m['transparent_huge_pages']}, Linux {m['kernel']}, {doc['date']}.",
            "One run, in turns: every engine does an item once, then every engine again; "
            f"repeats: {s['repeats']}{_fewer(doc)}. Numbers are medians with the least and "
            "the largest in brackets; ratios are taken within each repeat.",
            f"{quiet_note(doc['rows'])}: others took at most {s['quiet_share']:.0%} of the machine "
            f"(load average before the run {m['load_average']:.2f}).",
        ]
    )


def _fewer(doc: Document) -> str:
    """Who had fewer repeats, if anybody."""
    names, full = labels(doc["engines"]), doc["settings"]["repeats"]
    fewer = {row["engine"]: row["repeats"] for row in doc["rows"] if row["repeats"] < full}
    return "".join(f", of {names[engine]} {count}" for engine, count in fewer.items())


def _decode(doc: Document, names: Mapping[str, str]) -> str:
    items = [item for item in doc["items"] if item["kind"] == "fixed"]
    if not items:
        return ""
    lines = []
    for name in names:
        rows = [_row(doc, item["name"], name) for item in items]
        if any(rows):
            cells = [
                _rate(row, item["slots"]) if row else "-"
                for row, item in zip(rows, items, strict=True)
            ]
            lines.append([names[name], *cells])
    header = ["decode tokens/s (ms a step)", *(_slots(item["slots"]) for item in items)]
    size = items[0]
    text = (
        f"Equal requests, all at once: {size['prompt_tokens'] // size['requests']} prompt and "
        f"{size['output_tokens'] // size['requests']} output tokens each. The rate is of all "
        "tokens but the first of each request, over the time less that of a call for one token."
    )
    return f"## Decoding\n\n{text}\n\n{table(header, lines)}"


def _ragged(doc: Document, names: Mapping[str, str]) -> str:
    items = [item for item in doc["items"] if item["kind"] == "ragged"]
    lines = []
    for item in items:
        peaks = {m["engine"]: m for m in doc["memory"] if m["item"] == item["name"]}
        for name in names:
            row = _row(doc, item["name"], name)
            if row:
                lines.append(
                    [
                        str(item["slots"]),
                        names[name],
                        _range(row["seconds"], 2),
                        f"{row['tokens_per_s']['median']:.0f}",
                        _gigabytes(peaks.get(name, {}).get("peak_rss_bytes")),
                        f"{row['own_cores']:.2f}",
                    ]
                )
    if not lines:
        return ""
    item = items[0]
    text = (
        f"{item['requests']} requests of many lengths, all submitted at once: "
        f"{item['prompt_tokens']:,} prompt and {item['output_tokens']:,} output tokens. Peak "
        "resident memory is that of the item, after start-up and warm-up."
    )
    header = ["slots", "engine", "wall, s", "output tokens/s", "peak RSS, GB", "cores busy"]
    return f"## Ragged requests\n\n{text}\n\n{table(header, lines)}"


def _ratios(doc: Document, names: Mapping[str, str]) -> str:
    pairs = list(dict.fromkeys((r["ours"], r["peer"]) for r in doc["ratios"]))
    if not pairs:
        return ""
    found = {(r["ours"], r["peer"], r["item"]): r for r in doc["ratios"]}
    lines = [
        [
            names[ours],
            names[peer],
            *(_range(found.get((ours, peer, item["name"])), 2) for item in doc["items"]),
        ]
        for ours, peer in pairs
    ]
    header = ["of", "over", *(item["name"].replace("-", " ") for item in doc["items"])]
    return f"## Times as fast\n\n{table(header, lines)}"


def _agreement(doc: Document, names: Mapping[str, str]) -> str:
    if not doc["agreement"]:
        return ""
    # All fixed items are the largest one's first requests.
    fixed = [item for item in doc["items"] if item["kind"] == "fixed"][-1:]
    items = [*fixed, *(item for item in doc["items"] if item["kind"] == "ragged")]
    found = {(a["engine"], a["item"]): a for a in doc["agreement"]}
    lines = [
        [names[name], *(_equal(found.get((name, item["name"]))) for item in items)]
        for name in names
        if any((name, item["name"]) in found for item in items)
    ]
    text = (
        "Share of tokens equal to those of jaxserve in float32, each request up to its first "
        "difference; in brackets, requests equal to their end, and the median position of the "
        "first difference in the others. Prompts are random tokens, where close calls are "
        "frequent: rounding alone makes texts part. Every answer had exactly the tokens asked for."
    )
    header = ["engine", *(item["name"].replace("-", " ") for item in items)]
    return f"## Greedy agreement\n\n{text}\n\n{table(header, lines)}"


def _engines(doc: Document, names: Mapping[str, str]) -> str:
    lines = []
    for engine in doc["engines"]:
        facts = engine["facts"]
        if facts:
            versions = ", ".join(f"{k} {v}" for k, v in facts.get("versions", {}).items())
            settings = ", ".join(_setting(k, v) for k, v in facts.items() if k in _SETTINGS)
            lines.append(
                [
                    names[engine["name"]],
                    versions,
                    settings,
                    f"{facts['load_s']:.1f}",
                    _gigabytes(facts["peak_rss_at_ready_bytes"]),
                    f"{facts['idle_cores']:.2f}",
                ]
            )
    text = (
        f"All: prefix caching off, every core used, {doc['settings']['max_model_len']} tokens at "
        "most where that can be said; what is not named is each engine's default, that of KV "
        "pages included. The ready time is of a process that may find caches of earlier ones. "
        "Between its turns an engine's processes are stopped, so that idle threads take nothing."
    )
    header = ("engine", "versions", "settings", "ready, s", "peak RSS by then, GB", "cores idle")
    return f"## Engines\n\n{text}\n\n{table(header, lines)}"


_SETTINGS = {
    "attention": "attention {}",
    "kv_cache_dtype": "{} pages",
    "kv_cache_bytes": "KV pool of {:.2g} GB",
    "kv_cache_gb": "KV pool of {} GB",
    "token_budget": "{} tokens a step",
    "precision_hint": "computes in {}",
    "compilations_after_ready": "{} compilations after ready",
}


def _setting(key: str, value: Any) -> str:
    return _SETTINGS[key].format(value / 1e9 if key == "kv_cache_bytes" else value)


def _failures(doc: Document, names: Mapping[str, str]) -> str:
    lines = [f"- {names[e['name']]}: {e['error']}" for e in doc["engines"] if e["error"]]
    return "\n".join(["## Not measured", "", *lines]) if lines else ""


def _how(doc: Document) -> str:
    return "\n".join(
        [
            "## Again",
            "",
            "```bash",
            "make bench-peers                     # or: python -m benchmarks.peers --help",
            "python -m benchmarks.peers --small   # a minute, this engine only, to try it",
            "```",
            "",
            "It makes an environment for each peer and the forms of the model that they read, "
            "and writes this page, [cpu.json](cpu.json) with every turn, and the picture.",
            f"This run took {doc['settings']['took_s'] / 60:.0f} minutes. "
            "The 8-bit model of OpenVINO is the same GGUF as Q8_0, blocks of 32 with a scale.",
        ]
    )


def _row(doc: Document, item: str, engine: str) -> Mapping[str, Any] | None:
    matching = (r for r in doc["rows"] if r["item"] == item and r["engine"] == engine)
    return next(matching, None)


def _rate(row: Mapping[str, Any], slots: int) -> str:
    rate = row["tokens_per_s"]
    return f"{_range(rate, 0)}, {1000 * slots / rate['median']:.1f} ms"


def _range(values: Mapping[str, float] | None, digits: int) -> str:
    if values is None:
        return "-"
    median, least, most = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"**{median}** ({least} to {most})"


def _equal(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    firsts = found["first_differences"]
    where = f", median {firsts[len(firsts) // 2]}" if firsts else ""
    equal = f"{found['equal_requests']} of {found['requests']}"
    return f"{100 * found['equal_share']:.1f} % ({equal}{where})"


def _gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def _slots(count: int) -> str:
    return f"{count} slot{'' if count == 1 else 's'}"
