"""`jaxserve bench kernels`: attention over pages against its roofline, and the tuner."""

from __future__ import annotations

import itertools
import json as encoder
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxserve.bench.lengths import MIXES
from jaxserve.bench.roofline import KV_BYTES, OPS, SHAPES, Cell, Heads
from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.options import IntList
from jaxserve.cli.tables import table

if TYPE_CHECKING:
    pass

_PREFILL_BATCH = 1
_NOT_TIMED = "no GPU: not timed"


class HeadsType(click.ParamType[Heads]):
    """The heads of a model, by its name or as three numbers."""

    name = "shape"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Heads:
        """Parse "8b" or "32,8,128"."""
        if isinstance(value, Heads):
            return value
        if value in SHAPES:
            return SHAPES[value]
        try:
            heads = Heads(*(int(part) for part in str(value).split(",")))
            fits = heads.num_heads % heads.num_kv_heads == 0 and min(vars(heads).values()) > 0
        except (TypeError, ValueError, ZeroDivisionError):
            fits = False
        if not fits:
            self.fail(
                f"{value!r} is none of {', '.join(SHAPES)}, nor query heads, KV heads and head "
                "size such as 32,8,128, the first a multiple of the second",
                param,
                ctx,
            )
        return heads


class NameList(click.ParamType[tuple[str, ...]]):
    """Some of a few names, separated by commas."""

    name = "name,name,..."

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Parse "a,b"; a tuple is left as it is."""
        if isinstance(value, tuple):
            return value
        names = tuple(str(value).split(","))
        for name in names:
            if name not in self._known:
                self.fail(f"{name!r} is none of {', '.join(self._known)}", param, ctx)
        return names


@click.command("kernels", cls=Verb)
@click.option("--roofline", is_flag=True, help="Compare times with the bytes to be moved.")
@click.option(
    "--tune",
    metavar="FILE",
    help="Time the grid of sizes on this GPU and add the fastest to this table.",
)
@click.option(
    "--shape",
    type=HeadsType(),
    default="8b",
    help=f"Heads of a model: {', '.join(SHAPES)}, or query heads,KV heads,head size.",
)
@click.option("--op", type=NameList(OPS), default="decode", help=f"Of {', '.join(OPS)}.")
@click.option("--batch-size", type=IntList(), default="1,8,32,128", help="Sequences of a decode.")
@click.option(
    "--context", type=IntList(), default="512,2048,8192,32768", help="Keys of the longest sequence."
)
@click.option("--mix", type=NameList(MIXES), default=",".join(MIXES), help="Of the lengths.")
@click.option(
    "--kv-dtype", type=NameList(tuple(KV_BYTES)), default="bfloat16,int8", help="Of the pages."
)
@click.option("--page-size", type=IntList(), default="16,64", help="Tokens per page.")
@click.option(
    "--chunk", type=click.IntRange(min=1), default=2048, help="Query tokens of a prefill or write."
)
@click.option(
    "--implementation",
    metavar="NAME,NAME,...",
    help="Implementations to time, all that the device has if absent; to tune, the first.",
)
@click.option(
    "--table", "table_path", metavar="FILE", help="Tuned sizes to use instead of the defaults."
)
@click.option("--baselines/--no-baselines", default=True, help="Time cuDNN and torch, too.")
@click.option("--time-anyway", is_flag=True, help="Time without a GPU, to try this command.")
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--output", metavar="FILE", help="Write the JSON object here, too.")
@log_option
def command(
    roofline: bool,
    tune: str | None,
    shape: Heads,
    op: tuple[str, ...],
    batch_size: tuple[int, ...],
    context: tuple[int, ...],
    mix: tuple[str, ...],
    kv_dtype: tuple[str, ...],
    page_size: tuple[int, ...],
    chunk: int,
    implementation: str | None,
    table_path: str | None,
    baselines: bool,
    time_anyway: bool,
    json: bool,
    output: str | None,
) -> None:
    """Measure attention over pages as a share of the copy bandwidth, or tune its sizes.

    With --roofline: the bytes that each cell of the sweep cannot avoid, and for each
    implementation microseconds, GB/s and percent of the copy bandwidth measured in the same run,
    beside cuDNN's paged attention and torch's dense one where they are there.  Without a GPU the
    bytes alone.  Give every option that spans the sweep as a list; all combinations are measured.

    With --tune: every size of the grid, checked against the reference and then timed, for the
    forms, page types and page sizes named; needs a GPU and takes minutes.
    """
    if roofline == (tune is not None):
        raise click.UsageError("Give one of --roofline and --tune FILE.")
    names = None if implementation is None else implementation.split(",")
    if tune is not None:
        _tune(tune, shape, names, op, kv_dtype, page_size)
        return
    cells = list(_cells(op, batch_size, context, mix, kv_dtype, page_size, chunk))
    report = _roofline(shape, cells, names, baselines, time_anyway, table_path)
    encoded = encoder.dumps(report)
    if output is not None:
        Path(output).write_text(encoded + "\n", encoding="utf-8")
    click.echo(encoded if json else _text(report))


def _cells(
    ops: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    mixes: Sequence[str],
    kv_dtypes: Sequence[str],
    page_sizes: Sequence[int],
    chunk: int,
) -> Iterator[Cell]:
    """The sweep; what has no meaning for an operation is not varied."""
    for op in ops:
        if op == "write":
            axes = itertools.product((chunk,), (1,), ("uniform",), kv_dtypes, page_sizes)
        elif op == "prefill":
            longer = tuple(max(size, chunk) for size in contexts)
            axes = itertools.product(
                (_PREFILL_BATCH,), dict.fromkeys(longer), ("uniform",), kv_dtypes, page_sizes
            )
        else:
            axes = itertools.product(batches, contexts, mixes, kv_dtypes, page_sizes)
        for batch, context, mix, kv_dtype, page_size in axes:
            if mix == "uniform" or batch > 1:
                yield Cell(op, batch, context, mix, kv_dtype, page_size, chunk)


def _tune(
    path: str,
    heads: Heads,
    names: list[str] | None,
    ops: Sequence[str],
    kv_dtypes: Sequence[str],
    page_sizes: Sequence[int],
) -> None:
    import jax

    if jax.default_backend() != "gpu":
        raise ValueError(
            f"tuning needs a GPU, and this machine has {jax.default_backend()} only; the sizes "
            "without a table are the defaults of pallas_kernels.tuning"
        )
    from jaxserve.bench.tune import Tuner

    if "write" in ops:
        raise ValueError("a write has no sizes to tune; give --op decode,prefill")
    tuner = Tuner(heads, Path(path), implementation=names[0] if names else "auto")
    written = tuner.run(ops, kv_dtypes, page_sizes)
    click.echo(f"{written} entries written to {path}")


def _roofline(
    heads: Heads,
    cells: list[Cell],
    names: list[str] | None,
    baselines: bool,
    time_anyway: bool,
    table_path: str | None,
) -> dict[str, Any]:
    import jax

    from jaxserve.bench.kernels import Roofline
    from jaxserve.kv_cache import kernel_table
    from pallas_kernels import implementations

    for name in names or ():
        if name not in implementations():
            raise ValueError(
                f"no attention implementation {name!r}; known are {', '.join(implementations())}"
            )
    sweep = Roofline(heads, cells, names, baselines, kernel_table(table_path, jax.devices()[0]))
    if jax.default_backend() != "gpu" and not time_anyway:
        return sweep.bytes_only(_NOT_TIMED)
    return sweep.run()


def _text(report: dict[str, Any]) -> str:
    """The report as a table with a line per implementation and cell, and what it refers to."""
    copy = report["copy_bytes_per_s"]
    heads = report["heads"]
    lines = [
        f"{report['device']}, jax {report['jax']}; {heads['num_heads']} query heads, "
        f"{heads['num_kv_heads']} KV heads of {heads['head_dim']}",
        report["reason"] if copy is None else f"copy: {copy / 1e9:,.0f} GB/s read and written",
    ]
    if report["matmul_flop_per_s"] is not None:
        lines.append(f"bfloat16 product: {report['matmul_flop_per_s'] / 1e12:,.0f} TFLOP/s")
    rows = [row for cell in report["cells"] for row in _rows(cell, copy)]
    return "\n".join([*lines, "", table(_HEADER, rows)])


_HEADER = (
    *("op", "batch", "context", "mix", "pages", "size", "MB", "floor us"),
    *("us", "GB/s", "% of copy", "TFLOP/s", "times xla", "implementation"),
)


def _rows(cell: dict[str, Any], copy: float | None) -> Iterator[tuple[str, ...]]:
    floor = "-" if copy is None else f"{1e6 * cell['floor_bytes'] / copy:.1f}"
    what = tuple(
        str(cell[name]) for name in ("op", "batch", "context", "mix", "kv_dtype", "page_size")
    )
    what = (*what, f"{cell['floor_bytes'] / 1e6:.1f}", floor)
    times = {result["implementation"]: result["seconds"] for result in cell["results"]}
    if not times:
        yield (*what, *("-",) * 6)
    for name, seconds in times.items():
        result = next(r for r in cell["results"] if r["implementation"] == name)
        if seconds is None:
            yield (*what, *("-",) * 5, f"{name}: {result['skipped']}")
            continue
        xla = times.get("xla")
        yield (
            *what,
            f"{1e6 * seconds:.1f}",
            f"{result['bytes_per_s'] / 1e9:.0f}",
            f"{100 * result['copy_share']:.0f}",
            f"{result['flop_per_s'] / 1e12:.1f}",
            "-" if xla is None else f"{xla / seconds:.1f}",
            name,
        )
