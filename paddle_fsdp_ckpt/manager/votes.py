"""When to save and when to stop, decided by all ranks alike at the end of each step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

from ..errors import CheckpointError, RankFailedError
from ..storage.agreement import COORDINATOR
from ..storage.json_values import JsonValue
from ..storage.polling import look_until_there
from ..warn import warn_caller
from .arguments import positive_number, whole_number

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


class RankCounter(Counter, Protocol):
    """The same, for one that knows its rank."""

    @property
    def rank(self) -> int:
        """This rank, from 0 on."""
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
        amount, arrived = 1 + (save << _BITS) + (stop << 2 * _BITS), 0

        def look() -> int | None:
            nonlocal amount, arrived
            total, amount = self._counter.count(self._keys[turn], amount), 0
            arrived = (total - self._before[turn]) % (1 << _BITS)
            return total if arrived >= self._counter.world_size else None

        total = look_until_there(look, self._timeout, _LONGEST_PAUSE_SECONDS)
        if total is None:
            raise RankFailedError(
                f"should_save: only {arrived} of {self._counter.world_size} ranks called it within {self._timeout:g} s; all ranks must "
                "call it at the end of each step"
            )
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


class Schedule:
    """When a run saves and stops, alike on all ranks.

    Attributes:
        should_stop: whether a stop signal came on any rank, as of the last :meth:`is_due`.
    """

    def __init__(
        self,
        counter: RankCounter,
        token: str,
        timeout_seconds: float,
        *,
        every_steps: int | None,
        every_minutes: float | None,
        save_signals: Sequence[int],
        stop_signals: Sequence[int],
    ) -> None:
        """Begin to listen to signals, and to count the time.

        Args:
            counter: what the ranks count with.
            token: unique in the life of the job, the same on all ranks.
            timeout_seconds: how long a rank waits for the others.
            every_steps: see :class:`~.manager.CheckpointManager` for this and the following.
            every_minutes: see there.
            save_signals: see there.
            stop_signals: see there.

        Raises:
            CheckpointError: one of them is not what it must be.
        """
        self.should_stop = False
        self._every_steps = None if every_steps is None else whole_number(every_steps, "save_every_steps", 1)
        self._every_minutes = None if every_minutes is None else positive_number(every_minutes, "save_every_minutes")
        self._is_first = counter.rank == COORDINATOR
        self._clock = Clock(self._every_minutes)
        self._ballot = Ballot(counter, token, timeout_seconds)
        self._save_signals, self._stop_signals = tuple(save_signals), tuple(stop_signals)
        self._has_warned = False
        self._signals = Signals([*save_signals, *stop_signals])

    @property
    def is_any(self) -> bool:
        """Whether anything ever makes it say yes."""
        return self._every_steps is not None or self._has_votes

    @property
    def _has_votes(self) -> bool:
        return self._every_minutes is not None or bool(self._save_signals or self._stop_signals)

    def described(self) -> tuple[JsonValue, JsonValue]:
        """Return the steps and minutes, and the signals, which must be the same on all ranks."""
        signals = [sorted(map(int, numbers)) for numbers in (self._save_signals, self._stop_signals)]
        return [self._every_steps, self._every_minutes], signals

    def is_due(self, step: int) -> bool:
        """Tell whether it is time to save a step. With minutes or signals ranks wait for each other here.

        Where nothing ever makes it say yes, it warns of that on rank 0 at the first call.

        Raises:
            RankFailedError: some rank did not call it in time.
        """
        if not self.is_any and self._is_first and not self._has_warned:
            self._has_warned = True
            warn_caller(
                "should_save always says no, since this CheckpointManager was told nothing of when to save; give it save_every_steps=..., "
                "save_every_minutes=..., save_signals=[...] or stop_signals=[...]"
            )
        due = self._every_steps is not None and step % self._every_steps == 0
        if not self._has_votes:
            return due
        save = self._signals.take(self._save_signals) or (self._is_first and self._clock.is_due())
        verdict = self._ballot.vote(save=save, stop=self._signals.take(self._stop_signals) or self.should_stop)
        self.should_stop = verdict.stop > 0
        return due or verdict.save > 0 or verdict.stop > 0

    def saved(self) -> None:
        """Count the minutes from now on."""
        self._clock.restart()

    def close(self) -> None:
        """Let signals do what they did before."""
        self._signals.close()
