"""Batch size against latency: the same 100 prompts with at most 1, 4, 8, 16 and 32 at once.

    python examples/tradeoff.py                        # the prompts' shared KV is computed once
    python examples/tradeoff.py --no-prefix-caching    # ... or for every request

Written against vLLM's offline interface: with the import below changed to `vllm`, and --model
given, it runs there as it is.
"""

import argparse
import gc
import statistics
import time

from jaxserve import LLM, SamplingParams

PROMPT = """\
You answer questions of visitors to a science museum. Be correct and brief, and use no formulas.
Say what is seen first, and then what causes it. If there are several causes, begin with the one
that matters most. Avoid words that need a dictionary; where one cannot be avoided, explain it in
the same sentence. Compare sizes, speeds and times with things from daily life: a hair, a walk, a
heartbeat. Never invent a number; if you do not know one, say about how large it is. End with one
thing that the visitor can try at home within five minutes, with nothing but what a kitchen has.

A visitor asks: Why is the sky blue during the day and red in the evening, although the light
comes from the same sun? And why are clouds white, when they are nothing but water in the same air?
"""


def main() -> None:
    """Measure each batch size, print a table and draw the curve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or name; jaxserve's demo model if absent")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the keys and values of what prompts have in common, here all of it",
    )
    parser.add_argument("--output", default="tradeoff.png", help="where the curve goes")
    args = parser.parse_args()

    title = f"{args.num_prompts} prompts, prefix cache {'on' if args.prefix_caching else 'off'}"
    print(title)
    print("batch  tokens/s  TTFT mean  TTFT P99  ITL mean  ITL P99   (ms)")
    rows = []
    for batch_size in args.batch_sizes:
        row = measure(args, batch_size)
        rows.append(row)
        latencies = "  ".join(f"{1e3 * row[key]:8.1f}" for key in LATENCIES)
        print(f"{batch_size:5}  {row['tokens_per_s']:8.1f}   {latencies}", flush=True)
    draw(rows, title, args.output)


LATENCIES = ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99")


def measure(args: argparse.Namespace, batch_size: int) -> dict[str, float]:
    """Generate all prompts with one engine and sum up."""
    llm = LLM(
        args.model,
        max_num_seqs=batch_size,
        enable_prefix_caching=args.prefix_caching,
        disable_log_stats=False,  # vLLM fills in `metrics` only with this
    )
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    llm.generate(["Warm up."], params, use_tqdm=False)

    start = time.perf_counter()
    outputs = llm.generate([PROMPT] * args.num_prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start

    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    ttft, itl = zip(*map(latencies_of, outputs), strict=True)
    del llm, outputs  # the next engine needs the memory
    gc.collect()
    return {
        "batch_size": batch_size,
        "tokens_per_s": num_tokens / seconds,
        "ttft_mean": statistics.fmean(ttft),
        "ttft_p99": percentile(ttft, 99),
        "itl_mean": statistics.fmean(itl),
        "itl_p99": percentile(itl, 99),
    }


def latencies_of(output) -> tuple[float, float]:
    """Seconds to a request's first token, and between its tokens on average."""
    metrics, count = output.metrics, len(output.outputs[0].token_ids)
    if metrics is None:
        raise SystemExit("this engine reports no request metrics; is disable_log_stats=False lost?")
    if hasattr(metrics, "first_token_ts"):  # vLLM
        ttft = metrics.first_token_latency
        decode = metrics.last_token_ts - metrics.first_token_ts
    elif hasattr(metrics, "first_token_time"):  # vLLM before its V1 engine
        ttft = metrics.first_token_time - metrics.arrival_time
        decode = metrics.last_token_time - metrics.first_token_time
    else:
        ttft, decode = metrics.ttft, sum(metrics.itl)
    return ttft, decode / max(count - 1, 1)


def percentile(values, q: float) -> float:
    """The smallest value that `q` percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * q // 100), 1) - 1]


def draw(rows: list[dict[str, float]], title: str, path: str) -> None:
    """Throughput and latency on two axes over the batch size, if matplotlib is there."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    sizes = [row["batch_size"] for row in rows]
    figure, left = plt.subplots(figsize=(7, 4.2), layout="constrained")
    right = left.twinx()
    lines = [
        left.plot(sizes, [row["tokens_per_s"] for row in rows], "o-", label="throughput")[0],
        right.plot(
            sizes, [1e3 * row["itl_mean"] for row in rows], "s--", color="C1", label="mean ITL"
        )[0],
        right.plot(
            sizes, [1e3 * row["itl_p99"] for row in rows], "^:", color="C3", label="P99 ITL"
        )[0],
    ]
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(size) for size in sizes])
    left.set_xlabel("max_num_seqs")
    left.set_ylabel("output tokens/s")
    right.set_ylabel("time between tokens, ms")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend(handles=lines, loc="upper left", frameon=False)
    left.set_title(title)
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
