"""Which of the steps that lie beside each other are of a history that was given up, as where a run went back or began anew."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .format import MANIFEST_NAME


class DatedStep(Protocol):
    """A committed step."""

    @property
    def step(self) -> int:
        """Its number."""

    @property
    def written(self) -> int:
        """When its manifest was written; see :func:`when_written`."""

    @property
    def discarded(self) -> Mapping[int, int]:
        """The same of the steps that its manifest says are of another history, by their numbers; 0 of such as had none."""


def when_written(directory: Path) -> int:
    """Return when a checkpoint's manifest was written, in nanoseconds; 0 where that says nothing.

    By it a checkpoint is told from another one of its name.

    Raises:
        OSError: it can't be looked at.
    """
    return max(0, os.stat(directory / MANIFEST_NAME).st_mtime_ns)  # a time before 1970 tells nothing


def discarded_steps(steps: Sequence[DatedStep], lost: Collection[int]) -> dict[int, int]:
    """Return the steps of a root that are of a history that was given up, and were to be removed -> the step that says so.

    The last step of the one that goes on is the first that discards all committed steps after it; as a rule that is the last step of all.
    One that was saved anew, or brought back since, was written at another time, and isn't meant.

    Args:
        steps: the committed ones, in ascending order.
        lost: those of which no checkpoint is left.
    """
    for number, last in enumerate(steps):
        if all(one.written and last.discarded.get(one.step) == one.written for one in steps[number + 1 :]):
            of_root = {one.step for one in steps if one.written and last.discarded.get(one.step) == one.written}
            return dict.fromkeys(of_root | {step for step in lost if last.discarded.get(step) == 0}, last.step)
    return {}
