"""What a function that runs on a rank may ask about where it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ThisRank:
    """Where the running function is.

    Attributes:
        rank: this process's rank.
        world_size: how many ranks run the function.
        scratch: an empty directory of this rank alone, removed after the run.
    """

    rank: int
    world_size: int
    scratch: Path


_current: ThisRank | None = None


def this_rank() -> ThisRank:
    """Return where the running function is; only on a rank, during a run."""
    if _current is None:
        raise RuntimeError("this_rank() was called outside a run")
    return _current


def enter(place: ThisRank | None) -> None:
    """Set what :func:`this_rank` returns; for the worker."""
    global _current
    _current = place
