"""Every verb that needs a model, once, on a real engine with a tiny one."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from jaxserve.cli import main
from jaxserve.sampling_params import SamplingParams

MODEL = Path(__file__).parents[1] / "golden" / "llama-gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    from jaxserve.llm import LLM

    return LLM(
        str(MODEL),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=8,
        num_kv_blocks=65,
        batch_buckets=(8,),
        prefill_buckets=(16,),
        compilation_cache_dir=str(tmp_path_factory.mktemp("executables")),
    )


@pytest.fixture
def call(llm, monkeypatch):
    """Call `jaxserve ...`, whose model is the one of this module."""
    monkeypatch.setattr("jaxserve.llm.LLM", lambda config: llm)

    def invoke(*arguments, stdin=None, exit_code=0):
        result = CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)
        assert result.exit_code == exit_code, result.output
        llm.engine.check()
        assert not llm.engine.has_work
        return result

    return invoke


def test_generate_gives_what_python_gives(call, llm):
    prompts = [f"prompt {number}" for number in range(9)]
    result = call("generate", *prompts, "--json", "--max-tokens", 6, "--temperature", 0, "--stats")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    expected = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
    assert [record["prompt"] for record in found] == prompts
    assert [record["token_ids"] for record in found] == [sample.token_ids for sample in expected]
    assert [record["text"] for record in found] == [sample.text for sample in expected]
    assert all(record["metrics"]["ttft"] > 0 for record in found)
    assert result.stderr.splitlines()[-1].endswith("compilations after ready = 0")


def test_generate_streams_the_same_text(call, llm):
    (output,) = llm.generate("hello", GREEDY)
    result = call("generate", "hello", "--max-tokens", 6, "--temperature", 0)
    assert result.stdout == output.outputs[0].text + "\n"


def test_generate_with_every_report(call):
    result = call(
        *("generate", "hello", "--json", "-n", 2, "--seed", 1, "--max-tokens", 3),
        *("--logprobs", 2, "--prompt-logprobs", 1),
    )
    for line in result.stdout.splitlines():
        record = json.loads(line)
        assert len(record["logprobs"]) == len(record["token_ids"])
        assert record["prompt_logprobs"][0] is None
        assert len(record["prompt_logprobs"]) == len("hello")


def test_generate_refuses_what_cannot_fit(call):
    result = call("generate", "x" * 500, exit_code=1)
    assert result.stderr.startswith("Error: ")
    assert "500" in result.stderr
    assert "128" in result.stderr


def test_chat(call, llm):
    message = {"role": "user", "content": "hi"}
    (output,) = llm.chat([message], GREEDY)
    result = call("chat", "--temperature", 0, "--max-tokens", 6, stdin="hi\n/exit\n")
    assert result.stdout == output.outputs[0].text + "\n"


def test_score(call, llm):
    record = json.loads(call("score", "hello there", "--json").stdout)
    (score,) = llm.score(["hello there"])
    assert record["token_logprobs"] == pytest.approx([*score.token_logprobs])
    assert record["perplexity"] == pytest.approx(math.exp(score.mean_nll))


def test_run_batch(call, llm, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.loading.source.locate", lambda *_: (None, None, "tiny"))
    shared = {"max_tokens": 6, "temperature": 0}
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"url": "/v1/completions", "body": {"prompt": "hello", **shared}},
        {"url": "/v1/chat/completions", "body": {"messages": messages, **shared}},
        {"url": "/v1/completions", "body": {"prompt": "x" * 500}},
        {"url": "/v1/completions", "body": {"prompt": ["a", "x" * 500], **shared}},
        {"url": "/v1/completions", "body": {"prompt": "a", "logit_bias": {"5000": 1}}},
        {
            "url": "/v1/completions",
            "body": {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1},
        },
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "\n".join(json.dumps({"custom_id": str(n), **line}) for n, line in enumerate(lines))
    )
    call("run-batch", "-i", source, "-o", target, exit_code=1)
    found = {r["custom_id"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert {key for key, r in found.items() if r["error"] is None} == {"0", "1", "5"}
    choices = {key: found[key]["response"]["body"].get("choices") for key in found}
    (completion,) = llm.generate("hello", GREEDY)
    assert choices["0"][0]["text"] == completion.outputs[0].text
    (chat,) = llm.chat(messages, GREEDY)
    assert choices["1"][0]["message"]["content"] == chat.outputs[0].text
    (score,) = llm.score(["hello"])
    logprobs = choices["5"][0]["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(score.token_logprobs[1:])
    assert not llm.engine._requests

    before = target.read_bytes()
    call("run-batch", "-i", source, "-o", target, "--resume", exit_code=1)
    assert len(target.read_bytes().splitlines()) == len(lines)
    assert target.read_bytes().splitlines()[:3] == [
        line for line in before.splitlines() if b'"error":null' in line
    ]


def test_bench_throughput(call, tmp_path):
    requests = [{"prompt_token_ids": list(range(n, n + 9)), "max_tokens": n} for n in range(1, 9)]
    (tmp_path / "w.json").write_text(json.dumps(requests))
    result = call(
        *("bench", "throughput", "--workload", tmp_path / "w.json"), "--ignore-eos", "--json"
    )
    report = json.loads(result.stdout)
    assert report["output_tokens"] == sum(range(1, 9))
    assert report["steps"] >= 8
    assert report["compilations_after_ready"] == 0
    assert 0 < report["slot_utilisation"] <= 1
    assert 0 <= report["padded_share"] < 1


def test_inspect(call):
    facts = json.loads(call("inspect", "--json").stdout)
    assert facts["model"]["num_layers"] == 2
    assert facts["num_pages"] == 65
    assert len(facts["shapes"]) == 2
    assert "kv_cache_bytes" in call("inspect").stdout
