"""A rank's part of a model's tensor, read out of the tensors of a Hugging Face model: only the rows that the rank keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..layout import Range
from ..pieces import Piece
from ..storage.casts import as_array
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from .recipes.rules import TensorSource
from .values import Array, copy_transposed, read_values, whole_piece


def read_local(index: CheckpointIndex, sources: Sequence[TensorSource], piece: Piece) -> Array:
    """Return the values of a piece, 1-D, in the dtype that the Hugging Face model has them in.

    Args:
        index: of the Hugging Face model.
        sources: the tensors that the piece's key would become there, whose shapes must be those that they have.
        piece: a flat range of the whole tensor under the key, or all of it.

    Raises:
        What :func:`~.values.read_values` raises.
    """
    shape = piece.global_shape or (1,)
    row = math.prod(shape[1:])
    rows = Range(piece.box_range.start // row, -(-piece.box_range.stop // row))
    dtype = index.dtypes[sources[0].name]
    block = as_array(memoryview(bytearray(rows.numel * row * DTYPE_NBYTES[dtype])), dtype).reshape(rows.numel, *shape[1:])
    for source in sources:
        _fill(index, source, block, rows)
    start = piece.box_range.start - rows.start * row
    return block.reshape(-1)[start : start + piece.numel]


def _fill(index: CheckpointIndex, source: TensorSource, block: Array, rows: Range) -> None:
    """Put what a source has of some rows of the key's tensor into them."""
    whole = whole_piece(index, source.name)
    if source.slab.local_shape != source.slab.global_shape:  # one of several that are stacked, which is a row
        number = source.slab.global_offset[0]
        if rows.start <= number < rows.stop:
            _fill_slab(index, source, whole, block[number - rows.start], Range(0, source.slab.local_shape[1]))
        return
    _fill_slab(index, source, whole, block, rows)


def _fill_slab(index: CheckpointIndex, source: TensorSource, whole: Piece, block: Array, rows: Range) -> None:
    position = 0
    if source.transpose:
        box = replace(whole, global_offset=(0, rows.start), local_shape=(whole.global_shape[0], rows.numel))
        columns = read_values(index, box).reshape(box.local_shape)
        for one in source.ranges:
            copy_transposed(columns[position : position + one.numel], block[:, one.start : one.stop])
            position += one.numel
        return
    row = math.prod(whole.global_shape[1:])
    for one in source.ranges:
        common = one.intersect(rows)
        if common.numel:
            first = position + common.start - one.start
            values = read_values(index, replace(whole, flat_range=Range(first * row, (first + common.numel) * row)))
            target = block[common.start - rows.start : common.stop - rows.start]
            target[...] = values.reshape(target.shape)
        position += one.numel
