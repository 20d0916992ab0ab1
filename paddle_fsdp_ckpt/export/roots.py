"""Directories that hold checkpoints, such as a manager's root: which there are, and whether every byte of all of them is right."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, counted, size_text
from ..storage.discarded import digest_of_manifest, discarded_steps, when_written
from ..storage.format import MANIFEST_NAME, parse_left_over
from ..storage.index import read_manifest
from ..storage.json_values import JsonValue
from ..storage.stock import is_stock
from ..storage.system_errors import is_there
from ..storage.verify import VerifyReport, verify
from .text import Block, BlockReport, Table

_STEP_DIRECTORY = re.compile(r"step_([0-9]{8,})", re.ASCII)
"""How a manager calls the directory of a step."""


@dataclass(frozen=True)
class RootEntries:
    """What lies in a directory in which checkpoints may; all empty where it is one itself, or is no directory.

    Attributes:
        path: the directory.
        checkpoints: by name.
        no_checkpoints: names of what is called as a manager's step and is no checkpoint.
        left_over: names of what killed saves left behind; no harm.
    """

    path: Path
    checkpoints: tuple[Path, ...] = ()
    no_checkpoints: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Return, in words, what should be a checkpoint and is none."""
        return [f"{name}: it is called as a step and is no checkpoint" for name in self.no_checkpoints]

    def given_up(self) -> dict[str, str]:
        """Return the names of the steps of a manager's that are of a history that was given up -> that of the step that says so."""
        steps = sorted(self._steps())
        names = {one.step: one.name for one in steps}
        return {names[step]: names[by] for step, by in sorted(discarded_steps(steps, ()).items())}

    def _steps(self) -> Iterator[_Step]:
        for one in self.checkpoints:
            match = _STEP_DIRECTORY.fullmatch(one.name)
            if match is not None and one.name == f"step_{int(match[1]):08d}":
                written, digest, discarded = 0, "", dict[int, int | str]()
                with suppress(CheckpointError, OSError):  # whoever reads all of it says what is wrong
                    written = when_written(one)
                    digest = digest_of_manifest(one)
                    discarded = read_manifest(one).discarded
                yield _Step(int(match[1]), one.name, digest, written, discarded)


class _Step(NamedTuple):
    step: int
    name: str
    digest: str
    written: int
    discarded: dict[int, int | str]


@dataclass(frozen=True)
class RootReport(BlockReport):
    """What is wrong with the checkpoints in a directory.

    Attributes:
        path: the directory.
        checkpoints: what was found of each, by name.
        problems: directories that should be checkpoints and can't be checked, and why, in words.
        left_over: names of what killed saves left behind; no harm.
        given_up: name of a step of a history that was given up -> that of the step that says so; no harm.
    """

    path: Path
    checkpoints: tuple[VerifyReport, ...]
    problems: tuple[str, ...]
    left_over: tuple[str, ...]
    given_up: dict[str, str]

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong with any."""
        return not self.problems and all(one.is_good for one in self.checkpoints)

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        return {
            "path": str(self.path),
            "checkpoints": [one.to_json() for one in self.checkpoints],
            "problems": list(self.problems),
            "left_over": list(self.left_over),
            "given_up": self.given_up,
            "is_good": self.is_good,
        }

    def blocks(self) -> Iterator[Block]:
        """Yield a table of the checkpoints, and then all that is wrong."""
        yield checkpoints_counted(self.path, [one.is_good for one in self.checkpoints], self.problems)
        yield ""
        rows = [
            ["-" if one.step is None else str(one.step), one.path.name, f"{one.keys:,}", size_text(one.nbytes), _health(one)]
            for one in self.checkpoints
        ]
        yield Table(["step", "name", "keys", "size", "health"], rows, right={0, 2, 3})
        for one in self.checkpoints:
            yield from (f"- {one.path.name}: {finding}" for finding in one.findings)
        yield from (f"- {problem}" for problem in self.problems)
        yield from say_given_up(self.given_up)
        yield from (f"({name} is what a killed save left behind; it may be deleted)" for name in self.left_over)
        wrong = sum(not one.is_good for one in self.checkpoints) + len(self.problems)
        yield "nothing is wrong" if self.is_good else f"damaged or incomplete: {wrong} of {len(self.checkpoints) + len(self.problems)}"


def is_checkpoint(directory: Path) -> bool:
    """Tell whether a directory looks like a checkpoint, ours or stock Paddle's."""
    return is_there(directory / MANIFEST_NAME) or is_stock(directory)


def entries_of(directory: Path) -> RootEntries:
    """Look which checkpoints lie in a directory that is none itself.

    Raises:
        OSError: the directory can't be read.
    """
    if is_checkpoint(directory) or not directory.is_dir() or parse_left_over(Path(os.path.abspath(directory)).name) is not None:
        return RootEntries(directory)
    checkpoints, no_checkpoints, left_over = [], [], []
    for entry in sorted(directory.iterdir()):
        if parse_left_over(entry.name) is not None:
            left_over.append(entry.name)
        elif is_checkpoint(entry):
            checkpoints.append(entry)
        elif _STEP_DIRECTORY.fullmatch(entry.name):
            no_checkpoints.append(entry.name)
    return RootEntries(directory, tuple(checkpoints), tuple(no_checkpoints), tuple(left_over))


def verify_root(entries: RootEntries, *, workers: int | None = None, progress: Callable[[int, int], None] | None = None) -> RootReport:
    """Check every byte of every checkpoint in a directory, one after another.

    A directory that is called as a manager's step and is no checkpoint counts as a problem.

    Args:
        entries: what lies there.
        workers: as for :func:`~paddle_fsdp_ckpt.storage.verify.verify`.
        progress: as there, for each checkpoint anew.
    """
    reports, problems = [], []
    for one in entries.checkpoints:
        try:
            reports.append(verify(one, workers=workers, progress=progress))
        except CheckpointError as error:
            problems.append(f"{one.name}: {error}")
    return RootReport(entries.path, tuple(reports), (*problems, *entries.problems()), entries.left_over, entries.given_up())


def say_given_up(given_up: Mapping[str, str]) -> Iterator[str]:
    """Yield what is to be said of steps of a history that was given up; see :meth:`RootEntries.given_up`."""
    for name, by in given_up.items():
        yield f"({name} was given up by the run that saved {by}: no manager restores it, and that run's next save removes it)"


def checkpoints_counted(directory: Path, are_good: list[bool], problems: Sequence[str]) -> str:
    """Return how many checkpoints a directory holds, and how many of them are wrong.

    Args:
        directory: in which they lie.
        are_good: of each that can be read, whether nothing was found wrong with it.
        problems: of each that can't be, why.
    """
    wrong = are_good.count(False) + len(problems)
    beside = f", {wrong} of them damaged or incomplete" if wrong else ""
    return f"'{directory}': {counted(len(are_good) + len(problems), 'checkpoint')}{beside}"


def _health(report: VerifyReport) -> str:
    if report.is_good:
        return "whole, values not checked" if report.not_checked else "every byte is right"
    return counted(len(report.findings), "thing is wrong", "things are wrong")
