"""A tensor of a model out of tensors of a Hugging Face model: the range of it that a rank keeps, written a few values at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..layout import Range
from ..pieces import Piece, overlaps
from ..storage.casts import as_array, convert
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.reader import PARTIAL_STATE
from .recipes.rules import TensorSource
from .values import Array, copy_transposed, iter_values, read_into


@dataclass(frozen=True)
class TensorTarget:
    """A tensor of a model, and where its values come from.

    Attributes:
        key: its name, or one of them.
        dtype: Paddle's name of its type.
        shape: of the whole tensor.
        kept: which of its elements, flattened, each rank keeps that keeps some.
        sources: the tensors that the key would become in the Hugging Face model, whose shapes must be those that they have; or just one, of
            another size in one dimension there, by the rows and columns that both have.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    kept: Mapping[int, Range]
    sources: tuple[TensorSource, ...]

    @property
    def width(self) -> int:
        """How long a row is, where the tensor is taken as a matrix of all its rows, one after another."""
        return self.shape[-1] if self.shape else 1


def first_element(source: TensorSource) -> int:
    """Return which element of the flattened target the slab of a source begins with."""
    slab = source.slab
    is_stacked = len(source.shape) < len(slab.local_shape)
    return slab.global_offset[0] * slab.numel if is_stacked else 0


class LocalValues:
    """The memory for what a rank keeps of a target.

    Attributes:
        overflows: how many values that were put here were too large for the target's type.
        numel_placed: how many elements got their values so far.
    """

    def __init__(self, index: CheckpointIndex, target: TensorTarget, kept: Range, data: memoryview) -> None:
        """Take ``data``, the writable bytes of the elements ``kept``, of the target's dtype."""
        self._index = index
        self._target = target
        self._kept = kept
        self._data = data
        self._values = as_array(data, target.dtype)
        self._stored = index.dtypes[target.sources[0].name]
        self.overflows = 0
        self.numel_placed = 0

    def read_runs(self) -> None:
        """Read all that comes from sources that lie as the target does: just the bytes of these elements.

        Raises:
            What :func:`~.values.iter_values` raises.
        """
        runs = [run for source in self._target.sources if not source.transpose for run in self._runs(source)]
        if not runs:
            return
        pieces, starts = [piece for piece, _ in runs], [start for _, start in runs]
        self.numel_placed += sum(piece.numel for piece in pieces)
        if self._stored == self._target.dtype:
            itemsize = DTYPE_NBYTES[self._stored]
            views = [self._data[start * itemsize : (start + piece.numel) * itemsize] for piece, start in runs]
            read_into(self._index, pieces, views, PARTIAL_STATE)
            return
        for number, start, values in iter_values(self._index, pieces, PARTIAL_STATE):
            first = starts[number] + start
            self._values[first : first + values.size] = self._converted(values)

    def _runs(self, source: TensorSource) -> Iterator[tuple[Piece, int]]:
        """Yield what to read of a source, and which of the kept elements is the first of it."""
        shape = source.slab.local_shape[len(source.slab.local_shape) - len(source.shape) :]
        if self._index.global_shape(source.name)[1:] != shape[1:]:
            yield from self._runs_of_other_width(source)
            return
        row = math.prod(shape[1:])
        first, position = first_element(source), 0
        for one in source.ranges:
            run = Range(one.start * row, one.stop * row).shift(first)
            common = run.intersect(self._kept)
            if common.numel:
                wanted = common.shift(position - run.start)
                yield replace(self._index.whole_piece(source.name), flat_range=wanted), common.start - self._kept.start
            position += run.numel

    def _runs_of_other_width(self, source: TensorSource) -> Iterator[tuple[Piece, int]]:
        """Yield the same of a source whose rows are longer than the target's, or shorter."""
        stored = self._index.whole_piece(source.name)
        for start, first, numel in overlaps(stored, replace(source.slab, flat_range=self._kept)):
            yield replace(stored, flat_range=Range(start, start + numel)), first

    def put_rows(self, source: TensorSource, rows: Range, columns: Range, values: Array) -> None:
        """Put rows of a source that lies the other way round to where the target has them as columns; what isn't kept is left out.

        Args:
            source: the tensor.
            rows: which of its rows.
            columns: which of their columns.
            values: these, of shape ``[rows.numel, columns.numel]``, in the source's dtype.
        """
        first_row, position = first_element(source) // self._target.width + columns.start, 0
        for one in source.ranges:
            common = Range(position, position + one.numel).intersect(rows)
            if common.numel:
                part = values[common.start - rows.start : common.stop - rows.start]
                self._put_transposed(part, first_row, one.start + common.start - position)
            position += one.numel

    def _put_transposed(self, values: Array, first_row: int, first_column: int) -> None:
        """Put the transposed of a matrix at a place of the target."""
        width, kept = self._target.width, self._kept
        rows = Range(first_row, first_row + values.shape[1])
        start = -(-kept.start // width)
        whole = Range(start, max(start, kept.stop // width))
        inner = whole.intersect(rows)
        if inner.numel:
            matrix = self._values[inner.start * width - kept.start : inner.stop * width - kept.start].reshape(inner.numel, width)
            part = self._converted(values[:, inner.start - rows.start : inner.stop - rows.start])
            copy_transposed(part, matrix[:, first_column : first_column + values.shape[0]])
            self.numel_placed += part.size
        for row in {kept.start // width, (kept.stop - 1) // width}:
            if rows.start <= row < rows.stop and not whole.start <= row < whole.stop:  # of which the rank keeps a part
                run = Range(row * width + first_column, row * width + first_column + values.shape[0])
                common = run.intersect(kept)
                column = values[common.start - run.start : common.stop - run.start, row - rows.start]
                self._values[common.start - kept.start : common.stop - kept.start] = self._converted(column)
                self.numel_placed += column.size

    def _converted(self, values: Array) -> Array:
        if self._stored == self._target.dtype:
            return values
        converted, overflows = convert(values, self._stored, self._target.dtype)
        self.overflows += overflows
        return converted
