"""Directories that hold checkpoints, such as a manager's root: which there are, and whether every byte of all of them is right."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, counted, size_text
from ..storage.format import MANIFEST_NAME, parse_left_over
from ..storage.json_values import JsonValue
from ..storage.stock import is_stock
from ..storage.system_errors import is_there
from ..storage.verify import VerifyReport, verify
from .text import Block, BlockReport, Table

_STEP_DIRECTORY = re.compile(r"step_[0-9]{8,}", re.ASCII)
"""How a manager calls the directory of a step."""


@dataclass(frozen=True)
class RootReport(BlockReport):
    """What is wrong with the checkpoints in a directory.

    Attributes:
        path: the directory.
        checkpoints: what was found of each, by name.
        problems: directories that should be checkpoints and can't be checked, and why, in words.
        left_over: names of what killed saves left behind; no harm.
    """

    path: Path
    checkpoints: tuple[VerifyReport, ...]
    problems: tuple[str, ...]
    left_over: tuple[str, ...]

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
        yield from (f"({name} is what a killed save left behind; it may be deleted)" for name in self.left_over)
        wrong = sum(not one.is_good for one in self.checkpoints) + len(self.problems)
        yield "nothing is wrong" if self.is_good else f"damaged or incomplete: {wrong} of {len(self.checkpoints) + len(self.problems)}"


def is_checkpoint(directory: Path) -> bool:
    """Tell whether a directory looks like a checkpoint, ours or stock Paddle's."""
    return is_there(directory / MANIFEST_NAME) or is_stock(directory)


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints that lie in a directory which is none itself, by name; none where it is one, or is no directory."""
    if is_checkpoint(directory) or not directory.is_dir() or parse_left_over(Path(os.path.abspath(directory)).name) is not None:
        return []
    return [one for one in sorted(directory.iterdir()) if parse_left_over(one.name) is None and is_checkpoint(one)]


def verify_root(directory: Path, *, workers: int | None = None, progress: Callable[[int, int], None] | None = None) -> RootReport:
    """Check every byte of every checkpoint in a directory, one after another.

    A directory that is called as a manager's step and is no checkpoint counts as a problem.

    Args:
        directory: that is no checkpoint itself.
        workers: as for :func:`~paddle_fsdp_ckpt.storage.verify.verify`.
        progress: as there, for each checkpoint anew.

    Raises:
        OSError: the directory can't be read.
    """
    reports, problems = [], []
    inside = checkpoints_in(directory)
    for one in inside:
        try:
            reports.append(verify(one, workers=workers, progress=progress))
        except CheckpointError as error:
            problems.append(f"{one.name}: {error}")
    left_over = sorted(entry.name for entry in directory.iterdir() if parse_left_over(entry.name) is not None)
    return RootReport(directory, tuple(reports), (*problems, *no_checkpoints(directory)), tuple(left_over))


def no_checkpoints(directory: Path) -> list[str]:
    """Return, in words, which entries of a directory are called as a manager's step and are no checkpoints."""
    names = sorted(entry.name for entry in directory.iterdir() if _STEP_DIRECTORY.fullmatch(entry.name) and not is_checkpoint(entry))
    return [f"{name}: it is called as a step and is no checkpoint" for name in names]


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
