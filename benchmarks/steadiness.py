"""The same work before each round: how much its time varies tells how steady the machine was."""

from __future__ import annotations

import time

from .results import Figure, Steadiness

COPY_NBYTES = 64_000_000
_LOOP_ITERATIONS = 600_000  # about 15 ms


class SameWork:
    """A loop of Python and a copy in memory, done again and again; it keeps twice :data:`COPY_NBYTES` of memory."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(2 * COPY_NBYTES))
        self._loop: list[float] = []
        self._copy: list[float] = []
        self._work()  # the first finds memory that is not there yet

    def do(self) -> None:
        """Do it once, and keep how long it took."""
        loop, copy = self._work()
        self._loop.append(loop)
        self._copy.append(copy)

    @property
    def steadiness(self) -> Steadiness | None:
        """How long it took; None where it was never done."""
        return Steadiness(len(self._loop), Figure.of(self._loop), Figure.of(self._copy)) if self._loop else None

    def _work(self) -> tuple[float, float]:
        start = time.perf_counter()
        total = 0
        for number in range(_LOOP_ITERATIONS):
            total += number
        middle = time.perf_counter()
        self._memory[COPY_NBYTES:] = self._memory[:COPY_NBYTES]
        return middle - start, time.perf_counter() - middle
