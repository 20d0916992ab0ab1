"""Read a tensor of a checkpoint as its recipe wants it: cut, transposed, in another dtype; a block at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..errors import CheckpointError, listing
from ..layout import Range
from ..pieces import Piece
from ..storage.casts import can_cast, convert
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.plan import FLOATING_DTYPES
from .output import OutputTensor
from .recipes.rules import TensorSource
from .values import BATCH_NUMEL, Array, copy_transposed, iter_values, read_pieces


class TensorReader:
    """Reads the tensors of one checkpoint.

    Small slabs that come one after another are a batch, which is read at once. Each thread keeps the last batch that it read, since the
    parts of a fused slab come one after another.

    Args:
        index: of the checkpoint.
        dtype: Paddle's name of a floating point type that all floating point tensors get; None: each keeps its own.

    Raises:
        CheckpointError: there is no such type.
    """

    def __init__(self, index: CheckpointIndex, dtype: str | None) -> None:
        if dtype is not None and dtype not in FLOATING_DTYPES:
            raise CheckpointError(f"dtype is {dtype!r:.100}, and one of {', '.join(sorted(FLOATING_DTYPES))} is needed")
        self._index = index
        self._dtype = dtype
        self._overflows: dict[str, int] = {}
        self._kept = _KeptBatch()
        self._batch_of: dict[Piece, int] = {}
        self._batches: list[list[Piece]] = []
        self._room = 0

    def output(self, source: TensorSource) -> OutputTensor:
        """Return a tensor as it is to be written; its values are read when they are."""
        batch = self._place(source.slab)
        stored = source.slab.dtype
        dtype = self._dtype if self._dtype is not None and stored in FLOATING_DTYPES else stored
        return OutputTensor(
            source.name, dtype, source.shape, source.numel * DTYPE_NBYTES[dtype], batch, lambda: self._blocks(source, dtype)
        )

    def check_overflows(self) -> None:
        """Raise where finite values, of tensors that were written so far, were too large for their dtype.

        Raises:
            CheckpointError: it lists the tensors.
        """
        if self._overflows:
            names = listing(f"{count} of '{name}'" for name, count in self._overflows.items())
            raise CheckpointError(
                f"finite values are too large for {self._dtype}, and would become infinite: {names}; nothing was written. Use another dtype"
            )

    def _blocks(self, source: TensorSource, dtype: str) -> Iterator[memoryview]:
        """Yield a tensor's bytes, row-major, in blocks of a few MiB; a block is valid until the next is asked for."""
        for values in self._transposed(source) if source.transpose else self._as_stored(source):
            converted = values
            if can_cast(source.slab.dtype, dtype):
                converted, overflow = convert(values, source.slab.dtype, dtype)
                if overflow:
                    self._overflows[source.name] = self._overflows.get(source.name, 0) + overflow
            yield converted.reshape(-1).view(np.uint8).data

    def _as_stored(self, source: TensorSource) -> Iterator[Array]:
        row = source.numel // max(1, sum(one.numel for one in source.ranges))
        if source.slab.numel <= BATCH_NUMEL:
            values = self._read_slab(source.slab)
            yield from (values[one.start * row : one.stop * row] for one in source.ranges)
            return
        pieces = [replace(source.slab, flat_range=Range(one.start * row, one.stop * row)) for one in source.ranges]
        for part in iter_values(self._index, pieces):
            yield part.values

    def _transposed(self, source: TensorSource) -> Iterator[Array]:
        matrix = self._read_slab(source.slab).reshape(-1, source.slab.local_shape[-1])
        step = max(1, BATCH_NUMEL // matrix.shape[0])
        for columns in source.ranges:
            for start in range(columns.start, columns.stop, step):
                strip = matrix[:, start : min(start + step, columns.stop)]
                block = np.empty(strip.shape[::-1], strip.dtype)
                copy_transposed(strip, block)
                yield block

    def _read_slab(self, slab: Piece) -> Array:
        number = self._batch_of[slab]
        if self._kept.number != number:
            self._kept.number, self._kept.slabs = None, {}  # before the next are made
            batch = self._batches[number]
            self._kept.slabs = dict(zip(batch, read_pieces(self._index, batch), strict=True))
            self._kept.number = number
        return self._kept.slabs[slab]

    def _place(self, slab: Piece) -> int:
        """Return the number of the batch that a slab is in; a new one comes into the last, while those are few elements together."""
        if slab not in self._batch_of:
            if slab.numel > self._room:
                self._batches.append([])
                self._room = BATCH_NUMEL
            self._batches[-1].append(slab)
            self._room -= slab.numel
            self._batch_of[slab] = len(self._batches) - 1
        return self._batch_of[slab]


class _KeptBatch(threading.local):
    """The batch that a thread read last."""

    number: int | None = None

    def __init__(self) -> None:
        self.slabs: dict[Piece, Array] = {}
