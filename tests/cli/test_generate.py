"""`jaxserve generate`: order, formats, streaming."""

import json

import pytest

from tests.cli.fakes import answer


def records(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_has_one_object_per_prompt_in_order(jaxserve_cli):
    first, second = records(
        jaxserve_cli("generate", "P1", "P2", "--max-tokens", 4, "--temperature", 0, "--json")
    )
    assert first["prompt"] == "P1"
    assert first["text"] == answer("P1", 4)
    assert first["token_ids"] == list(answer("P1", 4).encode())
    assert first["finish_reason"] == "length"
    assert first["metrics"]["ttft"] == 0.25
    assert {"queue_time", "itl", "num_cached_tokens"} <= first["metrics"].keys()
    assert second["text"] == answer("P2", 4)


def test_json_is_flushed_as_soon_as_all_before_it_are_done(jaxserve_cli, fake_model, monkeypatch):
    """With one slot the first of three answers is out long before the last step."""
    shown = []
    monkeypatch.setattr(
        "jaxserve.cli.generate.click.echo",
        lambda *args, **kwargs: shown.append(fake_model[0].engine.num_steps),
    )
    jaxserve_cli("generate", "a", "b", "c", "--json", "--max-num-seqs", 1, "--max-tokens", 5)
    assert shown == [5, 10, 15]


def test_a_later_prompt_that_ends_first_waits_its_turn(jaxserve_cli):
    stop = ord(answer("b", 1))
    first, second = records(
        jaxserve_cli("generate", "a", "b", "--json", "--max-tokens", 8, "--stop-token-ids", stop)
    )
    assert (first["prompt"], len(first["token_ids"])) == ("a", 2)
    assert (second["prompt"], len(second["token_ids"])) == ("b", 1)


def test_several_samples_have_an_index(jaxserve_cli):
    found = records(jaxserve_cli("generate", "a", "b", "-n", 2, "--json", "--max-tokens", 3))
    assert [(r["prompt"], r["index"], r["text"]) for r in found] == [
        (prompt, index, answer(prompt, 3, index)) for prompt in "ab" for index in (0, 1)
    ]


def test_token_id_prompts_and_logprobs(jaxserve_cli, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_token_ids": [65, 66]}\n')
    (record,) = records(
        jaxserve_cli(
            *("generate", "--prompt-file", file, "--json", "--max-tokens", 1),
            *("--logprobs", 1, "--prompt-logprobs", 0),
        )
    )
    assert record["prompt"] is None
    assert record["prompt_token_ids"] == [65, 66]
    (position,) = record["logprobs"]
    assert position[str(record["token_ids"][0])]["logprob"] == -3.0
    assert record["prompt_logprobs"][0] is None
    assert "66" in record["prompt_logprobs"][1]


@pytest.mark.parametrize("stdin", ["a\nb\n", '{"prompt": "a"}\n{"prompt": "b"}\n'])
def test_prompts_from_stdin(jaxserve_cli, stdin):
    found = records(jaxserve_cli("generate", "--json", "--max-tokens", 1, stdin=stdin))
    assert [record["prompt"] for record in found] == ["a", "b"]


def test_one_prompt_streams_its_text(jaxserve_cli, monkeypatch, fake_model):
    pieces = []
    monkeypatch.setattr(
        "jaxserve.cli.generate.click.echo",
        lambda text="", **kwargs: pieces.append((text, fake_model[0].engine.num_steps)),
    )
    jaxserve_cli("generate", "a", "--max-tokens", 3)
    assert pieces == [*zip(answer("a", 3), (1, 2, 3), strict=True), ("", 3)]


def test_text_of_one_prompt_is_the_text_alone(jaxserve_cli):
    assert jaxserve_cli("generate", "a", "--max-tokens", 3).stdout == answer("a", 3) + "\n"


def test_text_of_several_prompts_names_each(jaxserve_cli):
    shown = jaxserve_cli("generate", "a", "b", "--max-tokens", 3).stdout
    assert shown == f"[1] a\n{answer('a', 3)}\n\n[2] b\n{answer('b', 3)}\n\n"


def test_stats_end_in_a_summary_line_on_stderr(jaxserve_cli):
    result = jaxserve_cli("generate", *"abcdefgh", "--json", "--stats")
    assert len(records(result)) == 8
    summary = result.stderr.splitlines()[-1]
    assert summary.startswith("8 requests, 128 tokens in ")
    assert "tokens/s, TTFT median 0.25 s, slot utilisation 0.5" in summary
    assert summary.endswith("compilations after ready = 0")


def test_a_failed_prompt_costs_its_own_answer_and_the_exit_code(jaxserve_cli):
    result = jaxserve_cli("generate", "a", "FAIL", "b", "--json", "--max-tokens", 4)
    assert result.exit_code == 1
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["finish_reason"] for record in found] == ["length", "error", "length"]
    assert found[1]["error"] == "the logits were not finite"
    assert "1 of 3 prompts" in result.stderr
