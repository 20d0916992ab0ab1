"""The values of a checkpoint, a bounded number of them at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, MismatchError, counted, listing
from ..layout import Range
from ..pieces import Piece
from ..storage.casts import as_array
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.plan import plan_read, plan_whole
from ..storage.reader import READ_ONLY, check_duplicates, execute_read

BATCH_NUMEL = 1 << 20
"""How many elements are in memory at a time."""

_STRIP = 64

Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """A run of values.

    Attributes:
        number: of the piece that they belong to.
        start: which element of the piece is the first.
        values: 1-D; a bfloat16 as the uint16 of its bits. Valid until the next part is asked for.
    """

    number: int
    start: int
    values: Array


def check_values(index: CheckpointIndex, keys: Sequence[str]) -> None:
    """Raise unless the checkpoint holds every element of these keys, and copies of the same elements are equal.

    Raises:
        MismatchError: keys are not whole; it lists them.
        CorruptCheckpointError: copies differ, or a file is damaged where there are copies.
        IncompleteCheckpointError: a file vanished.
    """
    plan = plan_whole(_only(index, keys), keys)
    if plan.problems.uncovered:
        raise MismatchError(
            f"'{index.path}' doesn't hold all elements of {counted(len(plan.problems.uncovered), 'key')}: "
            f"{listing(map(str, plan.problems.uncovered))}; nothing was written"
        )
    check_duplicates(plan)


def iter_values(index: CheckpointIndex, wanted: Sequence[Piece], consequence: str = READ_ONLY) -> Iterator[Part]:
    """Yield the values of pieces, in order, in batches of :data:`BATCH_NUMEL` elements; where a file has digests they are checked.

    Two checkpoints give the same parts where the pieces are as large, whatever their dtypes. ``consequence`` says in words what a failure
    leaves behind.

    Raises:
        What :func:`~paddle_fsdp_ckpt.storage.reader.execute_read` raises.
        CheckpointError: the checkpoint is said to hold values that it doesn't.
    """
    numel = min(BATCH_NUMEL, sum(piece.numel for piece in wanted))
    scratch = memoryview(bytearray(numel * max((DTYPE_NBYTES[piece.dtype] for piece in wanted), default=0)))
    for batch in _batches(wanted):
        parts, views, used = [], [], 0
        for number, start, stop in batch:
            piece = wanted[number]
            first = piece.box_range.start
            nbytes = (stop - start) * DTYPE_NBYTES[piece.dtype]
            parts.append(replace(piece, flat_range=Range(first + start, first + stop)))
            views.append(scratch[used : used + nbytes])
            used += nbytes
        read_into(index, parts, views, consequence)
        for (number, start, _), part, view in zip(batch, parts, views, strict=True):
            yield Part(number, start, as_array(view, part.dtype))


def read_values(index: CheckpointIndex, piece: Piece, consequence: str = READ_ONLY) -> Array:
    """Return all values of a piece, 1-D; a bfloat16 as the uint16 of its bits.

    Args:
        index: of the checkpoint.
        piece: what to read.
        consequence: what a failure leaves behind, in words.

    Raises:
        As :func:`iter_values`.
    """
    data = memoryview(bytearray(piece.numel * DTYPE_NBYTES[piece.dtype]))
    read_into(index, [piece], [data], consequence)
    return as_array(data, piece.dtype)


def read_pieces(index: CheckpointIndex, pieces: Sequence[Piece]) -> list[Array]:
    """Return all values of several pieces, each as :func:`read_values` does.

    Raises:
        As :func:`iter_values`.
    """
    data = [memoryview(bytearray(piece.numel * DTYPE_NBYTES[piece.dtype])) for piece in pieces]
    read_into(index, pieces, data)
    return [as_array(one, piece.dtype) for one, piece in zip(data, pieces, strict=True)]


def copy_transposed(source: Array, target: Array) -> None:
    """Copy a matrix into one that lies the other way round; in strips, which the processor's cache holds, and so five times as fast."""
    for start in range(0, source.shape[0], _STRIP):
        target[:, start : start + _STRIP] = source[start : start + _STRIP].T


def read_into(index: CheckpointIndex, pieces: Sequence[Piece], views: Sequence[memoryview], consequence: str = READ_ONLY) -> None:
    """Read all values of several pieces, each straight into bytes.

    Raises:
        As :func:`iter_values`.
    """
    plan = plan_read(_only(index, {piece.key for piece in pieces}), pieces, ())
    if plan.problems:
        raise CheckpointError(str(plan.problems))
    execute_read(plan, views, consequence)


def _only(index: CheckpointIndex, keys: Iterable[str]) -> CheckpointIndex:
    """Return the index of these keys alone: a plan looks at all keys of an index."""
    return replace(index, stored={key: index.stored[key] for key in keys})


def _batches(wanted: Sequence[Piece]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield groups of (number of a piece, first element, past the last), each of no more than a batch's elements; none empty."""
    batch: list[tuple[int, int, int]] = []
    room = BATCH_NUMEL
    for number, piece in enumerate(wanted):
        start = 0
        while start < piece.numel:
            stop = min(piece.numel, start + room)
            batch.append((number, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield batch
                batch, room = [], BATCH_NUMEL
    if batch:
        yield batch
