from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.loading import load_config, load_params, load_tokenizer, resolve
from jaxserve.loading.orbax import load_orbax_params, save_orbax
from tests.loading.tiny import HF, assert_same_tree, flat, keep

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def golden_tree(golden: Path, dtype=F32):
    source = resolve(EngineConfig(model=str(golden / "llama-gqa")))
    config = load_config(source)
    return source, config, load_params(source, config, dtype, keep)


@pytest.fixture(scope="module")
def saved(golden, tmp_path_factory):
    """An Orbax directory of a golden model."""
    source, config, tree = golden_tree(golden)
    directory = tmp_path_factory.mktemp("orbax") / "model"
    save_orbax(directory, config, tree, source.files)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_round_trip(saved, golden):
    source = resolve(EngineConfig(model=str(saved)))
    assert (source.format, source.name) == ("orbax", "model")
    config = load_config(source)
    original, want_config, want = golden_tree(golden)
    assert config == want_config
    assert_same_tree(load_params(source, config, F32, keep), want)
    text = "the which"
    assert load_tokenizer(source).encode(text) == load_tokenizer(original).encode(text)


def test_dtype_asked_for_is_given(saved, golden):
    source, config, want = golden_tree(golden, BF16)
    source = resolve(EngineConfig(model=str(saved)))
    assert_same_tree(load_params(source, config, BF16, keep), want)


def test_saving_twice_is_refused(saved, golden):
    _, config, tree = golden_tree(golden)
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        save_orbax(saved, config, tree)


LOAD = """
import sys, numpy as np
from jaxserve.config import EngineConfig
from jaxserve.loading import load_config, load_params, resolve
source = resolve(EngineConfig(model=sys.argv[1]))
try:
    load_params(source, load_config(source), np.dtype("float32"), lambda path, array: array)
except ValueError as error:
    print(error)
"""

# What is not a whole checkpoint is refused by name.


def test_unfinished_checkpoint(copy):
    (copy / "checkpoint").rename(copy / "checkpoint.orbax-checkpoint-tmp-123")
    with pytest.raises(ValueError, match=r"checkpoint\.orbax-checkpoint-tmp-123 is an unfinished"):
        resolve(EngineConfig(model=str(copy)))
    with pytest.raises(ValueError, match="is an unfinished"):
        resolve(EngineConfig(model=str(copy / "checkpoint.orbax-checkpoint-tmp-123")))


def test_interrupted_save(tmp_path, golden):
    """A process that dies while it writes leaves a directory that is refused."""
    code = (
        "import os, sys, numpy as np; from pathlib import Path; "
        "from jaxserve.config import EngineConfig; from jaxserve.loading import *; "
        "import orbax.checkpoint as ocp; "
        "from orbax.checkpoint._src.path import atomicity; "
        "from jaxserve.loading.orbax import save_orbax; "
        f"s = resolve(EngineConfig(model={str(golden / 'llama-gqa')!r})); c = load_config(s); "
        "t = load_params(s, c, np.dtype(np.float32), lambda p, a: a); "
        "atomicity.AtomicRenameTemporaryPath.finalize = lambda *a, **k: os._exit(9); "
        f"save_orbax(Path({str(tmp_path / 'm')!r}), c, t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    with pytest.raises(ValueError, match=r"checkpoint\.orbax-checkpoint-tmp.* is an unfinished"):
        resolve(EngineConfig(model=str(tmp_path / "m")))


def test_bare_checkpoint(saved):
    with pytest.raises(ValueError, match="bare Orbax checkpoint"):
        resolve(EngineConfig(model=str(saved / "checkpoint")))


def test_missing_path(tmp_path):
    with pytest.raises(ValueError, match="no such file or directory"):
        resolve(EngineConfig(model=str(tmp_path / "none"), load_format="orbax"))


def test_missing_checkpoint(tmp_path, golden):
    _, config, _ = golden_tree(golden)
    with pytest.raises(ValueError, match="has no 'checkpoint' directory"):
        load_orbax_params(tmp_path, config, F32, keep)


def test_damaged_checkpoint(copy):
    """In a process of its own: the storage library's threads outlive the failure."""
    shutil.rmtree(copy / "checkpoint" / "d")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(copy)], capture_output=True, text=True, check=False
    )
    assert "is not a readable Orbax checkpoint" in done.stdout


def test_empty_checkpoint(copy):
    shutil.rmtree(copy / "checkpoint")
    (copy / "checkpoint").mkdir()
    source = resolve(EngineConfig(model=str(copy)))
    with pytest.raises(ValueError, match="checkpoint is not a readable Orbax checkpoint"):
        load_params(source, load_config(source), F32, keep)


def test_leaves_that_do_not_fit_are_named(copy):
    config = json.loads((copy / "config.json").read_text())
    changes = {"num_hidden_layers": 3, "intermediate_size": 71, "tie_word_embeddings": False}
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    source = resolve(EngineConfig(model=str(copy)))
    with pytest.raises(ValueError, match=r"missing layers\.2\.attn_norm; .*missing head") as raised:
        load_params(source, load_config(source), F32, keep)
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"unexpected layers\.1\.attn\.out") as raised:
        load_params(source, load_config(source), F32, keep)
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 71}))
    with pytest.raises(ValueError, match="gate_up has shape") as raised:
        load_params(source, load_config(source), F32, keep)
    assert "(72, 2, 64), not (71, 2, 64)" in str(raised.value)


# Another layout: saved by eight devices, restored on two and on one.

SAVE = """
import sys, jax, numpy as np
from pathlib import Path
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxserve.config import EngineConfig
from jaxserve.loading import load_config, load_params, resolve
from jaxserve.loading.orbax import save_orbax
assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()), "x")
def put(path, array):
    spec = PartitionSpec("x") if array.shape[0] % 8 == 0 else PartitionSpec()
    return jax.device_put(array, NamedSharding(mesh, spec))
source = resolve(EngineConfig(model=sys.argv[1], load_format="dummy", seed=5))
config = load_config(source)
tree = load_params(source, config, np.dtype("bfloat16"), put)
assert len(tree["embed"].sharding.device_set) == 8 and not tree["embed"].is_fully_replicated
save_orbax(Path(sys.argv[2]), config, tree)
"""

RESTORE = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxserve.config import EngineConfig
from jaxserve.loading import load_config, load_params, resolve
assert len(jax.devices()) == 2
source = resolve(EngineConfig(model=sys.argv[1]))
config = load_config(source)
for devices in (1, 2):
    mesh = Mesh(np.array(jax.devices()[:devices]), "x")
    def put(path, array):
        spec = PartitionSpec("x") if array.shape[0] % devices == 0 else PartitionSpec()
        return jax.device_put(array, NamedSharding(mesh, spec))
    tree = load_params(source, config, np.dtype("float32"), put)
    for leaf in jax.tree.leaves(tree):
        assert leaf.dtype == np.float32
        assert len(leaf.sharding.device_set) == devices
    host = load_params(source, config, np.dtype("float32"), lambda path, array: array)
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), tree, host)
    assert all(jax.tree.leaves(same))
"""


def run(code: str, num_devices: int, *arguments: object) -> None:
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_saved_by_eight_devices_restored_on_two_and_one(tmp_path):
    sizes = {"vocab_size": 40, "num_key_value_heads": 3, "tie_word_embeddings": True}
    (tmp_path / "mini.json").write_text(json.dumps({**HF, **sizes}))
    run(SAVE, 8, tmp_path / "mini.json", tmp_path / "saved")

    dummy = resolve(EngineConfig(model=str(tmp_path / "mini.json"), load_format="dummy", seed=5))
    config = load_config(dummy)
    want = load_params(dummy, config, BF16, keep)
    source = resolve(EngineConfig(model=str(tmp_path / "saved")))
    assert_same_tree(load_params(source, config, BF16, keep), want)
    assert {leaf.dtype for leaf in flat(load_params(source, config, F32, keep)).values()} == {F32}

    run(RESTORE, 2, tmp_path / "saved")
