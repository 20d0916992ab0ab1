"""Contenders take turns: each does the same work once a round, and what each round cost is kept."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .group import Group
from .measure import Measurement, of_all_ranks
from .results import Result
from .steadiness import SameWork

OURS = "this package"
PLAIN = "plain"


class Bench:
    """One run of one case.

    Args:
        case: its name, to say how far it is.
        directory: where to write; it is there and empty.
        repeats: how many rounds.
        patience_seconds: a contender that has needed as much for an operation is not asked again.
        with_torch: whether PyTorch is there.
    """

    def __init__(self, case: str, directory: Path, repeats: int, patience_seconds: float, with_torch: bool) -> None:
        self.directory = directory
        self.repeats = repeats
        self.with_torch = with_torch
        self.results: list[Result] = []
        self.same_work = SameWork()
        self._case = case
        self._patience = patience_seconds
        self._environment: Mapping[str, str] = {}

    def compare(
        self, operation: str, nbytes: int, contenders: Mapping[str, Callable[[], list[Measurement]]], repeats: int | None = None
    ) -> None:
        """Let contenders take turns.

        Args:
            operation: what is done.
            nbytes: that all ranks have together.
            contenders: what each does in a round, on all its ranks; the first is what others are compared with.
            repeats: other than this run's.
        """
        results = {name: Result(operation, name, nbytes) for name in contenders}
        for _ in range(repeats or self.repeats):
            self.same_work.do()
            for name, call in contenders.items():
                rounds = results[name].rounds
                spent = sum(one.seconds for one in rounds)
                if not rounds or (spent < self._patience and results[name].error is None):
                    rounds.append(of_all_ranks(call()))
        self.results += results.values()
        for one in results.values():
            text = one.error or f"{one.seconds.value:9.3f} s, {one.extra_nbytes >> 20:5d} MiB more"
            print(
                f"{time.strftime('%H:%M:%S')} {self._case:10} {operation:24} {one.contender:28} {text} ({len(one.rounds)})", file=sys.stderr
            )

    def group(self, framework: str, world_size: int) -> Group:
        """Start the ranks of a job."""
        return Group(framework, world_size, self._environment)

    @contextmanager
    def environment(self, variables: Mapping[str, str]) -> Iterator[None]:
        """Give the jobs that start meanwhile environment variables besides."""
        self._environment = variables
        try:
            yield
        finally:
            self._environment = {}

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
