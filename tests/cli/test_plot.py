"""Knees, curves and timelines as data, and `jaxserve plot`; pictures only where matplotlib is."""

import json
import random
import sys

import pytest

from jaxserve.plot import curve, timeline
from jaxserve.plot.files import SweepFile, TraceFile, read
from jaxserve.plot.knee import front, knee


def test_the_knee_of_a_corner_is_the_corner():
    assert knee([(1, 0), (1.1, 9), (5, 10)]) == 1


def test_the_knee_is_where_the_slope_is_that_of_the_diagonal():
    # y = sqrt(x) on [0, 1]: y - x is largest at x = 1/4.
    points = [(x / 100, (x / 100) ** 0.5) for x in range(101)]
    assert points[knee(points)] == (0.25, 0.5)


def test_units_do_not_move_the_knee():
    points = [(8.4, 900), (10.3, 1560), (16.9, 1900), (34, 2000)]
    scaled = [(x / 1000 + 7, y * 60) for x, y in points]
    assert knee(points) == knee(scaled) == 2


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 1)],
        [(1, 1), (2, 2)],
        [(1, 1), (2, 2), (3, 3)],  # a line
        [(1, 1), (2, 1.1), (3, 3)],  # convex
        [(1, 3), (2, 2), (3, 1)],  # one point is the whole front
    ],
)
def test_without_a_knee_there_is_none(points):
    assert knee(points) is None


def test_the_front_has_what_no_other_point_beats():
    rng = random.Random(0)
    for _ in range(200):
        points = [(rng.randint(1, 6), rng.randint(1, 6)) for _ in range(rng.randint(1, 8))]
        best = [points[i] for i in front(points)]
        assert best == sorted(set(best))
        beaten = {
            (x, y) for x, y in points for a, b in points if a <= x and b >= y and (a, b) != (x, y)
        }
        assert set(best) == set(points) - beaten


def row(size, throughput, itl_s, **figures):
    return {
        "max_num_seqs": size,
        "output_tokens_per_s": throughput,
        "itl_mean_s": itl_s,
        **figures,
    }


ROWS = [row(16, 1560.0, 0.0103), row(1, 74.0, 0.0134), row(32, 1900.0, 0.0169)]
ROWS += [row(8, 900.0, 0.0084), row(64, 2000.0, 0.034)]


def test_a_curve_goes_by_batch_size_in_milliseconds():
    one = curve.curve("a", ROWS, "itl_mean")
    assert one.sizes == (1, 8, 16, 32, 64)
    assert one.throughput == (74.0, 900.0, 1560.0, 1900.0, 2000.0)
    assert one.latency_ms == pytest.approx((13.4, 8.4, 10.3, 16.9, 34.0))
    assert one.sizes[one.knee] == 32


def test_a_missing_figure_is_named():
    with pytest.raises(ValueError, match="row of batch 4 has no ttft_p99_s"):
        curve.curve("a", [row(4, 1.0, 0.1, ttft_p99_s=None)], "ttft_p99")
    with pytest.raises(ValueError, match="no rows"):
        curve.curve("a", [], "itl_mean")


@pytest.mark.parametrize("key", [axis.key for axis in curve.AXES])
def test_a_curve_knows_what_differs_between_its_points(key):
    rows = [{key: size, "output_tokens_per_s": 1.0, "itl_mean_s": 0.1} for size in (2, 0.5)]
    one = curve.curve("a", rows, "itl_mean")
    assert (one.axis.key, one.sizes) == (key, (0.5, 2))


def test_rows_of_several_kinds_are_refused():
    rows = [{key: 1, "output_tokens_per_s": 1.0, "itl_mean_s": 0.1} for key in ("a", "concurrency")]
    with pytest.raises(ValueError, match="request_rate is in every row"):
        curve.curve("a", rows, "itl_mean")


def test_every_latency_has_words():
    assert curve.latency_words("ttft_p99") == "P99 time to first token, ms"
    assert len({curve.latency_words(name) for name in curve.LATENCIES}) == len(curve.LATENCIES)


def step(start_s, seconds, *slots, **figures):
    return {"start_s": start_s, "seconds": seconds, "slots": list(slots), **figures}


STEPS = [
    step(0.0, 2.0, (0, "a", "prefill"), (1, "b", "prefill")),
    step(2.0, 1.0, (0, "a", "decode"), (1, "b", "decode")),
    step(3.0, 1.0, (0, "a", "decode")),
    step(4.0, 1.0, (0, "a", "decode"), (1, "c", "prefill")),
]


def test_steps_in_a_row_are_one_bar():
    one = timeline.timeline("x", 2, STEPS)
    assert [(b.slot, b.seq_id, b.kind, b.start_s, b.end_s) for b in one.bars] == [
        (0, "a", "prefill", 0.0, 2.0),
        (1, "b", "prefill", 0.0, 2.0),
        (0, "a", "decode", 2.0, 5.0),
        (1, "b", "decode", 2.0, 3.0),
        (1, "c", "prefill", 4.0, 5.0),
    ]
    assert one.end_s == 5.0
    assert one.share_at_work == pytest.approx(9 / 10)


def test_a_step_that_leaves_a_sequence_out_is_a_gap():
    steps = [step(t, 1.0, *([(0, "a", "decode")] if t != 1 else [])) for t in range(3)]
    bars = timeline.timeline("x", 1, steps).bars
    assert [(b.start_s, b.end_s) for b in bars] == [(0, 1), (2, 3)]


def test_a_step_without_decode_rows_holds_the_others_up():
    steps = [
        step(0.0, 1.0, (0, "a", "decode"), rows=1),
        step(1.0, 4.0, (0, "a", "decode"), (1, "b", "prefill"), rows=0),
        step(5.0, 1.0, (0, "a", "decode"), (1, "b", "decode"), rows=2),
    ]
    one = timeline.timeline("x", 2, steps)
    assert [b.kind for b in one.bars if b.slot == 0] == ["decode", "wait", "decode"]
    assert one.share_at_work == pytest.approx((1 + 4 + 2) / 12)


def test_a_slot_beyond_the_trace_is_refused():
    with pytest.raises(ValueError, match="slot 1 is not among the 1 of the trace"):
        timeline.timeline("x", 1, STEPS)


def write_json(path, value):
    path.write_text(json.dumps(value))
    return path


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_files_are_known_by_their_content(tmp_path):
    sweep = read(write_json(tmp_path / "cpu.json", {"rows": ROWS}))
    assert isinstance(sweep, SweepFile)
    assert (sweep.label, list(sweep.rows)) == ("cpu", ROWS)
    steps = json.loads(json.dumps(STEPS))
    lines = read(write_lines(tmp_path / "static.jsonl", STEPS))
    assert isinstance(lines, TraceFile)
    assert (lines.label, lines.num_slots, list(lines.steps)) == ("static", 2, steps)
    whole = write_json(tmp_path / "x.json", {"label": "y", "num_slots": 5, "steps": STEPS})
    assert (read(whole).label, read(whole).num_slots) == ("y", 5)
    assert read(write_lines(tmp_path / "one.jsonl", STEPS[:1])).num_slots == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", "not json", '{"rows": []}', '{"rows": [{}]}'])
def test_other_files_are_refused_in_one_line(jaxserve_cli, tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    result = jaxserve_cli("plot", tmp_path / "x.json", "-o", tmp_path / "x.png")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "x.json" in line
    assert "neither a sweep" in line


def test_kinds_are_not_mixed(jaxserve_cli, tmp_path):
    files = [
        write_json(tmp_path / "a.json", {"rows": ROWS}),
        write_lines(tmp_path / "b.jsonl", STEPS),
    ]
    result = jaxserve_cli("plot", *files, "-o", tmp_path / "x.png")
    assert result.exit_code == 1
    assert "draw one kind in a picture" in result.stderr


def test_the_suffix_must_be_a_pictures(jaxserve_cli, tmp_path):
    sweep = write_json(tmp_path / "a.json", {"rows": ROWS})
    result = jaxserve_cli("plot", sweep, "-o", tmp_path / "x.pdf")
    assert result.exit_code == 1
    assert "end it in .png or .svg" in result.stderr


def test_without_matplotlib_the_remedy_is_named(jaxserve_cli, tmp_path, monkeypatch):
    for name in [m for m in sys.modules if m.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sweep = write_json(tmp_path / "a.json", {"rows": ROWS})
    result = jaxserve_cli("plot", sweep, "-o", tmp_path / "x.png")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "pip install 'jaxserve[plot]'" in line


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_sweeps_become_a_picture(jaxserve_cli, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    files = [
        write_json(tmp_path / f"{name}.json", {"rows": ROWS, "label": name}) for name in ("a", "b")
    ]
    out = tmp_path / f"x{suffix}"
    result = jaxserve_cli("plot", *files, "-o", out, "--title", "two $x_$ sweeps")
    assert result.exit_code == 0, result.output
    assert_is_picture(out)
    first = out.read_bytes()
    jaxserve_cli("plot", *files, "-o", out, "--title", "two $x_$ sweeps")
    assert out.read_bytes() == first


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_traces_become_a_picture(jaxserve_cli, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    files = [write_lines(tmp_path / f"{name}.jsonl", STEPS) for name in ("static", "continuous")]
    out = tmp_path / f"x{suffix}"
    result = jaxserve_cli("plot", *files, "-o", out, "--title", "$x_$")
    assert result.exit_code == 0, result.output
    assert_is_picture(out)


def test_a_picture_says_what_it_shows():
    pytest.importorskip("matplotlib")
    figure = curve.draw([curve.curve("mine", ROWS, "itl_mean")], "itl_mean")
    left, right, other = figure.axes
    assert left.get_xlabel() == "mean time between tokens, ms"
    assert left.get_ylabel() == "throughput, output tokens/s"
    legend = [text.get_text() for text in left.get_legend().get_texts()]
    assert legend == ["mine", "knee: batch 32, 1,900 tokens/s at 16.9 ms"]
    assert right.get_xlabel().startswith("batch size")
    assert other.get_ylabel() == "mean time between tokens, ms (dashed)"


def assert_is_picture(path):
    start = b"\x89PNG" if path.suffix == ".png" else b"<?xml"
    assert path.read_bytes().startswith(start)
