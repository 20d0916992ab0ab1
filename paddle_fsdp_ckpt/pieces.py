"""Pieces: the part of one key's values that one rank holds or one file stores, and how two pieces overlap.

Pure arithmetic: integers and names, no tensors. All counts are elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .layout import Range


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one key's values that one rank holds or one file stores.

    The piece is the box ``local_shape`` at ``global_offset`` of a tensor of ``global_shape``; with a ``flat_range``, only
    that range of the box, flattened in row-major order.

    Attributes:
        key: the state dict key.
        dtype: Paddle's dtype name, e.g. ``"float32"``.
        global_shape: shape of the whole tensor; ``()`` for a scalar.
        global_offset: where the box begins, one number a dimension.
        local_shape: shape of the box.
        flat_range: which part of the flattened box, or None for all of it.
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    flat_range: Range | None = None

    @property
    def reaches_beyond(self) -> bool:
        """Whether the box doesn't lie inside of the tensor, as that of what is read for a tensor that has grown."""
        return any(o + n > size for size, o, n in zip(self.global_shape, self.global_offset, self.local_shape, strict=True))

    @property
    def numel(self) -> int:
        """How many elements the piece holds."""
        flat = self.flat_range
        return math.prod(self.local_shape) if flat is None else flat.stop - flat.start

    @property
    def box_range(self) -> Range:
        """The part of the flattened box that the piece holds: :attr:`flat_range`, or the whole box."""
        return Range(0, math.prod(self.local_shape)) if self.flat_range is None else self.flat_range


def whole_piece(key: str, dtype: str, shape: tuple[int, ...]) -> Piece:
    """Return the piece that is all of a tensor."""
    return Piece(key, dtype, shape, (0,) * len(shape), shape)


def only_difference(shape: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the one dimension in which two shapes differ; None where they differ in none, in several, or in how many they have."""
    differing = [i for i, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
    return differing[0] if len(shape) == len(other) and len(differing) == 1 else None


class Overlap(NamedTuple):
    """A run of elements that lie one after another in two pieces of the same key.

    Attributes:
        source_start: position of the first one in the source piece's own 1-D data.
        target_start: its position in the target piece's own 1-D data.
        numel: how many there are; at least 1.
    """

    source_start: int
    target_start: int
    numel: int


def check_piece(piece: Piece) -> None:
    """Raise unless the piece describes a part of its tensor.

    Raises:
        ValueError: shapes and offset of different ranks, negative numbers, a box outside of the tensor, or a flat range
            outside of the box.
    """
    global_shape, offset, local_shape = piece.global_shape, piece.global_offset, piece.local_shape
    if not len(global_shape) == len(offset) == len(local_shape):
        raise ValueError(
            f"'{piece.key}': global shape {list(global_shape)}, offset {list(offset)} and local shape {list(local_shape)} have different "
            "numbers of dimensions"
        )
    if any(o < 0 or n < 0 or o + n > size for size, o, n in zip(global_shape, offset, local_shape, strict=True)):
        raise ValueError(
            f"'{piece.key}': the box {list(local_shape)} at {list(offset)} doesn't lie inside of the tensor's shape {list(global_shape)}"
        )
    if piece.flat_range is not None and piece.flat_range.stop > math.prod(local_shape):
        raise ValueError(
            f"'{piece.key}': the flat range [{piece.flat_range.start}, {piece.flat_range.stop}) doesn't lie inside of the "
            f"{math.prod(local_shape)} elements of the local shape {list(local_shape)}"
        )


def overlaps(source: Piece, target: Piece) -> Iterator[Overlap]:
    """Yield the runs of elements that both pieces hold, in ascending order of both positions, as few as there can be.

    The pieces must be of one tensor: the same ``global_shape``; boxes may reach beyond it. Positions count in each piece's own 1-D data:
    its box in row-major order, or the flat range of that.
    """
    source_range, target_range = source.box_range, target.box_range
    if source.local_shape == target.local_shape and source.global_offset == target.global_offset:
        common = source_range.intersect(target_range)
        if common.numel:
            yield Overlap(common.start - source_range.start, common.start - target_range.start, common.numel)
        return
    for source_start, target_start, numel in _box_overlaps(source, target):
        # Positions in the boxes so far; now cut the run by both flat ranges.
        skip = max(0, source_range.start - source_start, target_range.start - target_start)
        stop = min(numel, source_range.stop - source_start, target_range.stop - target_start)
        if skip < stop:
            yield Overlap(source_start + skip - source_range.start, target_start + skip - target_range.start, stop - skip)


def ranges_inside(piece: Piece) -> Iterator[Range]:
    """Yield which ranges of the piece's own 1-D data lie inside of its tensor, in ascending order; none empty."""
    if not piece.reaches_beyond:
        if piece.numel:
            yield Range(0, piece.numel)
        return
    for _, start, numel in overlaps(whole_piece(piece.key, piece.dtype, piece.global_shape), piece):
        yield Range(start, start + numel)


def _box_overlaps(source: Piece, target: Piece) -> Iterator[Overlap]:
    """Yield the runs that both boxes share; all that both flat ranges reach, and perhaps some more."""
    starts = [max(a, b) for a, b in zip(source.global_offset, target.global_offset, strict=True)]
    stops = [
        min(a + n, b + m)
        for a, n, b, m in zip(source.global_offset, source.local_shape, target.global_offset, target.local_shape, strict=True)
    ]
    for piece in (source, target):
        first, last = _reach_of_first_axis(piece)
        starts[0], stops[0] = max(starts[0], first), min(stops[0], last)
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return
    source_strides, target_strides = _strides(source.local_shape), _strides(target.local_shape)
    # A run goes along this axis, and over all axes after it, which both boxes hold whole.
    axis = len(starts) - 1
    while axis > 0 and source.local_shape[axis] == target.local_shape[axis] == stops[axis] - starts[axis]:
        axis -= 1
    numel = (stops[axis] - starts[axis]) * source_strides[axis]
    source_base = sum((g - o) * stride for g, o, stride in zip(starts, source.global_offset, source_strides, strict=True))
    target_base = sum((g - o) * stride for g, o, stride in zip(starts, target.global_offset, target_strides, strict=True))
    for steps in itertools.product(*(range(stop - start) for start, stop in zip(starts[:axis], stops[:axis], strict=True))):
        yield Overlap(
            source_base + sum(i * stride for i, stride in zip(steps, source_strides, strict=False)),
            target_base + sum(i * stride for i, stride in zip(steps, target_strides, strict=False)),
            numel,
        )


def _reach_of_first_axis(piece: Piece) -> tuple[int, int]:
    """Return which indices of the tensor's first axis the piece touches, half-open."""
    row = math.prod(piece.local_shape[1:])
    flat = piece.box_range
    if row == 0 or flat.numel == 0:
        return 0, 0
    return piece.global_offset[0] + flat.start // row, piece.global_offset[0] + (flat.stop - 1) // row + 1


def _strides(shape: Sequence[int]) -> list[int]:
    """Return how many elements one step along each axis is worth, in row-major order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return strides
