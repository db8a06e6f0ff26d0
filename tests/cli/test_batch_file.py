"""Batch files without an engine: what a line is, and what is still to be done."""

import json

import pytest

from jaxserve.batch_file import BatchJob
from jaxserve.batch_line import LineError, LineRequest, parse_line

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
CHAT = {
    "custom_id": "c",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "hi"}]},
}


def line(**changes):
    return json.dumps({**GOOD, **changes}).encode()


@pytest.mark.parametrize("raw", [line(), json.dumps(CHAT).encode(), b"  " + line() + b" \t"])
def test_good_lines(raw):
    assert isinstance(parse_line(raw, "m"), LineRequest)


@pytest.mark.parametrize(
    ("raw", "code", "custom_id"),
    [
        (b"{bad", "invalid_json", None),
        (line() + b"}", "invalid_json", None),
        (b"[1,2]", "invalid_request", None),
        (b"null", "invalid_request", None),
        (b"3", "invalid_request", None),
        (b'"text"', "invalid_request", None),
        (b"[" * 100_000, "invalid_json", None),
        (b'{"custom_id": "a\xff"}', "invalid_json", None),
        (b'{"custom_id": "a", "x": "\xff"}', "invalid_json", None),
        (b'{"custom_id": "a", "x": 1e999}', "invalid_json", None),
        (b'{"custom_id": "a", "x": NaN}', "invalid_json", None),
        (b"{}", "missing_required_parameter", None),
        (line(custom_id=None), "missing_required_parameter", None),
        (line(custom_id=7), "invalid_type", None),
        (line(method="GET"), "invalid_method", "a"),
        (line(method=None), "invalid_method", "a"),
        (line(url="/v1/embeddings"), "invalid_url", "a"),
        (line(url=None), "invalid_url", "a"),
        (line(url=["/v1/completions"]), "invalid_url", "a"),
        (line(body=None), "missing_required_parameter", "a"),
        (line(body=[1]), "missing_required_parameter", "a"),
        (line(body="text"), "missing_required_parameter", "a"),
        (line(body={}), "missing_required_parameter", "a"),
        (line(body={"prompt": 5}), "invalid_type", "a"),
        (line(body={"prompt": "x", "temperature": "hot"}), "invalid_type", "a"),
        (line(body={"prompt": "x", "temperature": -1}), "invalid_value", "a"),
        (line(body={"prompt": "x", "stream": True}), "invalid_value", "a"),
        (line(body={"prompt": "x", "model": "nope"}), "model_not_found", "a"),
    ],
)
def test_bad_lines_name_what_is_wrong_and_whose_they_are(raw, code, custom_id):
    parsed = parse_line(raw, "m")
    assert isinstance(parsed, LineError)
    assert parsed.error.code == code
    assert parsed.custom_id == custom_id


def test_the_request_id_is_of_the_content():
    def request_id(raw, model="m"):
        return parse_line(raw, model).request_id

    same = request_id(line())
    assert request_id(line(custom_id="b")) == same
    assert request_id(json.dumps(dict(reversed(GOOD.items())), indent=1).encode()) == same
    others = [
        request_id(line(body={"prompt": "y"})),
        request_id(line(body={"prompt": "x", "max_tokens": 5})),
        request_id(line(url="/v1/chat/completions")),
        request_id(line(), "another model"),
        request_id(b"{bad"),
    ]
    assert len({same, *others}) == 6


def test_lines_are_found_whatever_their_ends(tmp_path):
    content = b"\xef\xbb\xbf" + line(custom_id="1") + b"\r\n\r\n \t\n" + line(custom_id="2")
    (tmp_path / "in").write_bytes(content)
    job = BatchJob.open(tmp_path / "in", tmp_path / "out", "m")
    assert [found.number for found in job.lines] == [1, 4]
    assert [parsed.custom_id for _, parsed in job.requests()] == ["1", "2"]
    assert list(job.failures()) == []


def test_opening_a_job_changes_nothing(tmp_path):
    (tmp_path / "in").write_bytes(line())
    BatchJob.open(tmp_path / "in", tmp_path / "out", "m", resume=True)
    assert not (tmp_path / "out").exists()


def test_duplicates_are_refused_with_their_lines(tmp_path):
    ids = ["a", "b", "a", "c", "b", "a"]
    (tmp_path / "in").write_bytes(b"\n".join(line(custom_id=custom_id) for custom_id in ids))
    with pytest.raises(ValueError, match="'a' on lines 1, 3, 6; 'b' on lines 2, 5"):
        BatchJob.open(tmp_path / "in", tmp_path / "out", "m")


def test_a_bad_line_can_be_a_duplicate_too(tmp_path):
    (tmp_path / "in").write_bytes(line() + b"\n" + line(body=None))
    with pytest.raises(ValueError, match="'a' on lines 1, 2"):
        BatchJob.open(tmp_path / "in", tmp_path / "out", "m")


def test_many_duplicates_are_cut_short(tmp_path):
    lines = [line(custom_id=str(number)) for number in range(9)] * 2
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="and 4 more"):
        BatchJob.open(tmp_path / "in", tmp_path / "out", "m")


@pytest.mark.parametrize(
    "content", [b"important notes\n", b'{"id": 5}\n', b"[]\n", b"notes\n{", line() + b"\n"]
)
def test_a_file_of_something_else_is_not_touched(tmp_path, content):
    (tmp_path / "in").write_bytes(line())
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(ValueError, match=r"line 1 of .* is not a batch result"):
        BatchJob.open(tmp_path / "in", tmp_path / "out", "m", resume=True)
    assert (tmp_path / "out").read_bytes() == content


def test_an_output_is_continued_only_on_request(tmp_path):
    (tmp_path / "in").write_bytes(line())
    (tmp_path / "out").write_bytes(b"x")
    with pytest.raises(ValueError, match="--resume"):
        BatchJob.open(tmp_path / "in", tmp_path / "out", "m")
    assert (tmp_path / "out").read_bytes() == b"x"


def test_an_empty_output_is_as_good_as_none(tmp_path):
    (tmp_path / "in").write_bytes(line())
    (tmp_path / "out").touch()
    assert len(BatchJob.open(tmp_path / "in", tmp_path / "out", "m").lines) == 1


def test_input_and_output_must_differ(tmp_path):
    (tmp_path / "in").write_bytes(line())
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for output in ("in", "link"):
        with pytest.raises(ValueError, match="same file"):
            BatchJob.open(tmp_path / "in", tmp_path / output, "m", resume=True)
