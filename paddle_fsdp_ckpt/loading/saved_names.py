"""A checkpoint whose keys have other names than those of the objects, given their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..saved_run import SavedRun
from ..storage.format import MANIFEST_NAME
from ..storage.index import CheckpointIndex

_NOT_LOADED = " (of the checkpoint)"
"""What follows a name of the checkpoint that is a name of the objects too, but of something that has another name in the checkpoint."""


@dataclass(frozen=True)
class RenamedCheckpoint:
    """A checkpoint by the names of the objects that are loaded.

    Attributes:
        index: where its values lie; keys that no object has keep their names.
        run: what it says about its run.
        damaged: keys that it had, and of which it has no whole values any more; and files of it that are damaged.
        original: new name -> the key that the checkpoint has, where they differ.
    """

    index: CheckpointIndex
    run: SavedRun
    damaged: frozenset[str]
    original: Mapping[str, str]

    @property
    def is_manifest_damaged(self) -> bool:
        """Whether what it says about its run may be wrong."""
        return MANIFEST_NAME in self.damaged

    def original_key(self, key: str) -> str:
        """Return the name that the checkpoint has for a key."""
        return self.original.get(key, key)


def rename_checkpoint(index: CheckpointIndex, run: SavedRun, damaged: Iterable[str], names: Mapping[str, str]) -> RenamedCheckpoint:
    """Give a checkpoint's keys, and the states of its parameters, the names of the objects.

    Args:
        index: of the checkpoint.
        run: what it says about its run.
        damaged: keys that it had, and that are not in the index.
        names: name of each parameter and buffer of the objects -> its name in the checkpoint.
    """
    if all(name == other for name, other in names.items()):
        return RenamedCheckpoint(index, run, frozenset(damaged), {})
    rename = _renaming(names)
    new = {key: rename(key) for key in (*index.stored, *damaged)}
    renamed = replace(
        index,
        dtypes={new[key]: dtype for key, dtype in index.dtypes.items()},
        stored={new[key]: pieces for key, pieces in index.stored.items()},
    )
    original = {other: key for key, other in new.items() if key != other}
    return RenamedCheckpoint(renamed, run.renamed(rename), frozenset(new[key] for key in damaged), original)


def _renaming(names: Mapping[str, str]) -> Callable[[str], str]:
    name_of = {other: name for name, other in names.items()}

    def rename(key: str) -> str:
        owner, _, state = key.rpartition(".")
        if key in name_of:
            return name_of[key]
        if owner in name_of:
            return f"{name_of[owner]}.{state}"
        if key in names:
            return key + _NOT_LOADED
        return f"{owner}{_NOT_LOADED}.{state}" if owner in names else key

    return rename
