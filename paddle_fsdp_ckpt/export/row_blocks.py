"""Which rank reads which rows of a tensor that lies the other way round, and which ranks get which columns of those.

Of such a tensor a rank keeps a few columns of every row. So each row is read by one rank only, in whole blocks, and handed on in parts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..layout import Range
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.reader import PARTIAL_STATE
from .local_values import TensorTarget, first_element
from .recipes.rules import TensorSource
from .values import Array, read_values

ROW_BLOCK_NBYTES = 8 << 20
"""How large a block is, at most, where its rows aren't longer."""

ROUND_NBYTES = 32 << 20
"""How much a rank reads for others, and how much it gets from others, before it passes on what it has read."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a tensor that lies the other way round.

    Attributes:
        target: number of the target that gets them as columns.
        source: the tensor.
        itemsize: bytes of one of its values.
        rows: which rows.
        reader: the rank that reads them.
        columns: which columns of them each rank needs that needs some.
    """

    target: int
    source: TensorSource
    itemsize: int
    rows: Range
    reader: int
    columns: tuple[tuple[int, Range], ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.rows.numel * self.source.shape[1] * self.itemsize

    def nbytes_of(self, columns: Range) -> int:
        """Bytes of some of its columns."""
        return self.rows.numel * columns.numel * self.itemsize

    @property
    def is_shared(self) -> bool:
        """Whether several ranks need some of it."""
        return len(self.columns) > 1

    def read(self, index: CheckpointIndex) -> Array:
        """Return the values of its rows, of two dimensions; a bfloat16 as the uint16 of its bits.

        Raises:
            What :func:`~.values.read_values` raises.
        """
        stored = index.whole_piece(self.source.name)
        length = stored.global_shape[1]
        wanted = replace(stored, flat_range=Range(self.rows.start * length, self.rows.stop * length))
        return read_values(index, wanted, PARTIAL_STATE).reshape(self.rows.numel, length)[:, : self.source.shape[1]]


def blocks_of(index: CheckpointIndex, number: int, target: TensorTarget) -> Iterator[Block]:
    """Yield the blocks of a target's sources that lie the other way round; each rank reads about as much of a source as it keeps of it.

    Args:
        index: of the Hugging Face model.
        number: of the target.
        target: of whose sources.
    """
    for source in target.sources:
        if not source.transpose:
            continue
        first = first_element(source) // target.width
        rows_of_target = Range(first, first + source.shape[1])
        columns = []
        for rank, kept in sorted(target.kept.items()):
            common = Range(kept.start // target.width, -(-kept.stop // target.width)).intersect(rows_of_target)
            if common.numel:
                columns.append((rank, common.shift(-first)))
        itemsize = DTYPE_NBYTES[index.dtypes[source.name]]
        at_once = max(1, ROW_BLOCK_NBYTES // (source.shape[1] * itemsize))
        total = sum(one.numel for _, one in columns)
        start = done = 0
        for rank, one in columns:
            done += one.numel
            stop = source.shape[0] * done // total
            for row in range(start, stop, at_once):
                yield Block(number, source, itemsize, Range(row, min(stop, row + at_once)), rank, tuple(columns))
            start = stop


def in_rounds(blocks: Iterable[Block]) -> list[list[Block]]:
    """Divide blocks among rounds, so that in each a rank reads and gets at most :data:`ROUND_NBYTES`, and all ranks have something to read.

    The blocks of a round are in ascending order of their readers.
    """
    waiting: dict[int, deque[Block]] = defaultdict(deque)
    for block in blocks:
        waiting[block.reader].append(block)
    rounds = []
    while waiting:
        taken: list[Block] = []
        read: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        for reader in sorted(waiting):
            queue = waiting[reader]
            while queue and (not taken or _has_room(queue[0], read, received)):
                block = queue.popleft()
                taken.append(block)
                read[reader] += block.nbytes
                for rank, columns in block.columns:
                    received[rank] += block.nbytes_of(columns)
            if not queue:
                del waiting[reader]
        rounds.append(taken)
    return rounds


def _has_room(block: Block, read: dict[int, int], received: dict[int, int]) -> bool:
    return read[block.reader] + block.nbytes <= ROUND_NBYTES and all(
        received[rank] + block.nbytes_of(columns) <= ROUND_NBYTES for rank, columns in block.columns
    )
