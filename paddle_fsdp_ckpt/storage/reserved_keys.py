"""Keys in a checkpoint's files that belong to no model: what ``CheckpointManager`` keeps beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import CheckpointError, CorruptCheckpointError, listing
from ..pieces import Piece, whole_piece
from .index import CheckpointIndex, read_columns
from .json_values import parse_json
from .key_names import RESERVED_PREFIX, say_key
from .manifest import Manifest
from .plan import plan_read
from .reader import UNCHANGED, execute_read

COMMON_KEY = f"{RESERVED_PREFIX}common"
"""What is the same on all ranks: bytes, in the file of rank 0."""

METRICS_KEY = f"{RESERVED_PREFIX}metrics"
"""Numbers by which a checkpoint is compared with others: JSON, in the file of rank 0, where there are any."""

LENGTH_NBYTES = 8
"""How long the text is comes before it, little-endian."""

_SHARDED = f"{RESERVED_PREFIX}sharded/"


def rank_key(rank: int) -> str:
    """Return the key of what is one rank's own: bytes, in that rank's file."""
    return f"{RESERVED_PREFIX}rank/{rank}"


def sharded_key(key: str) -> str:
    """Return the key of a sharded tensor that a user gave under ``key``."""
    return f"{_SHARDED}{key}"


def key_of_sharded(key: str) -> str:
    """Return the users' key of one of :func:`sharded_key`."""
    return key.removeprefix(_SHARDED)


def sharded_keys(index: CheckpointIndex) -> list[str]:
    """Return the users' keys of their own sharded tensors in a checkpoint."""
    return [key_of_sharded(key) for key in index.stored if key.startswith(_SHARDED)]


def is_sharded_key(key: str) -> bool:
    """Tell whether a key is one of :func:`sharded_key`."""
    return key.startswith(_SHARDED)


def text_and_arrays(encoded: bytes | bytearray) -> tuple[str, memoryview]:
    """Return the two parts of what is kept under :data:`COMMON_KEY` and :func:`rank_key`: a JSON text, and the bytes of arrays.

    Raises:
        ValueError: it has no such parts.
    """
    start = LENGTH_NBYTES + int.from_bytes(encoded[:LENGTH_NBYTES], "little")
    if start > len(encoded):
        raise ValueError("it ends too early")
    return bytes(encoded[LENGTH_NBYTES:start]).decode(), memoryview(encoded)[start:]


def metrics_of(encoded: bytes | bytearray) -> dict[str, float]:
    """Return, by name, the metrics that are kept under :data:`METRICS_KEY`.

    Raises:
        ValueError: they are none.
    """
    values = parse_json(bytes(encoded).decode(), allow_nan=True)
    if not isinstance(values, dict) or not all(type(value) is float for value in values.values()):
        raise ValueError("these are no metrics")
    return values


def check_not_reserved(keys: Iterable[str]) -> None:
    """Raise where a key of a model or optimizer is one of ours.

    Raises:
        CheckpointError: it names them.
    """
    taken = [key for key in keys if key.startswith(RESERVED_PREFIX)]
    if taken:
        raise CheckpointError(f"names that begin with '{RESERVED_PREFIX}' are kept for this package: {listing(taken)}; rename them")


def without_reserved(index: CheckpointIndex) -> CheckpointIndex:
    """Return the index of what belongs to the model and its optimizers alone."""
    if index.table is not None:
        return index.with_table(index.table.without(RESERVED_PREFIX))
    ours = [key for key in index.stored if key.startswith(RESERVED_PREFIX)]
    if not ours:
        return index
    return _of_keys(index, [key for key in index.stored if not key.startswith(RESERVED_PREFIX)])


def reserved_alone(index: CheckpointIndex) -> CheckpointIndex:
    """Return the index of what belongs to no model and no optimizer."""
    if index.table is not None:
        return index.with_table(index.table.only(RESERVED_PREFIX))
    return _of_keys(index, [key for key in index.stored if key.startswith(RESERVED_PREFIX)])


def _of_keys(index: CheckpointIndex, keys: Sequence[str]) -> CheckpointIndex:
    return replace(index, stored={key: index.stored[key] for key in keys}, dtypes={key: index.dtypes[key] for key in keys})


def bytes_piece(key: str, nbytes: int) -> Piece:
    """Return the piece under which a number of bytes, at least one, is stored."""
    return whole_piece(key, "uint8", (nbytes,))


def read_bytes(path: Path, manifest: Manifest, file: int, keys: Sequence[str]) -> dict[str, bytearray]:
    """Read bytes that were stored under some keys in the file of one rank; keys that it lacks are left out. Digests are checked.

    Raises:
        CheckpointError: as :func:`~.storage.index.read_index`, where the file is missing or damaged.
    """
    record = manifest.files[file]
    index = CheckpointIndex(path, (record,), {}, {}, None)
    entries = [entry for entry in read_columns(path, record).entries() if entry[0] in keys]
    list(index.add(0, entries))
    return bytes_in(index, keys)


def bytes_in(index: CheckpointIndex, keys: Sequence[str]) -> dict[str, bytearray]:
    """Read bytes that are stored under some keys in the first file of a checkpoint; see :func:`read_bytes`.

    Raises:
        CheckpointError: it is damaged.
    """
    there = [key for key in keys if key in index]
    if not there:
        return {}
    record = index.files[0]
    sizes = {key: math.prod(index.global_shape(key)) for key in there}
    plan = plan_read(index, [bytes_piece(key, size) for key, size in sizes.items()], (), index.stored)
    if plan.problems or max(sizes.values()) > record.size:  # before so much memory is taken
        raise CorruptCheckpointError(
            f"'{index.path / record.name}' holds something else than bytes as {listing(map(say_key, there))}; load another checkpoint"
        )
    values = {key: bytearray(size) for key, size in sizes.items()}
    execute_read(plan, [memoryview(values[key]) for key in there], UNCHANGED)
    return values
