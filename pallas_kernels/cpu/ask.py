"""Asking the host while a program runs: what each row's next token may be.

A program on a CPU shares its memory with the host.  So a step whose tokens depend on what only the
host can say, such as the state of a grammar, need not end for that: it hands over the rows' newest
tokens, waits, and goes on with the answer.  Whom it asks is an operand, the address of a
`HostAnswers`, so that an executable may be kept and used by any process.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import time
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.cpu.library import target

log = logging.getLogger(__name__)

WHOM = 3
"""Numbers that say whom to ask and about what."""
NOBODY = (0, 0, 0)
"""Whom to ask where nothing is to be asked: every row goes on, and everything is allowed."""

_Answer = ctypes.CFUNCTYPE(None, ctypes.c_int32)


class _Memory(ctypes.Structure):
    """`struct Host` of `src/ask.h`."""

    _fields_ = (
        ("answer", _Answer),
        ("asks", ctypes.c_void_p),
        ("token", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
        ("stride", ctypes.c_int32),
        ("active", ctypes.c_int32),
    )


_kept: list[HostAnswers] = []
"""Never freed: a program that nobody waits for may still ask.  An engine that has asked leaves its
masks behind: 200 KB at 32 rows and 49,152 tokens."""


@atexit.register
def _fall_silent() -> None:
    """Answer nobody any more: a thread that calls an interpreter which is ending never returns,
    and whoever waits for its program neither."""
    for host in _kept:
        host.close()


class HostAnswers:
    """Who answers, and the memory in which question and answer lie.

    One question at a time.  The function is called on a thread of XLA's; what it raises is logged,
    and stops all rows that ask.
    """

    asks: npt.NDArray[np.int32]  # [rows], 1 for rows that ask
    token: npt.NDArray[np.int32]  # [rows], their newest token
    words: npt.NDArray[np.int32]  # [rows, stride], to be filled with packed bits, id 0 the lowest
    stops: npt.NDArray[np.int32]  # [rows], to be set to 1 for a row that gets no further token

    def __init__(self, num_rows: int, stride: int, answer: Callable[[int], None]) -> None:
        """Prepare to answer.

        Args:
            num_rows: most rows of a program.
            stride: 32-bit words of a row's answer; a program may want fewer.
            answer: a bound method, which is told the number of the question.  It is not kept
                alive: once its object is gone, all rows are stopped.
        """
        self.asks, self.token, self.stops = (np.zeros(num_rows, np.int32) for _ in range(3))
        self.words = np.zeros((num_rows, stride), np.int32)
        self._method = weakref.WeakMethod(answer)
        arrays = (self.asks, self.token, self.words, self.stops)
        # Kept beside the structure: a thread may be about to call it when `close` takes it out.
        self._callback = _Answer(self._answer)
        self._memory = _Memory(self._callback, *(x.ctypes.data for x in arrays), stride)
        _kept.append(self)

    def whom(self, number: int) -> tuple[int, int, int]:
        """The operand of a program that is to ask this one, and the number of its question."""
        address = ctypes.addressof(self._memory)
        low, high = np.array([address], np.uint64).view(np.int32)
        return int(low), int(high), number

    def close(self) -> None:
        """Answer no more: all is allowed.  Returns when no question is being answered."""
        self._memory.answer = _Answer()
        time.sleep(0)  # lets go of the interpreter, and so orders what others see
        while self._memory.active:
            time.sleep(0.001)

    def _answer(self, number: int) -> None:
        try:
            answer = self._method()
            if answer is None:
                self.stops[:] = 1
            else:
                answer(number)
        except BaseException:
            log.exception("a question of a step could not be answered; its sequences end")
            self.stops[:] = 1


def ask(
    kernels: str,
    whom: jax.Array,  # i32[WHOM]
    asks: jax.Array,  # i32[rows], 1 for rows that ask
    token: jax.Array,  # i32[rows]
    after: jax.Array,
    num_words: int,
) -> tuple[jax.Array, jax.Array]:  # i32[rows, num_words], i32[rows]
    """What each row may go on with, packed bits, and whether it stops.

    All bits are set, and nothing is stopped, where a row does not ask.  The question is not asked
    before `after` is known.
    """
    out = (
        jax.ShapeDtypeStruct((asks.shape[0], num_words), jnp.int32),
        jax.ShapeDtypeStruct(asks.shape, jnp.int32),
    )
    # Not as an operation with effects: JAX would call the program by a path that takes
    # milliseconds.  So it is a pure function to XLA, which may leave out or merge calls: a step has
    # one, and its result is used.
    call = jax.ffi.ffi_call(target(kernels, "ask"), out)
    words, stops = call(whom, asks, token, after)
    return words, stops
