"""Carry out a read plan: compare what is stored twice, then read straight into the destinations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..errors import CorruptCheckpointError
from .buffers import as_bytes, read_all
from .format import DTYPE_NBYTES
from .index import CheckpointIndex, open_rank_file
from .plan import Duplicate, ReadPlan

_CHUNK_NBYTES = 1 << 20
_BATCH_NBYTES = 16 << 20
_MAX_GAP_NBYTES = 4096
PARTIAL_STATE = "the objects may now hold a part of the checkpoint and must be loaded again, from this or another one, before use"
"""What a failure while reading leaves behind, in words."""


class _Range(NamedTuple):
    """Bytes of one file, where to read them to, and the key they belong to."""

    offset: int
    buffer: memoryview
    key: str


def check_duplicates(plan: ReadPlan) -> None:
    """Read everything that this rank wants and that is stored more than once, and compare; nothing is changed.

    It costs one read of each copy, and at most a few tens of MiB of memory.

    Raises:
        CorruptCheckpointError: two files hold different bytes for the same elements of a key; or a file changed underneath.
        IncompleteCheckpointError: a file vanished.
    """
    for batch in _batches(plan.duplicates):
        ranges: dict[int, list[_Range]] = {}
        pairs = []
        for duplicate in batch:
            one, other = bytearray(duplicate.nbytes), bytearray(duplicate.nbytes)
            pairs.append((one, other))
            ranges.setdefault(duplicate.file, []).append(_Range(duplicate.file_offset, memoryview(one), duplicate.key))
            ranges.setdefault(duplicate.other_file, []).append(_Range(duplicate.other_offset, memoryview(other), duplicate.key))
        for file, wanted in ranges.items():
            _read_file(plan.index, file, wanted, "nothing was changed")
        for duplicate, (one, other) in zip(batch, pairs, strict=True):
            if one != other:
                files = plan.index.files
                raise CorruptCheckpointError(
                    f"'{plan.index.path}', key '{duplicate.key}': {files[duplicate.file].name} and {files[duplicate.other_file].name} hold "
                    "different values for the same elements; nothing was changed. Either a file is damaged, or ranks saved different "
                    "tensors under one name: give those distinct keys or offsets, or load another checkpoint"
                )


def execute_read(plan: ReadPlan, destinations: Sequence[memoryview]) -> None:
    """Read the plan's bytes from its files straight into the destinations, without a copy.

    Args:
        plan: its problems are the caller's to judge before, and :func:`check_duplicates` the caller's to call.
        destinations: for each of the plan's targets, its C-contiguous writable bytes in row-major order, ``numel`` times the
            dtype's size. Any object with the buffer protocol will do.

    Raises:
        ValueError: the destinations don't fit the targets. Nothing was changed.
        CorruptCheckpointError: a file is shorter than it was; some destinations may have been written to.
        IncompleteCheckpointError: a file vanished; some destinations may have been written to.
        OSError: the system refused; some destinations may have been written to.
    """
    buffers = _check_destinations(plan, destinations)
    keys = [target.key for target in plan.targets]
    for file, reads in sorted(plan.reads.items()):
        ranges = [_Range(offset, buffers[target][start : start + nbytes], keys[target]) for offset, target, start, nbytes in reads]
        _read_file(plan.index, file, ranges, PARTIAL_STATE)


def _check_destinations(plan: ReadPlan, destinations: Sequence[memoryview]) -> list[memoryview]:
    if len(destinations) != len(plan.targets):
        raise ValueError(f"there are {len(plan.targets)} targets and {len(destinations)} destinations; give each target one")
    buffers = []
    for target, destination in zip(plan.targets, destinations, strict=True):
        buffer = as_bytes(destination, f"the destination of '{target.key}'")
        nbytes = target.numel * DTYPE_NBYTES[target.dtype]
        if len(buffer) != nbytes:
            raise ValueError(f"the destination of '{target.key}' has {len(buffer)} bytes, and its target {nbytes}")
        if buffer.readonly and nbytes:
            raise ValueError(f"the destination of '{target.key}' is read-only")
        buffers.append(buffer)
    return buffers


def _batches(duplicates: Iterable[Duplicate]) -> Iterator[list[Duplicate]]:
    """Yield the duplicates, cut into chunks, in groups small enough to be held in memory."""
    batch: list[Duplicate] = []
    nbytes = 0
    for key, file, offset, other_file, other_offset, total in duplicates:
        for start in range(0, total, _CHUNK_NBYTES):
            chunk = min(_CHUNK_NBYTES, total - start)
            batch.append(Duplicate(key, file, offset + start, other_file, other_offset + start, chunk))
            nbytes += chunk
            if nbytes >= _BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _read_file(index: CheckpointIndex, file: int, ranges: list[_Range], consequence: str) -> None:
    """Read ranges of one file into their buffers; neighbours, or nearly so, by one system call."""
    descriptor = open_rank_file(index.path, index.files[file])
    try:
        group: list[_Range] = []
        end = 0
        scratch = memoryview(bytearray(_MAX_GAP_NBYTES))
        for wanted in sorted(ranges, key=lambda wanted: wanted.offset):
            gap = wanted.offset - end
            if group and not 0 <= gap <= _MAX_GAP_NBYTES:
                _read_group(descriptor, index, file, group, consequence)
                group = []
            elif group and gap:
                group.append(_Range(end, scratch[:gap], wanted.key))
            group.append(wanted)
            end = wanted.offset + len(wanted.buffer)
        if group:
            _read_group(descriptor, index, file, group, consequence)
    finally:
        os.close(descriptor)


def _read_group(descriptor: int, index: CheckpointIndex, file: int, group: Sequence[_Range], consequence: str) -> None:
    start = group[0].offset
    end = start + read_all(descriptor, [wanted.buffer for wanted in group], start)
    for wanted in group:
        if wanted.offset + len(wanted.buffer) > end:
            raise CorruptCheckpointError(
                f"'{index.path / index.files[file].name}' ends at byte {end}, within key '{wanted.key}', since it was cut while "
                f"it was read; {consequence}"
            )
