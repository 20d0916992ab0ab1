"""Which of the steps that lie beside each other are of a history that was given up, as where a run went back or began anew."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .digests import digest
from .format import MANIFEST_NAME
from .index import read_manifest_bytes


class DatedStep(Protocol):
    """A committed step."""

    @property
    def step(self) -> int:
        """Its number."""

    @property
    def digest(self) -> str:
        """Of its manifest; see :func:`digest_of_manifest`. Empty where that can't be read."""

    @property
    def written(self) -> int:
        """When its manifest was written; see :func:`when_written`."""

    @property
    def discarded(self) -> Mapping[int, int | str]:
        """What its manifest says of the steps that are of another history, by their numbers; see :func:`identity_of`."""


def digest_of_manifest(directory: Path) -> str:
    """Return the digest of a checkpoint's manifest, which stays the same in whatever copy, and which no other save has.

    Raises:
        CheckpointError: it is larger than any, or a link out of the directory.
        OSError: it can't be read.
    """
    return digest(read_manifest_bytes(directory))


def when_written(directory: Path) -> int:
    """Return when a checkpoint's manifest was written, in nanoseconds; 0 where that says nothing.

    By it manifests told a checkpoint from another one of its name before they had :func:`digest_of_manifest`.

    Raises:
        OSError: it can't be looked at.
    """
    return max(0, os.stat(directory / MANIFEST_NAME).st_mtime_ns)  # a time before 1970 tells nothing


def identity_of(step: DatedStep) -> int | str:
    """Return what a manifest is to say of a step of another history, by which it is told from another one of its number.

    That is the digest of its manifest, or when that was written, where it can't be read; 0 where nobody knows either.
    """
    return step.digest or step.written


def is_another(step: DatedStep, other: DatedStep) -> bool:
    """Tell whether two steps of one number are two saves, as far as is known."""
    if step.digest and other.digest:
        return step.digest != other.digest
    return step.written != other.written


def discarded_steps(steps: Sequence[DatedStep], lost: Collection[int]) -> dict[int, int]:
    """Return the steps of a root that are of a history that was given up, and were to be removed -> the step that says so.

    The last step of the one that goes on is the first that discards all committed steps after it; as a rule that is the last step of all.
    One that was saved anew since has another manifest, and isn't meant; a copy of one that was given up is. Older manifests say when it was
    written, and then a copy with another time isn't meant either.

    Args:
        steps: the committed ones, in ascending order.
        lost: those of which no checkpoint is left.
    """
    for number, last in enumerate(steps):
        if all(_is_meant(one, last) for one in steps[number + 1 :]):
            of_root = {one.step for one in steps if _is_meant(one, last)}
            return dict.fromkeys(of_root | {step for step in lost if last.discarded.get(step) == 0}, last.step)
    return {}


def _is_meant(step: DatedStep, by: DatedStep) -> bool:
    identity = by.discarded.get(step.step)
    return bool(identity) and identity in (step.digest, step.written)
