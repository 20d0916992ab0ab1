"""What ``save`` and ``load`` have in common: where the ranks meet, and what must be the same on all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from .errors import CheckpointError, RankFailedError
from .rendezvous import OneRank, StoreRendezvous, open_rendezvous
from .shardings import ranks_of
from .storage.agreement import COORDINATOR
from .storage.json_values import JsonValue


def open_meeting(call: str, model: object, optimizers: Sequence[object]) -> tuple[StoreRendezvous | OneRank, str]:
    """Return where the ranks over which the objects are sharded meet, and a token for this meeting.

    Whatever the objects are: what is wrong with them must be said at the meeting. ``call`` is the caller's name, by which ranks that wait
    say for what.
    """
    rendezvous, token = open_rendezvous(ranks_of(model, optimizers))
    return rendezvous, f"{token}/{call}"


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return the directory that a caller's ``path`` stands for; ``~`` is the home directory, as in a shell.

    Raises:
        CheckpointError: it stands for none.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"path is {path!r:.100}; give the directory of a checkpoint, as a str or Path")
    return Path(os.path.abspath(os.path.expanduser(text)))


def digest_of(text: str) -> str:
    """Return what stands for ``text`` when ranks compare it: its SHA-256, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def check_same(call: str, what: str, values: Sequence[JsonValue], consequence: str, *, shown: bool) -> None:
    """Raise unless what each rank gave is what rank 0 gave.

    Args:
        call: the caller's name, for the message.
        what: what is compared, for the message.
        values: in the order of the ranks.
        consequence: what the difference led to, for the message.
        shown: whether the message shows the values.

    Raises:
        RankFailedError: naming the first rank that differs.
    """
    for rank, value in enumerate(values):
        if value != values[COORDINATOR]:
            difference = (
                f": rank {COORDINATOR} {values[COORDINATOR]!r} and rank {rank} {value!r}"
                if shown
                else f", rank {rank}'s from rank {COORDINATOR}'s"
            )
            raise RankFailedError(f"{call}: {what} must be the same on all ranks, and differ{difference}; {consequence}")
