"""Overlap: units are fetched while the ones before them compute, and gradients reduced while the next ones are.

What comes next is told from what came next the last time. All ranks use the same units in the same order, see :mod:`.runtime`, so they
guess alike, rightly or wrongly, and their collectives stay in one order; a wrong guess costs a gather that nobody uses.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .unit import Unit


class Prefetcher:
    """Guesses which units are needed next, and keeps within a limit what is under way.

    Attributes:
        limit: how many units may be fetched ahead, and how many units' gradients may be under way; 0 turns it off.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._previous: Unit | None = None
        self._last: Unit | None = None
        # By two units that were needed one after the other: which one was needed after them, the last time. By numbers, as units are
        # held by the runtime, which holds this.
        self._followers: dict[tuple[int, int], Unit | None] = {}
        self._fetched: list[Unit] = []
        self._reducing: deque[Unit] = deque()

    def fetched(self, unit: Unit) -> None:
        """Note that a unit was needed and is there now, and begin to fetch those that should be needed after it."""
        if not self.limit:
            return
        if self._last is not None:
            self._followers[_key(self._previous, self._last)] = unit
        self._previous, self._last = self._last, unit
        wanted = self._guess()
        for other in [one for one in self._fetched if one not in wanted]:
            other.drop_prefetched()
        self._fetched = wanted
        for other in wanted:
            other.prefetch()

    def _guess(self) -> list[Unit]:
        wanted: list[Unit] = []
        before, last = self._previous, self._last
        while last is not None and len(wanted) < self.limit:
            follower = self._followers.get(_key(before, last))
            if follower is None or follower is self._last or follower in wanted:
                break
            if not follower.is_gathered:
                wanted.append(follower)
            before, last = last, follower
        return wanted

    def end_phase(self) -> None:
        """Drop what was fetched and not used: a forward or backward is over, and weights may change now."""
        if self._last is not None:
            self._followers[_key(self._previous, self._last)] = None
        self._previous = self._last = None
        for unit in self._fetched:
            unit.drop_prefetched()
        self._fetched = []

    def reduce(self, unit: Unit, mean: bool) -> None:
        """Reduce a unit's gradients, and finish those reductions that are too many under way. A collective operation."""
        unit.reduce_gradients(mean, finish=not self.limit)
        if self.limit:
            self._reducing.append(unit)
            while len(self._reducing) > self.limit:
                self._reducing.popleft().finish_reductions()

    def finish_reductions(self) -> None:
        """Wait until all gradients are reduced. A collective operation."""
        while self._reducing:
            self._reducing.popleft().finish_reductions()


def _key(before: Unit | None, last: Unit) -> tuple[int, int]:
    return (-1 if before is None else before.index, last.index)
