"""The endpoints beside inference, on a real server; and a server whose engine has died."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator

import jaxserve
from jaxserve.async_llm import AsyncLLM
from jaxserve.server import ServerConfig
from jaxserve.server.app import make_app
from jaxserve.server.metrics import Metrics
from jaxserve.server.openapi import description
from tests.server.model import CHATML, IM_END, IM_START, VOCAB
from tests.server.process import ServerProcess
from tests.server.requests import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ask,
    canary,
    parse,
    prepared,
    refused,
)
from tests.server.scripted import PATIENCE_S, ScriptedEngine, scripted_model

PAGE = "http://localhost:3000"


def test_health_version_and_info(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 200
    assert client.get("/version").json() == {"version": jaxserve.__version__}
    info = client.get("/server_info").json()
    assert info["model"] == "tiny"
    assert info["engine_config"]["max_num_seqs"] == info["engine"]["max_num_seqs"] == 8
    assert info["server_config"]["host"] == "127.0.0.1"


def test_tokens_there_and_back(client: httpx.Client) -> None:
    text = "<|im_start|>Grüße 😀"
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == [IM_START, *text.removeprefix("<|im_start|>").encode()]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    assert answer["token_strs"][:3] == ["<|im_start|>", "G", "r"]
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}
    bare = client.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()
    assert bare["tokens"] == [ord("x")]
    assert bare["token_strs"] is None


def test_tokens_of_a_conversation(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"messages": HELLO}).json()
    text = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    usage = ask(client, CHAT, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == answer["count"]
    shorter = client.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False})
    assert shorter.json()["tokens"][-2:] == [IM_END, ord("\n")]


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "either"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [VOCAB]}, "vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "vocabulary"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/abort_request", {"request_id": 5}, "request_id"),
    ],
)
def test_bodies_that_are_refused(client: httpx.Client, path: str, body: object, word: str) -> None:
    refused(client.post(path, json=body), word)


def test_unknown_models_are_refused_everywhere(client: httpx.Client) -> None:
    refused(client.post("/tokenize", json={"prompt": "x", "model": "nope"}), status=404)
    refused(client.post("/detokenize", json={"tokens": [1], "model": "nope"}), status=404)


def test_tokenizer_info(client: httpx.Client) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert info["chat_template"] == CHATML


def test_the_profiler_is_off_by_default(client: httpx.Client) -> None:
    for path in ("/start_profile", "/stop_profile"):
        refused(client.post(path), status=404)


def test_the_profiler_writes_traces(
    model_directory: Path, server_cache: Path, tmp_path: Path
) -> None:
    flags = ("--profiler-dir", tmp_path / "traces")
    with (
        ServerProcess(model_directory, *flags, cache=server_cache) as process,
        process.client() as client,
    ):
        refused(client.post("/stop_profile"), "no profile", status=409)
        assert client.post("/start_profile").status_code == 200
        refused(client.post("/start_profile"), "stop it first", status=409)
        canary(client)
        assert client.post("/stop_profile").status_code == 200
        assert client.get("/health").status_code == 200
    assert any(path.is_file() for path in (tmp_path / "traces").rglob("*"))


def test_a_port_in_use_is_one_line(
    server: ServerProcess, model_directory: Path, tmp_path: Path
) -> None:
    """And is found before the model is loaded."""
    port = server.url.rpartition(":")[2]
    with pytest.raises(RuntimeError) as failure:
        ServerProcess(model_directory, "--port", port, cache=tmp_path).start()
    (line,) = str(failure.value).splitlines()[1:]
    assert line.startswith(f"Error: cannot listen on 127.0.0.1:{port}")


def test_an_unknown_response_template_is_one_line(model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as failure:
        ServerProcess(model_directory, "--response-template", "nope", cache=tmp_path).start()
    (line,) = str(failure.value).splitlines()[1:]
    assert line.startswith("Error: response template 'nope' is neither a file nor one of auto")


def test_the_description_fits_what_is_served(client: httpx.Client) -> None:
    served = client.get("/openapi.json").json()
    assert served == msgspec.json.decode(msgspec.json.encode(description()))
    components = {"components": served["components"]}

    def valid(schema: object, value: object) -> None:
        Draft202012Validator({"allOf": [schema], **components}).validate(value)

    for path, body in (
        (COMPLETIONS, prepared(COMPLETIONS, {"logprobs": 1, "max_tokens": 3})),
        (CHAT, prepared(CHAT, {"logprobs": True, "max_tokens": 3})),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [65]}),
        ("/abort_request", {"request_id": "none"}),
    ):
        post = served["paths"][path]["post"]
        valid(post["requestBody"]["content"]["application/json"]["schema"], body)
        response = client.post(path, json=body)
        content = post["responses"]["200"]["content"]["application/json"]
        valid(content["schema"], response.json())
        error = client.post(path, json=[])
        content = post["responses"]["4XX"]["content"]["application/json"]
        valid(content["schema"], error.json())
    for path, operations in served["paths"].items():
        if "get" in operations:
            assert client.get(path.replace("{model}", "tiny")).status_code == 200


def test_responses_are_counted_by_path(client: httpx.Client) -> None:
    client.get("/v1/models")
    client.get("/nowhere/at/all")
    text = client.get("/metrics").text
    assert 'handler="/v1/models"' in text
    assert 'handler="other"' in text
    assert "/nowhere" not in text


def test_a_dead_engine_is_503_and_ends_its_streams_with_an_error() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        llm = AsyncLLM.over(scripted_model(engine))
        metrics = Metrics("scripted")
        app = make_app(llm, ServerConfig(), metrics)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            assert (await client.get("/health")).status_code == 200
            bodies = [{"prompt": "a", "stream": stream} for stream in (True, False)]
            asked = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
            while len(engine.outputs) < 2:
                await asyncio.sleep(0.001)
            engine.steps.release()
            engine.fail_with = RuntimeError("the device is gone")
            engine.steps.release()
            streamed, whole = [await task for task in asked]
            stream = parse(streamed.text.splitlines())
            (error,) = stream.errors
            assert "the device is gone" in error["message"]
            assert stream.num_done == 1
            refused(whole, "the device is gone", status=500)
            refused(await client.get("/health"), "failed", status=503)
            refused(await client.get("/ready"), "failed", status=503)
            later = await client.post(COMPLETIONS, json={"prompt": "a"})
            refused(later, "failed", status=503)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_bug_is_500_without_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        llm = AsyncLLM.over(scripted_model(ScriptedEngine()))
        app = make_app(llm, ServerConfig(allowed_origins=("*",)), Metrics("scripted"))
        transport = httpx.ASGITransport(app)
        llm.tokenizer.encode = None  # type: ignore[assignment, method-assign]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            named = {"origin": PAGE, "x-request-id": "mine"}
            response = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=named)
            refused(response, "log has the reason", status=500)
            # A page can read it, its client can find it in a log, an alert can count it.
            assert response.headers["access-control-allow-origin"] == "*"
            assert response.headers["x-request-id"] == "mine"
            counted = f'handler="{COMPLETIONS}",method="POST",status="500"'
            assert counted in (await client.get("/metrics")).text
        assert "'NoneType' object is not callable" in caplog.text

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_bug_in_the_middle_of_a_stream_ends_it_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jaxserve.protocol.completion_stream import StreamedCompletion

    def push(*_: object) -> list[object]:
        raise RuntimeError("a bug")

    async def main() -> None:
        engine = ScriptedEngine()
        llm = AsyncLLM.over(scripted_model(engine))
        app = make_app(llm, ServerConfig(), Metrics("scripted"))
        transport = httpx.ASGITransport(app)
        monkeypatch.setattr(StreamedCompletion, "push", push)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            engine.steps.release()
            response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
            stream = parse(response.text.splitlines())
            (error,) = stream.errors
            assert error["code"] == "internal_error"
            assert stream.num_done == 1
        assert app.state.service.abort(response.headers["x-request-id"]) == 0
        await llm.close()
        assert not engine.outputs

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize(
    ("allowed", "answered"),
    [((), None), ((PAGE,), PAGE), (("https://other", PAGE), PAGE), (("*",), "*")],
)
def test_pages_of_allowed_origins_may_ask(allowed: tuple[str, ...], answered: str | None) -> None:
    async def main() -> None:
        llm = AsyncLLM.over(scripted_model(ScriptedEngine()))
        config = ServerConfig(allowed_origins=allowed, api_key="secret")
        transport = httpx.ASGITransport(make_app(llm, config, Metrics("scripted")))
        preflight = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = await client.options(COMPLETIONS, headers=preflight)
            assert asked.headers.get("access-control-allow-origin") == answered
            assert asked.is_success == (answered is not None)
            # Its script can read what was wrong, and when to come back.
            response = await client.post(COMPLETIONS, json={}, headers={"origin": PAGE})
            refused(response, "API key", status=401)
            assert response.headers.get("access-control-allow-origin") == answered
            exposed = response.headers.get("access-control-expose-headers", "")
            assert ("Retry-After" in exposed) == (answered is not None)
            other = await client.get("/health", headers={"origin": "http://elsewhere"})
            expected = "*" if answered == "*" else None
            assert other.headers.get("access-control-allow-origin") == expected
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("max_queue", 0),
        ("max_body_mib", 0.0),
        ("drain_timeout_s", -1.0),
        ("keep_alive_s", 0),
        ("api_key", ""),
        ("served_model_name", ("",)),
        ("allowed_origins", ("http://localhost:3000/",)),
        ("allowed_origins", ("localhost:3000",)),
        ("allowed_origins", ("http://a,http://b",)),
    ],
)
def test_settings_out_of_range(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        ServerConfig(**{name: value})  # type: ignore[arg-type]
