"""When to save and when to stop, decided by all ranks alike at the end of each step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

from ..errors import CheckpointError, RankFailedError

_FIRST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.01
_BITS = 20


class Counter(Protocol):
    """What the ranks count with."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    def count(self, key: str, amount: int) -> int:
        """Add to the number under ``key``, 0 at first, and return the sum."""
        ...


class Verdict(NamedTuple):
    """How many ranks want a save, and how many want to stop."""

    save: int
    stop: int


class Ballot:
    """A vote of all ranks, any number of times, over two keys of their store. It takes one addition and a few looks a rank.

    In one number are counted the ranks that voted, and the votes to save and to stop, 20 bits for each. Two such numbers take turns:
    who votes in one for the next time must have read the other, and so nobody adds to a number that somebody has yet to read.
    """

    def __init__(self, counter: Counter, token: str, timeout_seconds: float) -> None:
        self._counter = counter
        self._keys = (f"{token}/even", f"{token}/odd")
        self._timeout = timeout_seconds
        self._before = [0, 0]
        self._turn = 0

    def vote(self, *, save: bool, stop: bool) -> Verdict:
        """Vote, wait for all others, and return the result, which is the same on all ranks. All ranks must call it.

        Raises:
            RankFailedError: some did not in time.
        """
        turn, self._turn = self._turn, 1 - self._turn
        total = self._counter.count(self._keys[turn], 1 + (save << _BITS) + (stop << 2 * _BITS))
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE_SECONDS
        while (arrived := (total - self._before[turn]) % (1 << _BITS)) < self._counter.world_size:
            if time.monotonic() >= deadline:
                raise RankFailedError(
                    f"should_save: only {arrived} of {self._counter.world_size} ranks called it within {self._timeout:g} s; all ranks must "
                    "call it at the end of each step"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            total = self._counter.count(self._keys[turn], 0)
        votes, self._before[turn] = total - self._before[turn], total
        return Verdict(votes >> _BITS & (1 << _BITS) - 1, votes >> 2 * _BITS)


class Signals:
    """Remembers which of some signals this process got; they do nothing else until it is closed."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """Begin to listen.

        Raises:
            CheckpointError: this isn't the main thread, or there is no such signal.
        """
        self._previous: dict[int, Any] = {}
        self._got: set[int] = set()
        if numbers and threading.current_thread() is not threading.main_thread():
            raise CheckpointError("signals can be listened to only in the main thread; make the CheckpointManager there")
        for number in numbers:
            try:
                self._previous[number] = signal.signal(number, self._note)
                # Paddle 3.3.1's store takes a system call that a signal interrupted for a broken connection.
                signal.siginterrupt(number, False)
            except (OSError, ValueError, TypeError) as error:
                self.close()
                raise CheckpointError(f"signal {number!r:.100} can't be listened to ({error}); give such as signal.SIGTERM") from error

    def _note(self, number: int, _: FrameType | None) -> None:
        self._got.add(number)

    def take(self, numbers: Sequence[int]) -> bool:
        """Tell whether one of these came since this was last asked."""
        came = self._got.intersection(numbers)
        self._got -= came
        return bool(came)

    def close(self) -> None:
        """Let signals do what they did before."""
        for number, previous in self._previous.items():
            # None: it was set by something that is not Python, and can't be set again.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}


class Clock:
    """Tells when some minutes have passed since the last save."""

    def __init__(self, minutes: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = None if minutes is None else 60.0 * minutes
        self._now = now
        self._since = now()

    def is_due(self) -> bool:
        """Tell whether it is time."""
        return self._seconds is not None and self._now() - self._since >= self._seconds

    def restart(self) -> None:
        """Count from now on."""
        self._since = self._now()
