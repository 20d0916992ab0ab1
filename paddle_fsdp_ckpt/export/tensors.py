"""Read a tensor of a checkpoint as its recipe wants it: cut, transposed, in another dtype; a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..layout import Range
from ..pieces import Piece
from ..storage.casts import can_cast, convert
from ..storage.index import CheckpointIndex
from .recipes.rules import TensorSource
from .values import BATCH_NUMEL, Array, iter_values, read_values


class TensorReader:
    """Reads the tensors of one checkpoint.

    It keeps the last slab that was transposed, since the parts of a fused one come one after another.

    Attributes:
        overflows: name of a tensor -> how many of its finite values were too large for its dtype and became infinite.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self.overflows: dict[str, int] = {}
        self._index = index
        self._slab: tuple[Piece, Array] | None = None

    def blocks(self, source: TensorSource, dtype: str) -> Iterator[memoryview]:
        """Yield a tensor's bytes, row-major, in blocks of a few MiB; a block is valid until the next is asked for.

        Raises:
            What :func:`~paddle_fsdp_ckpt.storage.reader.execute_read` raises.
        """
        for values in self._transposed(source) if source.transpose else self._as_stored(source):
            converted = values
            if can_cast(source.slab.dtype, dtype):
                converted, overflow = convert(values, source.slab.dtype, dtype)
                if overflow:
                    self.overflows[source.name] = self.overflows.get(source.name, 0) + overflow
            yield converted.reshape(-1).view(np.uint8).data

    def _as_stored(self, source: TensorSource) -> Iterator[Array]:
        row = source.numel // max(1, sum(one.numel for one in source.ranges))
        pieces = [replace(source.slab, flat_range=Range(one.start * row, one.stop * row)) for one in source.ranges]
        for part in iter_values(self._index, pieces):
            yield part.values

    def _transposed(self, source: TensorSource) -> Iterator[Array]:
        matrix = self._read_slab(source.slab).reshape(-1, source.slab.local_shape[-1])
        step = max(1, BATCH_NUMEL // matrix.shape[0])
        for columns in source.ranges:
            for start in range(columns.start, columns.stop, step):
                yield np.ascontiguousarray(matrix[:, start : min(start + step, columns.stop)].T)

    def _read_slab(self, slab: Piece) -> Array:
        if self._slab is None or self._slab[0] != slab:
            self._slab = None  # before the next is made
            self._slab = slab, read_values(self._index, slab)
        return self._slab[1]
