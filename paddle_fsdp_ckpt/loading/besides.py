"""What a load, or a manager's restore, says of what was saved beside model and optimizers, and was not given back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ..errors import CheckpointError, listing
from ..optim import say_learning_rate
from ..storage.besides import SavedBesides, read_besides
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue


def besides_in(index: CheckpointIndex) -> SavedBesides | None:
    """Return what was saved besides; None where that can't be read, which keeps no load from model and optimizers."""
    try:
        return read_besides(index)
    except CheckpointError:
        return None


def say_all_not_restored(besides: SavedBesides | None, path: Path, optimizers: JsonValue, parts: Collection[str]) -> list[str]:
    """Say what was saved besides, of which ``load`` gives back nothing but schedules of optimizers.

    Args:
        besides: what there is.
        path: the checkpoint, a step of a manager's.
        optimizers: as the manifest describes them.
        parts: that were loaded.
    """
    if besides is None:
        return [f"what a CheckpointManager saved besides, which can't be read: paddle-fsdp-ckpt verify '{path}' says why"]
    others = ["grad_scaler"] * bool(besides.grad_scalers) + ["sharded"] * besides.has_sharded
    return say_not_restored([*besides.lr_schedulers.values()], others, optimizers, parts, "CheckpointManager.restore")


def say_not_restored(
    schedulers: Sequence[JsonValue], others: Iterable[str], optimizers: JsonValue, parts: Collection[str], call: str
) -> list[str]:
    """Say what was saved besides and not given to be restored.

    Args:
        schedulers: the descriptions of those that were not; they may have come back with their optimizers.
        others: of the rest, the argument that it was given as, alone or with a name.
        optimizers: as the manifest describes them.
        parts: that were loaded.
        call: what gives it back.
    """
    with_optimizers = [one["learning_rate"] for one in optimizers if "learning_rate" in parts]
    left = [one for one in schedulers if one not in with_optimizers]
    sentences = [f"lr_scheduler, {listing(map(say_learning_rate, left))}: give {call}(lr_scheduler=...)"] * bool(left)
    return sentences + [f"{what}: give {call}({what.split()[0]}=...)" for what in others]
