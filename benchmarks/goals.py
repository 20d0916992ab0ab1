"""What is aimed at, and how far it was reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .bench import OURS, PLAIN
from .results import CaseResults, Figure, Result

_FUSED = "Paddle's fused runtime"


@dataclass(frozen=True)
class Goal:
    """A bound, and what was measured.

    Attributes:
        what: in words.
        most: at most this.
        measured: None where it was not, or where what was asked raised.
        unit: of both.
    """

    what: str
    most: float
    measured: Figure | None
    unit: str

    def row(self) -> str:
        """Return it as a row of a table: what, at most, measured, least to most of the rounds, met."""
        if self.measured is None:
            return f"| {self.what} | {self._show(self.most)} | not measured | | |"
        rounds = " to ".join(self._show(one) for one in self.measured.spread or ())
        met = "yes" if self.measured.value <= self.most else "**no**"
        return f"| {self.what} | {self._show(self.most)} | {self._show(self.measured.value)} | {rounds} | {met} |"

    def _show(self, value: float) -> str:
        return f"{number(value)} x" if self.unit == "x" else f"{value:.3g} {self.unit}"


def number(value: float) -> str:
    """Return a ratio in words."""
    return f"1/{1 / value:.0f}" if 0 < value < 0.1 else f"{value:.3g}"


def goals(cases: Mapping[str, CaseResults]) -> list[Goal]:
    """Return the goals, with what was measured of each."""
    found = _Found(cases)
    load = "load, 2 to {} ranks"
    return [
        Goal("save 1.5 GB, fsync, digests on: ratio to a plain write", 1.2, found.ratio("big", "save, 2 ranks", PLAIN), "x"),
        Goal("load it, same layout, digests checked: ratio to a plain read", 1.5, found.ratio("big", load.format(2), PLAIN), "x"),
        *(
            Goal(f"load it, {way}, digests checked: ratio to a plain read", 2, found.ratio("big", f"load, {way}", PLAIN), "x")
            for way in ("2 to 1 ranks", "2 to 3 ranks", "1 to 2 ranks")
        ),
        Goal("load 24,000 keys, 2 to 1 ranks: ratio to the faster peer", 1 / 40, found.ratio_to_best("many", load.format(1)), "x"),
        Goal("load 24,000 keys, 2 to 3 ranks: ratio to the faster peer", 1 / 40, found.ratio_to_best("many", load.format(3)), "x"),
        Goal("load 113,000 keys, 2 to 1 ranks: ratio to the faster peer", 1 / 100, found.ratio_to_best("scale-load", load.format(1)), "x"),
        Goal("113,000 keys, first save: processor time of the busier rank, all of it", 2, found.cpu("scale", "first save, 2 ranks"), "s"),
        Goal("113,000 keys, each later save: the same", 0.3, found.cpu("scale", "save, 2 ranks"), "s"),
        Goal("113,000 keys: reading the index, processor time", 1, found.cpu("scale", "read the index"), "s"),
        Goal(
            "save in the background: training waits, ratio to one copy", 1.2, found.ratio("async", "later, training waits", "one copy"), "x"
        ),
        *(
            Goal(f"{what}, in large pages", most, found.ratio("large-pages", operation, baseline), "x")
            for what, most, operation, baseline in (
                ("the same", 1.2, "later, training waits", "one copy"),
                ("load 1.5 GB, same layout", 1.5, load.format(2), PLAIN),
                ("load it, 2 to 3 ranks", 2, load.format("3"), PLAIN),
            )
        ),
        Goal("memory besides the model's, any save or load of 1.5 GB", 64, found.extra("big"), "MiB"),
        Goal("the same of 113,000 keys", 64, found.extra("scale", "scale-load"), "MiB"),
        Goal("a training step: ratio to Paddle's own fused runtime", 1.2, found.ratio("step", "step, 2 ranks", _FUSED), "x"),
    ]


class _Found:
    def __init__(self, cases: Mapping[str, CaseResults]) -> None:
        self._cases = cases

    def ratio(self, case: str, operation: str, baseline: str) -> Figure | None:
        there = self._good(case, operation)
        return there[OURS].ratio(there[baseline]) if OURS in there and baseline in there else None

    def ratio_to_best(self, case: str, operation: str) -> Figure | None:
        there = self._good(case, operation)
        peers = [one for name, one in there.items() if not name.startswith((OURS, PLAIN))]
        return there[OURS].ratio(min(peers, key=lambda one: one.seconds.value)) if peers and OURS in there else None

    def extra(self, *cases: str) -> Figure | None:
        """Return the most of all that this package did, None where a part of it was not measured."""
        if any(case not in self._cases or self._cases[case].failure is not None for case in cases):
            return None
        ours = [row for case in cases for row in self._cases[case].rows if row.contender.startswith(OURS)]
        if not ours or any(row.error is not None for row in ours):
            return None
        return Figure(max(row.extra_nbytes for row in ours) / (1 << 20))

    def cpu(self, case: str, operation: str) -> Figure | None:
        there = self._good(case, operation)
        return there[OURS].cpu_seconds if OURS in there else None

    def _good(self, case: str, operation: str) -> dict[str, Result]:
        if case not in self._cases:
            return {}
        return {row.contender: row for row in self._cases[case].rows if row.operation == operation and row.error is None}
