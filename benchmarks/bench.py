"""Contenders take turns: each does the same work once a round, and what each round cost is kept."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from .group import Group
from .measure import Measurement, of_all_ranks

OURS = "this package"
PLAIN = "plain"


@dataclass
class Result:
    """What one contender needed for one operation, round by round.

    Attributes:
        case: the case's name.
        operation: what was done.
        contender: who did it.
        nbytes: how many bytes all ranks had together.
        rounds: what each cost, the largest figure of all ranks.
    """

    case: str
    operation: str
    contender: str
    nbytes: int
    rounds: list[Measurement] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        """What it raised, if it did."""
        return next((one.error for one in self.rounds if one.error is not None), None)

    @property
    def seconds(self) -> float:
        """The median."""
        return median(one.seconds for one in self.rounds)

    @property
    def cpu_seconds(self) -> float:
        """The median, of the rank that needed most."""
        return median(one.cpu_seconds for one in self.rounds)

    @property
    def extra_nbytes(self) -> int:
        """The most."""
        return max(one.extra_nbytes for one in self.rounds)


class Bench:
    """One run of the benchmarks.

    Args:
        directory: where to write; it is there and empty.
        repeats: how many rounds.
        patience_seconds: a contender that has needed as much for an operation is not asked again.
        with_torch: whether PyTorch is there.
    """

    def __init__(self, directory: Path, repeats: int, patience_seconds: float, with_torch: bool) -> None:
        self.directory = directory
        self.repeats = repeats
        self.with_torch = with_torch
        self.results: list[Result] = []
        self._patience = patience_seconds

    def compare(
        self, case: str, operation: str, nbytes: int, contenders: Mapping[str, Callable[[], list[Measurement]]], repeats: int | None = None
    ) -> None:
        """Let contenders take turns.

        Args:
            case: for the results, as the following.
            operation: what is done.
            nbytes: that all ranks have together.
            contenders: what each does in a round, on all its ranks.
            repeats: other than this run's.
        """
        results = {name: Result(case, operation, name, nbytes) for name in contenders}
        for _ in range(repeats or self.repeats):
            for name, call in contenders.items():
                spent = sum(one.seconds for one in results[name].rounds)
                if spent < self._patience and results[name].error is None:
                    results[name].rounds.append(of_all_ranks(call()))
        self.results += results.values()
        for one in results.values():
            text = one.error or f"{one.seconds:9.3f} s, {one.extra_nbytes >> 20:5d} MiB more"
            print(f"{time.strftime('%H:%M:%S')} {case:8} {operation:24} {one.contender:28} {text} ({len(one.rounds)})", file=sys.stderr)

    def group(self, framework: str, world_size: int) -> Group:
        """Start the ranks of a job."""
        return Group(framework, world_size)

    def fresh(self, name: str) -> str:
        """Return a path at which there is nothing any more."""
        path = self.directory / name
        shutil.rmtree(path, ignore_errors=True)
        return str(path)

    def path(self, name: str) -> str:
        """Return the path that :meth:`fresh` gave."""
        return str(self.directory / name)

    def clear(self) -> None:
        """Remove what was written."""
        for path in self.directory.iterdir():
            shutil.rmtree(path, ignore_errors=True)
