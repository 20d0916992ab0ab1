"""One model out of a checkpoint of several, which were saved under names: its keys without its name."""

from __future__ import annotations

from pathlib import Path

from ..errors import MismatchError, listing
from ..storage.index import CheckpointIndex
from ..storage.stock import open_index
from .renaming import renamed


def open_model(path: Path, name: str | None) -> CheckpointIndex:
    """Return the index of a checkpoint, or of one model in it as if that had been saved alone.

    Args:
        path: the directory of a checkpoint, for a name of one that was saved with ``model={name: ...}``.
        name: the model's, or None for all that is there.

    Raises:
        MismatchError: the checkpoint has no key of it.
        CheckpointError: as :func:`~.storage.stock.open_index`.
    """
    index = open_index(path)
    return index if name is None else _one_model(index, name)


def _one_model(index: CheckpointIndex, name: str) -> CheckpointIndex:
    prefix = f"{name}."
    if not any(key.startswith(prefix) for key in index.stored):
        there = sorted({key.partition(".")[0] for key in index.stored})
        raise MismatchError(f"'{index.path}' has no key that begins with '{prefix}'; its keys begin with {listing(there)}")
    return renamed(index, lambda key: key.removeprefix(prefix) if key.startswith(prefix) else None)
