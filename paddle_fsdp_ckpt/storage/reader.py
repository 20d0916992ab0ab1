"""Carry out a read plan: compare what is stored twice, then read straight into the destinations, checking digests as bytes pass.

Files are read in whole chunks, since a digest is of a whole chunk: what of a chunk nobody wants goes into scratch memory, and a chunk
of many small values goes there as a whole and is copied from there. Where there are no digests, as in Hugging Face's files, only small
gaps are read over.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from ..errors import CorruptCheckpointError
from .addresses import address_of, bytes_at, copy
from .buffers import CACHED_NBYTES, as_bytes, in_groups, read_all
from .digests import CHUNK_NBYTES, Chunk, chunk, chunks_of, new_digest
from .format import DTYPE_NBYTES
from .index import CheckpointIndex, open_rank_file
from .plan import Duplicate, ReadPlan
from .system_errors import reading_file

_PART_NBYTES = 4 << 20
_BATCH_NBYTES = 16 << 20
_READERS = 2
_LARGEST_GAP = 1 << 16  # from a disk, to read over one of 8 to 56 KiB took 0.2 to 0.7 of the time that calls for what is around it took
_MOST_DIRECT = 64  # places in one chunk: to copy a few kilobytes costs less than to hand them to the system one by one
_CHUNKS_A_READER = 16  # many, since to change threads costs more than to read a chunk
UNCHANGED = "nothing was changed"
PARTIAL_STATE = "the objects may now hold a part of the checkpoint and must be loaded again, from this or another one, before use"
"""What a failure while reading leaves behind, in words."""


class FileRange(NamedTuple):
    """Bytes of one file, and where to read them to.

    Attributes:
        offset: first byte in the file.
        address: of the memory that takes the first one; see :mod:`.addresses`.
        nbytes: how many there are, at least 1.
        key: which they belong to, for messages.
    """

    offset: int
    address: int
    nbytes: int
    key: str


class _ChunkRead(NamedTuple):
    """A chunk to read, a key that it holds, and what of it goes where; the rest goes nowhere."""

    chunk: Chunk
    key: str
    wanted: list[FileRange]


def check_duplicates(plan: ReadPlan) -> None:
    """Read everything that this rank wants and that is stored more than once, and compare; nothing is changed.

    It costs one read of each copy, and at most a few tens of MiB of memory.

    Raises:
        CorruptCheckpointError: two files hold different bytes for the same elements of a key; a chunk is damaged; or a file changed
            underneath.
        IncompleteCheckpointError: a file vanished.
    """
    for duplicate in differing_duplicates(plan.index, plan.duplicates):
        files = plan.index.files
        raise CorruptCheckpointError(
            f"'{plan.index.path}', key '{duplicate.key}': {files[duplicate.file].name} and {files[duplicate.other_file].name} hold "
            f"different values for the same elements; {UNCHANGED}. Either a file is damaged, or ranks saved different "
            "tensors under one name: give those distinct keys or offsets, or load another checkpoint"
        )


def differing_duplicates(index: CheckpointIndex, duplicates: Iterable[Duplicate]) -> Iterator[Duplicate]:
    """Read both copies of what is stored twice, and yield the parts that differ.

    Raises:
        CorruptCheckpointError: a chunk is damaged or can't be read, or a file changed underneath.
        IncompleteCheckpointError: a file vanished.
    """
    for batch in _batches(duplicates):
        ranges: dict[int, list[FileRange]] = {}
        pairs = []
        for duplicate in batch:
            one, other = bytearray(duplicate.nbytes), bytearray(duplicate.nbytes)
            pairs.append((one, other))
            for file, offset, copied in (
                (duplicate.file, duplicate.file_offset, one),
                (duplicate.other_file, duplicate.other_offset, other),
            ):
                part = FileRange(offset, address_of(copied), duplicate.nbytes, duplicate.key)
                ranges.setdefault(file, []).append(part)
        for file, wanted in ranges.items():
            _read_file(index, file, wanted, UNCHANGED)
        for duplicate, (one, other) in zip(batch, pairs, strict=True):
            if one != other:
                yield duplicate


def verify_first(plan: ReadPlan, on_read: Callable[[int], None] | None = None) -> None:
    """Read every chunk that :func:`execute_read` would, and compare its digest; nothing is changed.

    It costs one more read of what the plan reads. Where there are no digests, in directories of stock Paddle, it does nothing.
    ``on_read`` is told of each few bytes that were read.

    Raises:
        CorruptCheckpointError: a chunk is damaged or can't be read, or a file changed underneath.
        IncompleteCheckpointError: a file vanished.
        OSError: the system refused.
    """
    for file, reads in sorted(plan.reads.items()):
        record = plan.index.files[file]
        if not record.digests:
            continue
        keys: dict[int, str] = {}
        for offset, target, _, nbytes in reads:
            for number in chunks_of(offset, offset + nbytes, record.header_nbytes):
                keys.setdefault(number, plan.targets[target].key)
        chunks = [chunk(number, record.size, record.header_nbytes) for number in sorted(keys)]
        _read_chunks(plan.index, file, [_ChunkRead(one, keys[one.number], []) for one in chunks], UNCHANGED, on_read=on_read)


def execute_read(
    plan: ReadPlan,
    destinations: Sequence[memoryview],
    consequence: str = PARTIAL_STATE,
    *,
    check_digests: bool = True,
    on_read: Callable[[int], None] | None = None,
) -> None:
    """Read the plan's bytes from its files straight into the destinations, without a copy.

    Args:
        plan: its problems are the caller's to judge before, and :func:`check_duplicates` the caller's to call.
        destinations: for each of the plan's targets, its C-contiguous writable bytes in row-major order, ``numel`` times the
            dtype's size. Any object with the buffer protocol will do.
        consequence: what a failure while reading leaves behind, in words.
        check_digests: whether bytes are compared with their digests.
        on_read: told of each few bytes that were read.

    Raises:
        ValueError: the destinations don't fit the targets. Nothing was changed.
        CorruptCheckpointError: a chunk is damaged or can't be read, or a file is shorter than it was; some destinations may have been
            written to.
        IncompleteCheckpointError: a file vanished; some destinations may have been written to.
        OSError: the system refused; some destinations may have been written to.
    """
    addresses = _check_destinations(plan, destinations)
    keys = [target.key for target in plan.targets]
    ranges = {
        file: [FileRange(offset, addresses[target] + start, nbytes, keys[target]) for offset, target, start, nbytes in reads]
        for file, reads in plan.reads.items()
    }
    read_ranges(plan.index, ranges, consequence, check_digests=check_digests, on_read=on_read)


def read_ranges(
    index: CheckpointIndex,
    ranges: Mapping[int, Iterable[FileRange]],
    consequence: str = PARTIAL_STATE,
    *,
    check_digests: bool = True,
    on_read: Callable[[int], None] | None = None,
) -> None:
    """Read ranges of files straight into memory that the caller keeps alive; else as :func:`execute_read`.

    Args:
        index: what the checkpoint holds.
        ranges: position of a file in the index -> what to read of it. No two may have memory in common.
        consequence: see :func:`execute_read`; so are the rest, and what is raised.
        check_digests: see there.
        on_read: see there.
    """
    for file, wanted in sorted(ranges.items()):
        _read_file(index, file, wanted, consequence, check_digests, on_read)


def _check_destinations(plan: ReadPlan, destinations: Sequence[memoryview]) -> list[int]:
    if len(destinations) != len(plan.targets):
        raise ValueError(f"there are {len(plan.targets)} targets and {len(destinations)} destinations; give each target one")
    addresses = []
    for target, destination in zip(plan.targets, destinations, strict=True):
        buffer = as_bytes(destination, target.key, "the destination of '{}'")
        nbytes = target.numel * DTYPE_NBYTES[target.dtype]
        if len(buffer) != nbytes:
            raise ValueError(f"the destination of '{target.key}' has {len(buffer)} bytes, and its target {nbytes}")
        if buffer.readonly and nbytes:
            raise ValueError(f"the destination of '{target.key}' is read-only")
        addresses.append(address_of(buffer) if nbytes else 0)
    return addresses


def _batches(duplicates: Iterable[Duplicate]) -> Iterator[list[Duplicate]]:
    """Yield the duplicates, cut into parts, in groups small enough to be held in memory."""
    batch: list[Duplicate] = []
    nbytes = 0
    for key, file, offset, other_file, other_offset, total in duplicates:
        for start in range(0, total, _PART_NBYTES):
            part = min(_PART_NBYTES, total - start)
            batch.append(Duplicate(key, file, offset + start, other_file, other_offset + start, part))
            nbytes += part
            if nbytes >= _BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _read_file(
    index: CheckpointIndex,
    file: int,
    ranges: Iterable[FileRange],
    consequence: str,
    check_digests: bool = True,
    on_read: Callable[[int], None] | None = None,
) -> None:
    """Read ranges of one file into their buffers, in whole chunks where these have digests, and compare those."""
    record = index.files[file]
    reads = (read for layer in _layers(ranges) for read in _by_chunk(layer, record.size, record.header_nbytes))
    if not record.digests:
        reads = (part for read in reads for part in _without_gaps(read))
    _read_chunks(index, file, reads, consequence, check_digests, on_read)


def _read_chunks(
    index: CheckpointIndex,
    file: int,
    reads: Iterable[_ChunkRead],
    consequence: str,
    check_digests: bool = True,
    on_read: Callable[[int], None] | None = None,
) -> None:
    """Read chunks of one file, in a few threads; each digests bytes while its processor still has them at hand."""
    descriptor = open_rank_file(index.path, index.files[file])
    free: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(_READERS):
        free.put(memoryview(bytearray(CHUNK_NBYTES)))

    def read_some(some: list[_ChunkRead]) -> int:
        scratch = free.get()
        try:
            for read in some:
                _read_chunk(descriptor, index, file, read, scratch, consequence, check_digests)
        finally:
            free.put(scratch)
        return sum(read.chunk.stop - read.chunk.start for read in some)

    try:
        with reading_file(index.path / index.files[file].name, consequence), ThreadPoolExecutor(_READERS) as pool:
            parts = _in_lists(reads, _CHUNKS_A_READER)
            # Not all at once, so that after an error little more is read.
            while batch := list(itertools.islice(parts, 2 * _READERS)):
                done: Iterator[int]
                try:
                    done = pool.map(read_some, batch)
                except RuntimeError:  # Python 3.12 makes no more threads while the process ends
                    done = map(read_some, batch)
                for nbytes in done:
                    if on_read is not None:
                        on_read(nbytes)
    finally:
        os.close(descriptor)


def _in_lists(reads: Iterable[_ChunkRead], length: int) -> Iterator[list[_ChunkRead]]:
    rest = iter(reads)
    while part := list(itertools.islice(rest, length)):
        yield part


def _layers(ranges: Iterable[FileRange]) -> Iterator[list[FileRange]]:
    """Yield the ranges, none of them empty, in as many lists as it takes that no two in a list overlap; in ascending order."""
    rest = sorted(ranges)
    while rest:
        layer: list[FileRange] = []
        later: list[FileRange] = []
        end = 0
        for wanted in rest:
            if wanted.offset < end:
                later.append(wanted)
            else:
                layer.append(wanted)
                end = wanted.offset + wanted.nbytes
        yield layer
        rest = later


def _by_chunk(layer: Sequence[FileRange], size: int, header_nbytes: int) -> Iterator[_ChunkRead]:
    """Yield the chunks that the ranges touch, with the ranges cut at the ends of the chunks."""
    current: Chunk | None = None
    inside: list[FileRange] = []
    for wanted in layer:
        offset, address, nbytes, key = wanted
        if current is not None and offset + nbytes <= current.stop:
            inside.append(wanted)
            continue
        for number in chunks_of(offset, offset + nbytes, header_nbytes):
            if current is None or number != current.number:
                if current is not None:
                    yield _ChunkRead(current, inside[0].key, inside)
                current, inside = chunk(number, size, header_nbytes), []
            start, stop = max(offset, current.start), min(offset + nbytes, current.stop)
            inside.append(FileRange(start, address + start - offset, stop - start, key))
    if current is not None:
        yield _ChunkRead(current, inside[0].key, inside)


def _without_gaps(read: _ChunkRead) -> Iterator[_ChunkRead]:
    """Yield the parts of a chunk that somebody wants, those with small gaps between them as one."""
    part: list[FileRange] = []
    end = read.chunk.start
    for wanted in read.wanted:
        if part and wanted.offset - end > _LARGEST_GAP:
            yield _ChunkRead(Chunk(read.chunk.number, part[0].offset, end), part[0].key, part)
            part = []
        part.append(wanted)
        end = wanted.offset + wanted.nbytes
    yield _ChunkRead(Chunk(read.chunk.number, part[0].offset, end), part[0].key, part)


def _fill(one: Chunk, wanted: Sequence[FileRange], scratch: memoryview) -> list[memoryview]:
    """Return the buffers that take all bytes of a chunk: those of the ranges, and scratch memory between them."""
    buffers: list[memoryview] = []
    end = one.start
    for offset, address, nbytes, _ in wanted:
        if offset > end:
            buffers.append(scratch[end - one.start : offset - one.start])
        buffers.append(bytes_at(address, nbytes))
        end = offset + nbytes
    if end < one.stop:
        buffers.append(scratch[end - one.start : one.stop - one.start])
    return buffers


def _read_chunk(
    descriptor: int, index: CheckpointIndex, file: int, read: _ChunkRead, scratch: memoryview, consequence: str, check_digests: bool
) -> None:
    record = index.files[file]
    number, start, stop = read.chunk
    is_checked = check_digests and bool(record.digests)
    state = new_digest()
    end = start
    is_copied = len(read.wanted) > _MOST_DIRECT
    buffers = [scratch[: stop - start]] if is_copied else _fill(read.chunk, read.wanted, scratch)
    for group in in_groups(buffers, CACHED_NBYTES if is_checked else CHUNK_NBYTES):
        nbytes = sum(map(len, group))
        count = read_all(descriptor, group, end)
        end += count
        if count < nbytes:
            raise CorruptCheckpointError(
                f"'{index.path / record.name}' ends at byte {end}, near key '{read.key}', since it was cut while it was read; {consequence}"
            )
        if is_checked:
            for buffer in group:
                state.update(buffer)
    if is_checked and state.hexdigest() != record.digest(number):
        raise CorruptCheckpointError(
            f"'{index.path / record.name}' is damaged between bytes {start} and {stop}, at or near key '{read.key}': they are not those "
            f"that were written; {consequence}. `paddle-fsdp-ckpt verify` says what else is damaged; restore the file from a copy, or load "
            "another checkpoint"
        )
    if is_copied:
        scratch_address = address_of(scratch) - start
        for offset, address, nbytes, _ in read.wanted:
            copy(address, scratch_address + offset, nbytes)
