"""What a manager keeps beside models and optimizers: how schedulers and scalers are laid out, and which of all this there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import CorruptCheckpointError
from .index import CheckpointIndex
from .json_values import JsonValue, cut_text, parse_json
from .reserved_keys import COMMON_KEY, bytes_in, reserved_alone, sharded_keys, text_and_arrays

_SCALERS = "grad_scalers"


@dataclass(frozen=True)
class SavedBesides:
    """What is given back only to who gives what it is of; all empty where ``save`` alone made a checkpoint.

    Attributes:
        lr_schedulers: their descriptions by name.
        grad_scalers: the same.
        has_sharded: whether there are tensors of the user's own.
    """

    lr_schedulers: dict[str, JsonValue] = field(default_factory=dict)
    grad_scalers: dict[str, JsonValue] = field(default_factory=dict)
    has_sharded: bool = False


def read_besides(index: CheckpointIndex) -> SavedBesides:
    """Read which there are from a checkpoint, whose index is given with reserved keys.

    Raises:
        CheckpointError: it can't be read.
    """
    index = reserved_alone(index)  # of all keys, one would be made for each
    if COMMON_KEY not in index:
        return SavedBesides()
    try:
        text, _ = text_and_arrays(bytes_in(index, [COMMON_KEY])[COMMON_KEY])
        common = parse_json(text, allow_nan=True)
        return SavedBesides(read_named(common["lr_schedulers"]), read_scalers(common["grad_scaler"]), bool(sharded_keys(index)))
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptCheckpointError(f"'{index.path}': what a manager kept there is not what it writes ({cut_text(error)})") from error


def write_named(described: Mapping[str, JsonValue]) -> JsonValue:
    """Return what a checkpoint holds of them: a list where they were given as one, else a dict."""
    return list(described.values()) if are_numbers(described) else dict(described)


def read_named(saved: JsonValue) -> dict[str, JsonValue]:
    """Return what :func:`write_named` was given.

    Raises:
        CorruptCheckpointError: that is not what it returns.
    """
    if isinstance(saved, list):
        return {str(number): one for number, one in enumerate(saved)}
    if not isinstance(saved, dict):
        raise CorruptCheckpointError(
            "what a checkpoint holds of schedulers and scalers is neither a list nor a dict; load another checkpoint"
        )
    return saved


def write_scalers(described: Mapping[str, JsonValue]) -> JsonValue:
    """Return what a checkpoint holds of scalers: of one alone its description, as the first checkpoints had it."""
    if described.keys() <= {"0"}:
        return described.get("0")
    return {_SCALERS: write_named(described)}


def read_scalers(saved: JsonValue) -> dict[str, JsonValue]:
    """Return what :func:`write_scalers` was given.

    Raises:
        CorruptCheckpointError: that is not what it returns.
    """
    if saved is None:
        return {}
    return read_named(saved[_SCALERS]) if isinstance(saved, dict) and saved.keys() == {_SCALERS} else {"0": saved}


def are_numbers(names: Mapping[str, object]) -> bool:
    """Tell whether names are those of a list's items: "0", "1" and so on."""
    return list(names) == [str(number) for number in range(len(names))]
