"""Steps of a history that was given up, as where a run went back or began anew: why each was, and what can still be done with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .steps import step_name


class WhyGivenUp(NamedTuple):
    """Why a step that a root holds is none of a run's.

    Attributes:
        by: the step whose manifest says so; None where the run itself gave it up, and has saved none since.
        words: what happened.
        way_out: how it can be restored after all, or looked into.
    """

    by: int | None
    words: str
    way_out: str


def given_up_by(by: int, path: Path) -> WhyGivenUp:
    """Return what is known of the step at ``path``, of which the manifest of the step ``by`` says that it was given up."""
    return WhyGivenUp(
        by,
        f"{saved_without(by)}, and the next save here removes it",
        f"To go on from it after all, move it to a root of its own, and restore it there: mv '{path}' NEW_ROOT/",
    )


def saved_without(by: int) -> str:
    """Say which run gave steps up, as the manifest of the step ``by`` says."""
    return f"{step_name(by)} was saved by a run that went back, or began anew, without it"


def given_up_anew() -> WhyGivenUp:
    """Return what is known of a step of a run before this one, which began anew."""
    return WhyGivenUp(
        None,
        "this manager was made with overwrite=True, so that its run begins anew, and its first save removes it",
        "Until then a CheckpointManager without overwrite restores it",
    )


def given_up_on_going_back(to: int) -> WhyGivenUp:
    """Return what is known of a later step than ``to``, the one that this run went back to."""
    return WhyGivenUp(
        None,
        f"this run went back to {step_name(to)} with discard_later=True, and its next save removes it",
        "Until then a new CheckpointManager restores it",
    )


def given_up_as_damaged(to: int, path: Path) -> WhyGivenUp:
    """Return what is known of the damaged step at ``path``, from which a restore fell back to the step ``to``."""
    return WhyGivenUp(
        None,
        f"it is damaged, this run fell back from it to {step_name(to)}, and its next save removes it",
        f"What is wrong with it says: paddle-fsdp-ckpt verify '{path}'",
    )
