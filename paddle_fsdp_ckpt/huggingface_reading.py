"""The reading half of ``load_huggingface``: each byte of the files by one rank of a replica, what others keep of it handed on to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .errors import CheckpointError
from .export.local_values import LocalValues, TensorTarget
from .export.row_blocks import Block, blocks_of, in_rounds
from .export.values import Array
from .fsdp import AllToAllRoom, Communicator
from .host_memory import bytes_of, destinations
from .layout import Range
from .meeting import digest_of
from .storage.casts import as_array
from .storage.format import DTYPE_NBYTES
from .storage.index import CheckpointIndex
from .storage.reader import PARTIAL_STATE

_OWN_NBYTES = 8  # what a rank sends itself, since it must send itself something; what follows stays aligned


class Reading:
    """What the ranks of a replica read, step by step; after each step but the last they must know that all have succeeded.

    A tensor that lies in the file as in the model is read by each rank just where the rank keeps it. Of one that lies the other way round
    a rank keeps a part of every row: there each rank reads about as many whole rows as it keeps elements, and all hand on what others keep,
    in rounds of bounded size. Each replica reads for itself.

    Args:
        index: of the Hugging Face model.
        targets: the model's tensors, all of those that are cut in the same order on all ranks.
        communicator: the ranks over which it is cut.
        weights: this rank's part of the model, by key.
    """

    def __init__(
        self, index: CheckpointIndex, targets: Sequence[TensorTarget], communicator: Communicator, weights: Mapping[str, ShardedWeight]
    ) -> None:
        self._index = index
        self._targets = targets
        self._communicator = communicator
        self._weights = weights
        blocks = [block for number, target in enumerate(targets) for block in blocks_of(index, number, target)]
        self._own = [block for block in blocks if not block.is_shared and block.reader == communicator.rank]
        self._rounds = in_rounds(block for block in blocks if block.is_shared)
        self._outgoing: paddle.Tensor | None = None
        self._room: AllToAllRoom | None = None
        self._strips: list[_Strip] = []
        self._nbytes_placed = 0
        kept = [(target, target.kept.get(communicator.rank)) for target in targets]
        self._nbytes = sum(part.numel * DTYPE_NBYTES[target.dtype] for target, part in kept if part is not None)

    def how_far(self) -> tuple[int, int]:
        """Return how many bytes of the model are in their places on this rank, and of how many."""
        return self._nbytes_placed, self._nbytes

    @property
    def steps(self) -> int:
        """How many steps there are; the same on all ranks."""
        return len(self._rounds) + 1

    @cached_property
    def digest(self) -> str:
        """What stands for all that the ranks exchange."""
        return digest_of(repr(self._rounds))

    def step(self, number: int) -> None:
        """Take what the round before brought, and read this round's blocks; in the last step, all that nobody else needs.

        All ranks of the replica must call it, since all have succeeded with the step before.

        Args:
            number: of the step, from 0 on, in order.

        Raises:
            CheckpointError: values are too large for their new type; some may have been written.
            CorruptCheckpointError: a file is shorter than it was; some values may have been written.
            IncompleteCheckpointError: a file vanished; some values may have been written.
            OSError: the system refused; some values may have been written.
        """
        if number:
            self._receive(self._rounds[number - 1])
        if number < len(self._rounds):
            self._read_round(self._rounds[number])
        else:
            self._read_own()

    def _read_round(self, blocks: Sequence[Block]) -> None:
        """Read this rank's blocks of a round; keep what it needs of them, and pack the rest for those who do."""
        rank = self._communicator.rank
        numels = _numels(blocks, self._communicator.world_size)
        positions = np.cumsum(numels[rank]) - numels[rank]
        self._outgoing = paddle.empty([int(numels[rank].sum())], dtype="uint8")
        self._room = self._communicator.room_for(numels, "uint8")
        with destinations([self._outgoing]) as (packed,):
            for block in blocks:
                if block.reader != rank:
                    continue
                values = block.read(self._index)
                for other, columns in block.columns:
                    part = np.ascontiguousarray(values[:, columns.start : columns.stop])
                    if other == rank:
                        self._strips.append(_Strip(block, columns, part))
                        continue
                    start = int(positions[other])
                    packed[start : start + part.nbytes] = part.reshape(-1).view("uint8").data
                    positions[other] += part.nbytes

    def _receive(self, blocks: Sequence[Block]) -> None:
        """Exchange what was packed, and put what this rank gets, and what it has kept, in place."""
        rank = self._communicator.rank
        numels = _numels(blocks, self._communicator.world_size)
        assert self._outgoing is not None
        assert self._room is not None
        incoming = self._communicator.all_to_all(self._outgoing, numels, self._room)
        self._outgoing = self._room = None
        received = bytes_of(incoming)
        positions = np.cumsum(numels[:, rank]) - numels[:, rank]
        strips, self._strips = self._strips, []
        for block in blocks:
            for other, columns in block.columns:
                if other == rank and block.reader != rank:
                    start, nbytes = int(positions[block.reader]), block.nbytes_of(columns)
                    values = as_array(received[start : start + nbytes], self._index.dtypes[block.source.name])
                    strips.append(_Strip(block, columns, values.reshape(block.rows.numel, columns.numel)))
                    positions[block.reader] += nbytes
        for number in sorted({strip.block.target for strip in strips}):
            with self._local(number) as local:
                for block, columns, values in strips:
                    if block.target == number:
                        local.put_rows(block.source, block.rows, columns, values)

    def _read_own(self) -> None:
        """Read what only this rank keeps."""
        blocks: dict[int, list[Block]] = defaultdict(list)
        for block in self._own:
            blocks[block.target].append(block)
        for number, target in enumerate(self._targets):
            if self._communicator.rank not in target.kept:
                continue
            with self._local(number) as local:
                local.read_runs()
                for block in blocks[number]:
                    ((_, columns),) = block.columns
                    local.put_rows(block.source, block.rows, columns, block.read(self._index))
        self._nbytes_placed = self._nbytes  # what a resized tensor has besides is in its place already

    @contextmanager
    def _local(self, number: int) -> Iterator[LocalValues]:
        """Give what this rank keeps of a target, to be written to.

        Raises:
            CheckpointError: at the end, values that were put there are too large for their new type.
        """
        target = self._targets[number]
        with destinations([self._weights[target.key].local_tensor]) as (view,):
            local = LocalValues(self._index, target, target.kept[self._communicator.rank], view)
            yield local
        self._nbytes_placed += local.numel_placed * DTYPE_NBYTES[target.dtype]
        if local.overflows:
            raise CheckpointError(f"'{target.key}': {local.overflows} values are too large for {target.dtype}; {PARTIAL_STATE}")


class _Strip(NamedTuple):
    """Values of some columns of a block, of two dimensions."""

    block: Block
    columns: Range
    values: Array


def _numels(blocks: Sequence[Block], world_size: int) -> np.ndarray[Any, Any]:
    """Return how many bytes each rank (row) sends to each (column) in a round, see :meth:`~.fsdp.Communicator.all_to_all`."""
    numels = _OWN_NBYTES * np.eye(world_size, dtype=np.int64)
    for block in blocks:
        for rank, columns in block.columns:
            if rank != block.reader:
                numels[block.reader, rank] += block.nbytes_of(columns)
    return numels
