"""One model out of a checkpoint of several, which were saved under names: its keys without its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def check_one_model(path: Path, names: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> None:
    """Raise where a checkpoint holds models under names, and nobody said which is meant.

    Args:
        path: of the checkpoint.
        names: of all parameters and buffers.
        fits: tells whether such names are those of one model.

    Raises:
        MismatchError: it says which there are.
    """
    if fits(names):
        return
    inside: dict[str, list[str]] = {}
    for name in names:
        model, _, rest = name.partition(".")
        inside.setdefault(model, []).append(rest)
    fitting = sorted(model for model, rests in inside.items() if all(rests) and fits(rests))
    if not fitting:
        return
    if len(inside) > 1 and len(fitting) == len(inside):
        raise MismatchError(f"'{path}' holds several models: {listing(fitting)}; say which by --model (model_name=)")
    raise MismatchError(
        f"the recipe takes of '{path}' what lies under {listing(fitting)}, without that name: was it saved as a model under a name? Then "
        f"say so by --model {fitting[0]} (model_name=)"
    )


def _one_model(index: CheckpointIndex, name: str) -> CheckpointIndex:
    prefix = f"{name}."
    if not any(key.startswith(prefix) for key in index.stored):
        there = sorted({key.partition(".")[0] for key in index.stored})
        raise MismatchError(f"'{index.path}' has no key that begins with '{prefix}'; its keys begin with {listing(there)}")
    return renamed(index, lambda key: key.removeprefix(prefix) if key.startswith(prefix) else None)
