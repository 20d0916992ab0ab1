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
from functools import partial
from queue import SimpleQueue

from ..errors import CheckpointError, CorruptCheckpointError, counted
from .addresses import address_of, bytes_at, copy_places
from .buffers import CACHED_NBYTES, as_bytes, in_groups, read_all
from .digests import CHUNK_NBYTES, Chunk, chunk, chunks_of, new_digest
from .entries import keys_between
from .format import DTYPE_NBYTES
from .index import CheckpointIndex, open_rank_file, read_columns
from .key_names import say_key
from .manifest import FileRecord
from .plan import Duplicate, ReadPlan
from .ranges import ChunkRead, FileRanges, chunk_reads, ranges_of
from .system_errors import after, read_file

_PART_NBYTES = 4 << 20
_BATCH_NBYTES = 16 << 20
_READERS = 2
_MOST_DIRECT = 64  # places in one chunk: to copy a few kilobytes costs less than to hand them to the system one by one
_CHUNKS_A_READER = 16  # many, since to change threads costs more than to read a chunk
UNCHANGED = "nothing was changed"
READ_ONLY = ""  # of what only looks, nobody asks what it changed
PARTIAL_STATE = "the objects may now hold a part of the checkpoint and must be loaded again, from this or another one, before use"
"""What a failure while reading leaves behind, in words."""


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
        parts: dict[int, list[tuple[int, int, int, int]]] = {}
        pairs = []
        for number, duplicate in enumerate(batch):
            one, other = bytearray(duplicate.nbytes), bytearray(duplicate.nbytes)
            pairs.append((one, other))
            for file, offset, copied in (
                (duplicate.file, duplicate.file_offset, one),
                (duplicate.other_file, duplicate.other_offset, other),
            ):
                parts.setdefault(file, []).append((offset, address_of(copied), duplicate.nbytes, number))
        keys = [duplicate.key for duplicate in batch]
        for file, some in parts.items():
            _read_file(index, file, ranges_of(some, keys), UNCHANGED)
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
        _read_chunks(plan.index, file, [ChunkRead(one, keys[one.number], None) for one in chunks], UNCHANGED, on_read=on_read)


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
        file: ranges_of(((offset, addresses[target] + start, nbytes, target) for offset, target, start, nbytes in reads), keys)
        for file, reads in plan.reads.items()
    }
    read_ranges(plan.index, ranges, consequence, check_digests=check_digests, on_read=on_read)


def read_ranges(
    index: CheckpointIndex,
    ranges: Mapping[int, FileRanges],
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
    ranges: FileRanges,
    consequence: str,
    check_digests: bool = True,
    on_read: Callable[[int], None] | None = None,
) -> None:
    """Read ranges of one file into their buffers, in whole chunks where these have digests, and compare those."""
    record = index.files[file]
    reads = chunk_reads(ranges, record.size, record.header_nbytes, whole=bool(record.digests))
    _read_chunks(index, file, reads, consequence, check_digests, on_read)


def _read_chunks(
    index: CheckpointIndex,
    file: int,
    reads: Iterable[ChunkRead],
    consequence: str,
    check_digests: bool = True,
    on_read: Callable[[int], None] | None = None,
) -> None:
    """Read chunks of one file, in a few threads; each digests bytes while its processor still has them at hand."""
    descriptor = open_rank_file(index.path, index.files[file])
    free: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(_READERS):
        free.put(memoryview(bytearray(CHUNK_NBYTES)))

    def read_some(some: list[ChunkRead]) -> int:
        scratch = free.get()
        try:
            for read in some:
                _read_chunk(descriptor, index, file, read, scratch, consequence, check_digests)
        finally:
            free.put(scratch)
        return sum(read.chunk.stop - read.chunk.start for read in some)

    try:
        with ThreadPoolExecutor(_READERS) as pool:
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


def _in_lists(reads: Iterable[ChunkRead], length: int) -> Iterator[list[ChunkRead]]:
    rest = iter(reads)
    while part := list(itertools.islice(rest, length)):
        yield part


def _fill(one: Chunk, wanted: FileRanges, scratch: memoryview) -> list[memoryview]:
    """Return the buffers that take all bytes of a chunk: those of the ranges, and scratch memory between them."""
    buffers: list[memoryview] = []
    end = one.start
    for offset, address, nbytes in wanted.places():
        if offset > end:
            buffers.append(scratch[end - one.start : offset - one.start])
        buffers.append(bytes_at(address, nbytes))
        end = offset + nbytes
    if end < one.stop:
        buffers.append(scratch[end - one.start : one.stop - one.start])
    return buffers


def _read_chunk(
    descriptor: int, index: CheckpointIndex, file: int, read: ChunkRead, scratch: memoryview, consequence: str, check_digests: bool
) -> None:
    record = index.files[file]
    path = index.path / record.name
    number, start, stop = read.chunk
    is_checked = check_digests and bool(record.digests)
    state = new_digest()
    end = start
    wanted = read.wanted
    is_direct = wanted is not None and len(wanted) <= _MOST_DIRECT
    buffers = [scratch[: stop - start]] if wanted is None or not is_direct else _fill(read.chunk, wanted, scratch)
    for group in in_groups(buffers, CACHED_NBYTES if is_checked else CHUNK_NBYTES):
        nbytes = sum(map(len, group))
        count = read_file(path, partial(read_all, descriptor, group, end), consequence)
        end += count
        if count < nbytes:
            raise CorruptCheckpointError(
                f"'{path}' ends at byte {end}, near {say_key(read.key)}, since it was cut while it was read{after(consequence)}"
            )
        if is_checked:
            for buffer in group:
                state.update(buffer)
    if is_checked and state.hexdigest() != record.digest(number):
        raise CorruptCheckpointError(
            f"'{path}' is damaged between bytes {start} and {stop}, at or near {_keys_in(index, record, read)}: they are not those "
            f"that were written{after(consequence)}. `paddle-fsdp-ckpt verify` says what else is damaged; restore the file from a copy, or "
            "load another checkpoint"
        )
    if wanted is not None and not is_direct:
        copy_places(wanted.addresses, wanted.offsets + (address_of(scratch) - start), wanted.nbytes)


def _keys_in(index: CheckpointIndex, record: FileRecord, read: ChunkRead) -> str:
    """Return, in words, whose values a chunk holds: one that is wanted, and how many more as far as the file still says it."""
    try:
        entries = list(read_columns(index.path, record).entries())
    except (CheckpointError, OSError):
        return say_key(read.key)
    others = len(keys_between(entries, record.size, read.chunk.start, read.chunk.stop)) - 1
    return say_key(read.key) + (f" and {counted(others, 'more key')} whose bytes lie in the same chunk" if others > 0 else "")
