"""Conversion between floating point types by value, with numpy alone: to the nearest, ties to even, as IEEE 754 has it.

A bfloat16, which numpy lacks, is the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..layout import Range
from ..pieces import Piece, ranges_inside
from .format import DTYPE_NBYTES
from .index import CheckpointIndex
from .plan import FLOATING_DTYPES, plan_read
from .reader import execute_read

_CHUNK_NBYTES = 16 << 20

_BITS: dict[str, tuple[int, int]] = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}
"""The floating point types: how many bits of the exponent and of the fraction they have."""

Array = np.ndarray[Any, Any]


def can_cast(source: str, target: str) -> bool:
    """Tell whether :func:`convert` knows both types, by Paddle's names, and they differ."""
    return {source, target} <= FLOATING_DTYPES and source != target


def may_round(source: str, target: str) -> bool:
    """Tell whether converting from ``source`` to ``target`` can change a finite value."""
    return can_cast(source, target) and any(a > b for a, b in zip(_BITS[source], _BITS[target], strict=True))


def may_overflow(source: str, target: str) -> bool:
    """Tell whether finite values of ``source`` can become infinite as ``target``."""
    # A float32 can lie between the largest bfloat16 and infinity.
    return source != "float16" and may_round(source, target)


def convert(values: Array, source: str, target: str) -> tuple[Array, int]:
    """Return values in another floating point type, and how many finite ones were too large for it and became infinite.

    NaN stays NaN, infinity infinity; subnormal numbers are kept.

    Args:
        values: as :func:`as_array` gives them.
        source: Paddle's name of their type.
        target: Paddle's name of the type to return.
    """
    floats = (values.astype(np.uint32) << 16).view(np.float32) if source == "bfloat16" else values
    with np.errstate(all="ignore"):
        converted = _to_bfloat16(floats) if target == "bfloat16" else floats.astype(target)
    if not may_overflow(source, target):
        return converted, 0
    infinite = (converted & 0x7FFF) == 0x7F80 if target == "bfloat16" else np.isinf(converted)
    return converted, int(np.count_nonzero(infinite & np.isfinite(floats)))


def as_array(view: memoryview, dtype: str) -> Array:
    """Return bytes as a 1-D array of their values; a bfloat16 as the uint16 of its bits."""
    return np.frombuffer(view, "uint16" if dtype == "bfloat16" else dtype)


def _to_bfloat16(values: Array) -> Array:
    if values.dtype == np.float64:
        values = _to_odd_float32(values)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding a NaN could give an infinity.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _to_odd_float32(values: Array) -> Array:
    """Return float64 values as float32, inexact ones rounded to an odd last bit, so that rounding them once more rounds rightly."""
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    widened = nearest.astype(np.float64)
    bits -= np.abs(widened) > np.abs(values)
    bits |= widened != values
    return nearest


def read_cast(
    index: CheckpointIndex, wanted: Sequence[Piece], destinations: Sequence[memoryview] | None, *, check_digests: bool = True
) -> list[int]:
    """Read pieces whose values are stored in another floating point type, and convert them; in bounded memory.

    Args:
        index: of the checkpoint. It must hold all values.
        wanted: in the type that they shall have; what reaches beyond its tensor is left as it is.
        destinations: the bytes of each, writable; None to convert only and keep nothing, to see what would happen.
        check_digests: whether bytes are compared with their digests.

    Returns:
        For each piece, how many finite values are too large for its type.

    Raises:
        What :func:`~.reader.execute_read` raises.
    """
    overflows = [0] * len(wanted)
    scratch = memoryview(bytearray(min(_CHUNK_NBYTES, sum(_stored_nbytes(index, piece, piece.numel) for piece in wanted))))
    for batch in _batches(index, wanted):
        views, used = [], 0
        for number, start, stop in batch:
            nbytes = _stored_nbytes(index, wanted[number], stop - start)
            views.append(scratch[used : used + nbytes])
            used += nbytes
        parts = [_part(wanted[number], index.dtypes[wanted[number].key], start, stop) for number, start, stop in batch]
        execute_read(plan_read(index, parts, ()), views, check_digests=check_digests)
        for part, view, (number, start, _) in zip(parts, views, batch, strict=True):
            dtype = wanted[number].dtype
            size = DTYPE_NBYTES[dtype]
            values = as_array(view, part.dtype)
            for inside in ranges_inside(part):
                converted, overflow = convert(values[inside.start : inside.stop], part.dtype, dtype)
                overflows[number] += overflow
                if destinations is not None:
                    destinations[number][(start + inside.start) * size : (start + inside.stop) * size] = converted.view(np.uint8).data
                del converted  # before the next of its size is made
    return overflows


def _stored_nbytes(index: CheckpointIndex, piece: Piece, numel: int) -> int:
    return numel * DTYPE_NBYTES[index.dtypes[piece.key]]


def _part(piece: Piece, dtype: str, start: int, stop: int) -> Piece:
    first = piece.box_range.start
    return replace(piece, dtype=dtype, flat_range=Range(first + start, first + stop))


def _batches(index: CheckpointIndex, wanted: Sequence[Piece]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield groups of (number of a piece, first element, past the last), each of no more bytes than the scratch holds."""
    batch: list[tuple[int, int, int]] = []
    room = _CHUNK_NBYTES
    for number, piece in enumerate(wanted):
        size = DTYPE_NBYTES[index.dtypes[piece.key]]
        start = 0
        while start < piece.numel:
            if room < size:
                yield batch
                batch, room = [], _CHUNK_NBYTES
            stop = min(piece.numel, start + room // size)
            batch.append((number, start, stop))
            room -= (stop - start) * size
            start = stop
    if batch:
        yield batch
