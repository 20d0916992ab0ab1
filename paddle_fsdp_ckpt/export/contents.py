"""Which keys of a checkpoint are the model's, and which are optimizer states and master weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CheckpointError
from ..optimizer_states import MASTER_WEIGHT_KEY
from ..storage.index import CheckpointIndex
from ..storage.key_names import RESERVED_PREFIX
from ..storage.reserved_keys import is_sharded_key

MODEL, MASTERS, SHARDED, TRAINER = "parameters and buffers", "master weights", "given as sharded=", "trainer state"
"""The kinds of keys, besides those that are called as a state."""

_PARAMETERS = ("weight", "bias")


@dataclass(frozen=True)
class Contents:
    """The keys of a checkpoint, by what they are.

    Attributes:
        model: parameters and buffers, in the order of the files.
        states: parameter -> name of a state, such as ``moment1_0``, -> its key; master weights not among them.
        masters: parameter -> the key of its master weight; of a tied parameter under each of its names.
        tied: the sorted names of each tensor that has several; None where a checkpoint of stock Paddle doesn't say.
        apart: keys of which this doesn't count, since their values are those of another checkpoint.
    """

    model: tuple[str, ...]
    states: dict[str, dict[str, str]]
    masters: dict[str, str]
    tied: tuple[tuple[str, ...], ...] | None
    apart: frozenset[str] = frozenset()


def contents_of(index: CheckpointIndex) -> Contents:
    """Sort the keys of a checkpoint by what they are, as far as keys tell: a state's is its parameter's, a dot, and a name with ``_0``.

    Reserved keys are left out.
    """
    model: list[str] = []
    states: dict[str, dict[str, str]] = {}
    masters: dict[str, str] = {}
    for key in index.stored:
        if key.startswith(RESERVED_PREFIX):
            continue
        owner, dot, state = key.rpartition(".")
        is_state = dot and state.endswith("_0") and (owner in index or owner.rpartition(".")[2] in _PARAMETERS)
        if not is_state:
            model.append(key)
        elif state == MASTER_WEIGHT_KEY:
            masters[owner] = key
        else:
            states.setdefault(owner, {})[state] = key
    tied = None if index.manifest is None else index.manifest.tied
    for names in tied or ():
        # A tied parameter has its states under the first of its names.
        masters |= {name: masters[names[0]] for name in names if names[0] in masters and name not in masters}
    return Contents(tuple(model), states, masters, tied)


def check_has_masters(path: str | os.PathLike[str], *contents: Contents) -> None:
    """Raise where master weights are asked for, and what was given has none.

    Args:
        path: what to name.
        contents: of the checkpoints that the model comes from.

    Raises:
        CheckpointError: none of them has any.
    """
    if not any(one.masters for one in contents):
        raise CheckpointError(f"'{path}' holds no master weights; leave --master-weights (master_weights=) out")


def kinds_of(index: CheckpointIndex, contents: Contents) -> dict[str, str]:
    """Return what each key of a checkpoint is, in words: one of the kinds, or the name of a state."""
    kinds = dict.fromkeys(contents.model, MODEL) | dict.fromkeys(contents.masters.values(), MASTERS)
    kinds |= {key: state.removesuffix("_0") for states in contents.states.values() for state, key in states.items()}
    return kinds | {key: SHARDED if is_sharded_key(key) else TRAINER for key in index.stored if key.startswith(RESERVED_PREFIX)}


def patterns_of(keys: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the patterns of keys that a caller gave: one, several or none."""
    return (keys,) if isinstance(keys, str) else tuple(keys or ())
