"""One model out of a checkpoint of several, which were saved under names: its keys without its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..errors import MismatchError, listing
from ..storage.index import CheckpointIndex
from ..storage.stock import open_index

_Value = TypeVar("_Value")


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
    stored = {key.removeprefix(prefix): pieces for key, pieces in index.stored.items() if key.startswith(prefix)}
    if not stored:
        there = sorted({key.partition(".")[0] for key in index.stored})
        raise MismatchError(f"'{index.path}' has no key that begins with '{prefix}'; its keys begin with {listing(there)}")
    dtypes = {key: index.dtypes[prefix + key] for key in stored}
    manifest = index.manifest
    if manifest is not None:
        tied = (_without(prefix, names) for names in manifest.tied)
        base = None if manifest.base is None else _of_model(prefix, manifest.base)
        several = tuple(names for names in tied if len(names) > 1)
        manifest = replace(manifest, tied=several, base=base, lora=_of_model(prefix, manifest.lora))
    return replace(index, stored=stored, dtypes=dtypes, manifest=manifest)


def _of_model(prefix: str, by_name: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name.removeprefix(prefix): value for name, value in by_name.items() if name.startswith(prefix)}


def _without(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
