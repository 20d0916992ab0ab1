"""Look at every byte of a checkpoint directory, and note all that is damaged, file by file: what ``verify`` and ``salvage`` build on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

from ..errors import CheckpointError, IncompleteCheckpointError, NewerFormatError
from .buffers import read_all
from .digests import CHUNK_NBYTES, Chunk, chunk, chunks_of, new_digest
from .entries import Entry, Stored
from .format import DTYPE_NBYTES, LENGTH_NBYTES
from .header import decode_header, decode_header_columns, header_nbytes
from .index import CheckpointIndex, open_inside, read_damaged_manifest, read_manifest
from .manifest import FileRecord, Manifest
from .system_errors import describe_error, read_file, try_again

Progress = Callable[[int, int], None]
"""Called now and then with the number of bytes checked so far, and of all bytes."""

_CHUNKS_AT_A_TIME = 32


@dataclass(frozen=True)
class FileSurvey:
    """What a look at all bytes of one file found.

    Attributes:
        record: what the manifest says of it.
        size: how many bytes it really has; 0 where it is missing or no file.
        problem: in words, what is wrong with the file as a whole: it is missing, is no file, or has another size; None if nothing is.
        damaged: the numbers of the chunks whose bytes are not those that were written, or are not there.
        unreadable: chunk -> the system's error, for those of them that the system did not give out.
        entries: what it stores; None where its header is damaged, and for a file that has none.
        header_problem: why the header, though it is the one that was written, can't be decoded; None if it can.
    """

    record: FileRecord
    size: int
    problem: str | None
    damaged: frozenset[int]
    unreadable: dict[int, str]
    entries: list[Entry] | None = None
    header_problem: str | None = None

    def is_damaged(self, start: int, stop: int) -> bool:
        """Tell whether any of the bytes ``[start, stop)``, behind the header, lies in a damaged chunk."""
        return not self.damaged.isdisjoint(chunks_of(start, stop, self.record.header_nbytes))


@dataclass(frozen=True)
class Survey:
    """What a look at all bytes of a checkpoint directory found.

    Attributes:
        manifest: what the checkpoint says of itself; it may be wrong where there is a ``manifest_problem``.
        manifest_problem: in words, why the manifest is not the one that was written; None if it is.
        files: one a rank's file, in order.
        paddle_metadata: of ``0.metadata``; None where the manifest knows of none.
        index: of all that readable headers name, whether damaged or not.
        conflicts: in words, keys that have different dtypes or shapes in different files.
    """

    manifest: Manifest
    manifest_problem: str | None
    files: tuple[FileSurvey, ...]
    paddle_metadata: FileSurvey | None
    index: CheckpointIndex
    conflicts: tuple[str, ...]

    @property
    def all_files(self) -> tuple[FileSurvey, ...]:
        """The ranks' files, and ``0.metadata``."""
        return self.files if self.paddle_metadata is None else (*self.files, self.paddle_metadata)

    def is_damaged(self, key: str, stored: Stored) -> bool:
        """Tell whether any byte of a stored piece of ``key`` lies in a damaged chunk."""
        file, _, start, stop, byte_offset = stored
        return self.files[file].is_damaged(byte_offset, byte_offset + (stop - start) * DTYPE_NBYTES[self.index.dtypes[key]])


def survey(path: Path, *, workers: int | None, progress: Progress | None) -> Survey:
    """Read all bytes of the checkpoint directory ``path`` and compare their digests, with ``workers`` threads.

    A damaged manifest that can still be parsed is used: whether a digest in it is right shows where the bytes fit it.

    Raises:
        IncompleteCheckpointError: there is no committed checkpoint.
        NewerFormatError: it is of a newer format version.
        CheckpointError: its manifest is damaged so much that it says nothing.
    """
    manifest, manifest_problem = _read_manifest(path)
    records = [*manifest.files, *([manifest.paddle_metadata] if manifest.paddle_metadata else [])]
    surveys = _survey_files(path, records, workers or min(8, os.cpu_count() or 1), progress)
    files = tuple(_with_entries(path, one) for one in surveys[: len(manifest.files)])
    index = CheckpointIndex(path, manifest.files, {}, {}, manifest)
    conflicts = [conflict for number, one in enumerate(files) for conflict in index.add(number, one.entries or ())]
    return Survey(manifest, manifest_problem, files, surveys[-1] if manifest.paddle_metadata else None, index, tuple(conflicts))


def _read_manifest(path: Path) -> tuple[Manifest, str | None]:
    try:
        return read_manifest(path), None
    except (IncompleteCheckpointError, NewerFormatError):
        raise
    except CheckpointError as error:
        try:
            return read_damaged_manifest(path), str(error)
        except CheckpointError:
            raise error from None


def _survey_files(path: Path, records: Sequence[FileRecord], workers: int, progress: Progress | None) -> list[FileSurvey]:
    sizes: list[int] = []
    problems: list[str | None] = []
    damaged: list[set[int]] = []
    unreadable: list[dict[int, str]] = [{} for _ in records]
    failed = [Event() for _ in records]
    tasks: list[tuple[int, range]] = []
    for number, record in enumerate(records):
        size, problem = look_at(path, record)
        sizes.append(size)
        problems.append(problem)
        there = sum(chunk(one, record.size, record.header_nbytes).stop <= size for one in range(record.chunks))
        damaged.append(set(range(there, record.chunks)))
        tasks += [(number, range(start, min(start + _CHUNKS_AT_A_TIME, there))) for start in range(0, there, _CHUNKS_AT_A_TIME)]
    total = sum(_nbytes(records[number], numbers) for number, numbers in tasks)
    done = 0
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(_check_chunks, path, records[n], numbers, failed[n]): (n, numbers) for n, numbers in tasks}
        for future in as_completed(running):
            number, numbers = running[future]
            for bad, error in future.result():
                damaged[number].add(bad)
                if error is not None:
                    unreadable[number][bad] = error
            done += _nbytes(records[number], numbers)
            if progress is not None:
                progress(done, total)
    return [FileSurvey(*found) for found in zip(records, sizes, problems, map(frozenset, damaged), unreadable, strict=True)]


def look_at(path: Path, record: FileRecord) -> tuple[int, str | None]:
    """Return how many bytes a checkpoint's file has, and, in words, what is wrong with it as a whole."""
    try:
        descriptor, size = open_inside(path, record.name)
    except CheckpointError as error:
        return 0, str(error)
    except OSError as error:
        return 0, f"'{path / record.name}' can't be opened: {describe_error(error)}"
    os.close(descriptor)
    return size, None if size == record.size else f"'{path / record.name}' has {size} bytes, and {record.size} were written"


def _nbytes(record: FileRecord, numbers: range) -> int:
    first, last = (chunk(number, record.size, record.header_nbytes) for number in (numbers[0], numbers[-1]))
    return last.stop - first.start


def _check_chunks(path: Path, record: FileRecord, numbers: range, failed: Event) -> list[tuple[int, str | None]]:
    """Return the numbers of those chunks that are damaged, with the system's error where it gave one.

    Once a chunk of the file could not be read though it was tried again, which ``failed`` tells, others are tried once: of a dead disk
    there are many.
    """
    found: list[tuple[int, str | None]] = []
    try:
        descriptor, _ = open_inside(path, record.name)
    except (CheckpointError, OSError) as error:
        return [(number, str(error)) for number in numbers]
    scratch = memoryview(bytearray(CHUNK_NBYTES))
    try:
        for number in numbers:
            read = partial(_digest_of, descriptor, chunk(number, record.size, record.header_nbytes), scratch)
            try:
                if (read() if failed.is_set() else try_again(path / record.name, read)) != record.digest(number):
                    found.append((number, None))
            except OSError as error:
                failed.set()
                found.append((number, describe_error(error)))
    finally:
        os.close(descriptor)
    return found


def _digest_of(descriptor: int, one: Chunk, scratch: memoryview) -> str:
    """Return the digest of a chunk's bytes, of those that are there. A header is read in parts, as it may be long."""
    state = new_digest()
    for start in range(one.start, one.stop, len(scratch)):
        part = scratch[: min(len(scratch), one.stop - start)]
        state.update(part[: read_all(descriptor, [part], start)])
    return state.hexdigest()


def _with_entries(path: Path, one: FileSurvey) -> FileSurvey:
    if 0 in one.damaged or (one.problem is not None and not one.size):
        return one
    where = f"'{path / one.record.name}'"

    def read() -> bytes:
        descriptor, _ = open_inside(path, one.record.name)
        with open(descriptor, "rb") as file:
            return file.read(header_nbytes(file.read(LENGTH_NBYTES), one.record.size, where))

    try:
        header = read_file(path / one.record.name, read)
        entries = list(decode_header(header, one.record.size, where))
        columns = decode_header_columns(header, one.record.size, where)
    except (CheckpointError, OSError) as error:
        return replace(one, header_problem=str(error))
    found, said = (LENGTH_NBYTES + len(header), len(entries)), (one.record.header_nbytes, one.record.pieces)
    problem = None if found == said else f"{where} has {found} bytes of header and pieces, and the manifest says {said}"
    if columns is not None and list(columns.entries()) != entries:
        problem = f"the header of {where} says one thing in its JSON and another in its columns, which are what is loaded by"
    return replace(one, entries=entries, header_problem=problem)


def damaged_ranges(one: FileSurvey) -> Iterator[tuple[int, int]]:
    """Yield the bytes ``[start, stop)`` of a file that lie in damaged chunks, neighbours together."""
    start = stop = -1
    for number in sorted(one.damaged):
        _, first, last = chunk(number, one.record.size, one.record.header_nbytes)
        if first != stop:
            if stop >= 0:
                yield start, stop
            start = first
        stop = last
    if stop >= 0:
        yield start, stop
