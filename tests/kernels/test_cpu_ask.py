"""A program that asks the host: what is asked, what the answer does, and who may be gone."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.ask import NOBODY, HostAnswers, ask
from tests.kernels.cpu_kernels import need

ROWS, WORDS, STRIDE = 4, 3, 5
ASKS = jnp.array([1, 0, 1, 1], jnp.int32)
TOKENS = jnp.array([7, 8, 9, 10], jnp.int32)


@pytest.fixture(scope="module")
def program() -> Callable[..., tuple[jax.Array, jax.Array]]:
    kernels = need("avx2")

    @jax.jit
    def run(whom: jax.Array, asks: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ask(kernels, whom, asks, token, token, WORDS)

    return run


class Owner:
    """Answers with words made of the row, the token and the number; stops the last row."""

    def __init__(self) -> None:
        self.host = HostAnswers(ROWS, STRIDE, self.answer)
        self.numbers: list[int] = []

    def whom(self, number: int) -> jax.Array:
        return jnp.array(self.host.whom(number), jnp.int32)

    def answer(self, number: int) -> None:
        self.numbers.append(number)
        for row in range(ROWS):
            self.host.words[row] = 1000 * row + 10 * self.host.token[row] + number
        self.host.stops[ROWS - 1] = 1


def test_only_rows_that_ask_are_limited(
    program: Callable[..., tuple[jax.Array, jax.Array]],
) -> None:
    owner = Owner()
    words, stops = program(owner.whom(3), ASKS, TOKENS)
    assert np.asarray(words).tolist() == [
        [73] * WORDS,
        [-1] * WORDS,
        [2093] * WORDS,
        [-1] * WORDS,
    ]
    assert np.asarray(stops).tolist() == [0, 0, 0, 1]
    assert owner.numbers == [3]


def test_nobody_allows_everything(program: Callable[..., tuple[jax.Array, jax.Array]]) -> None:
    words, stops = program(jnp.array(NOBODY, jnp.int32), ASKS, TOKENS)
    assert (np.asarray(words) == -1).all()
    assert not np.asarray(stops).any()


def test_a_loop_asks_once_an_iteration() -> None:
    kernels, owner = need("avx2"), Owner()

    @jax.jit
    def run(whom: jax.Array) -> jax.Array:
        def once(_: jax.Array, token: jax.Array) -> jax.Array:
            words, _ = ask(kernels, whom, jnp.ones_like(token), token, token, WORDS)
            return words[:, 0] % 1000 // 10 + 1

        return jax.lax.fori_loop(0, 5, once, TOKENS)

    assert np.asarray(run(owner.whom(0)))[:3].tolist() == [12, 13, 14]
    assert owner.numbers == [0] * 5


def test_what_the_answer_raises_stops_its_rows(
    program: Callable[..., tuple[jax.Array, jax.Array]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(self: Owner, number: int) -> None:
        raise KeyError("a matcher")

    monkeypatch.setattr(Owner, "answer", fail)
    owner = Owner()
    _, stops = program(owner.whom(1), ASKS, TOKENS)
    assert np.asarray(stops).tolist() == ASKS.tolist()
    assert "could not be answered" in caplog.text


def test_whoever_is_gone_stops_its_rows(
    program: Callable[..., tuple[jax.Array, jax.Array]],
) -> None:
    owner = Owner()
    whom = owner.whom(1)
    del owner
    gc.collect()
    _, stops = program(whom, ASKS, TOKENS)
    assert np.asarray(stops).tolist() == ASKS.tolist()


def test_whoever_is_closed_allows_everything(
    program: Callable[..., tuple[jax.Array, jax.Array]],
) -> None:
    owner = Owner()
    owner.host.close()
    words, stops = program(owner.whom(1), ASKS, TOKENS)
    assert (np.asarray(words) == -1).all()
    assert not np.asarray(stops).any()
    assert owner.numbers == []


def test_a_process_can_end_while_it_is_asked() -> None:
    """A call into an interpreter that is ending would never return."""
    need("avx2")
    script = """
        import time
        import jax, jax.numpy as jnp, numpy as np
        from jaxserve.files import cache_directory
        from pallas_kernels import cpu
        from pallas_kernels.cpu.ask import HostAnswers, ask

        cpu.load(cpu.instruction_set("avx2"), cache_directory(None) / "kernels")

        class Owner:
            def answer(self, number):
                asked.append(number)
                time.sleep(0.002)

        asked, owner = [], Owner()
        host = HostAnswers(1, 1, owner.answer)

        @jax.jit
        def run(whom, token):
            def once(_, state):
                token, x = state
                words, _ = ask("avx2", whom, jnp.ones_like(token), token, x, 1)
                return words[:, 0], x @ x  # XLA runs what is cheap before the call returns
            return jax.lax.fori_loop(0, 2000, once, (token, jnp.eye(64)))[0]

        out = run(np.array(host.whom(1), np.int32), np.zeros(1, np.int32))
        while not asked:
            time.sleep(0.001)
        print(out.is_ready())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
