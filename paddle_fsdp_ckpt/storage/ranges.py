"""Parts of one file that are to be read: joined, and cut at the ends of chunks. Arithmetic alone; nothing is read here.

A digest is of a whole chunk, so files that have digests are read in whole chunks; of others only small gaps are read over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .columns import Integers, concatenated
from .digests import CHUNK_NBYTES, Chunk, chunk

_LARGEST_GAP = 1 << 16  # from a disk, to read over one of 8 to 56 KiB took 0.2 to 0.7 of the time that calls for what is around it took


@dataclass(frozen=True, eq=False)
class FileRanges:
    """Parts of one file, and where to read them to, a column for each thing that is said of them; entry ``i`` of each is the same part.

    Attributes:
        offsets: first byte in the file.
        addresses: of the memory that takes the first one; see :mod:`.addresses`.
        nbytes: how many there are, at least 1.
        keys: what parts may belong to, for messages.
        key_numbers: which of these each belongs to.
    """

    offsets: Integers
    addresses: Integers
    nbytes: Integers
    keys: Sequence[str]
    key_numbers: Integers

    @property
    def stops(self) -> Integers:
        """Past the last byte in the file."""
        return self.offsets + self.nbytes

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, which: slice | Integers | NDArray[np.bool_]) -> FileRanges:
        """Return some of them."""
        return FileRanges(self.offsets[which], self.addresses[which], self.nbytes[which], self.keys, self.key_numbers[which])

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield offset, address and number of bytes of each."""
        return zip(self.offsets.tolist(), self.addresses.tolist(), self.nbytes.tolist(), strict=True)


def ranges_of(parts: Iterable[tuple[int, int, int, int]], keys: Sequence[str]) -> FileRanges:
    """Return parts of a file that are known one by one: offset, address, number of bytes, and position of the key."""
    columns = np.array(list(parts), np.int64).reshape(-1, 4)
    return FileRanges(columns[:, 0], columns[:, 1], columns[:, 2], keys, columns[:, 3])


def end_to_end(several: Sequence[FileRanges]) -> FileRanges:
    """Return ranges of one file, at least one of them, whose keys are the same list, as one."""
    offsets, addresses, nbytes, numbers = (
        concatenated([getattr(one, name) for one in several]) for name in ("offsets", "addresses", "nbytes", "key_numbers")
    )
    return FileRanges(offsets, addresses, nbytes, several[0].keys, numbers)


class ChunkRead(NamedTuple):
    """A chunk to read, and what of it goes where, in ascending order; the rest goes nowhere. A key that it holds, for messages."""

    chunk: Chunk
    key: str
    wanted: FileRanges | None


def chunk_reads(ranges: FileRanges, size: int, header_nbytes: int, *, whole: bool) -> Iterator[ChunkRead]:
    """Yield what to read for ranges of one file; the parts that overlap others come behind those.

    Args:
        ranges: in any order.
        size: of the file, in bytes.
        header_nbytes: how much of it is header, 0 where that is no chunk of its own.
        whole: whether chunks are read as a whole, or only what is wanted of them and small gaps between.
    """
    for layer in _layers(ranges):
        for read in _by_chunk(_joined(layer), size, header_nbytes):
            if whole:
                yield read
            else:
                yield from _without_gaps(read)


def _layers(ranges: FileRanges) -> Iterator[FileRanges]:
    """Yield the ranges in as many parts as it takes that no two in a part overlap; each in ascending order."""
    rest = ranges[np.lexsort((ranges.addresses, ranges.offsets))]
    while len(rest):
        fits = np.ones(len(rest), np.bool_)
        if (rest.offsets[1:] < rest.stops[:-1]).any():  # hardly ever
            end = 0
            for number, (offset, stop) in enumerate(zip(rest.offsets.tolist(), rest.stops.tolist(), strict=True)):
                fits[number] = offset >= end
                end = stop if fits[number] else end
        yield rest[fits]
        rest = rest[~fits]


def _joined(layer: FileRanges) -> FileRanges:
    """Return the same with those made one that follow each other both in the file and in memory, as parameters in a flat buffer do."""
    follows = (layer.offsets[1:] == layer.stops[:-1]) & (layer.addresses[1:] == layer.addresses[:-1] + layer.nbytes[:-1])
    if not follows.any():
        return layer
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return replace(layer[first], nbytes=np.add.reduceat(layer.nbytes, first))


def _by_chunk(layer: FileRanges, size: int, header_nbytes: int) -> Iterator[ChunkRead]:
    """Yield the chunks that the ranges touch, with the ranges cut at the ends of the chunks."""
    has_header = header_nbytes > 0
    first = (layer.offsets - header_nbytes) // CHUNK_NBYTES + has_header
    counts = (layer.stops - 1 - header_nbytes) // CHUNK_NBYTES + has_header + 1 - first
    owners = np.repeat(np.arange(len(layer)), counts)
    numbers = first[owners] + np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk_starts = header_nbytes + (numbers - has_header) * CHUNK_NBYTES
    offsets = np.maximum(layer.offsets[owners], chunk_starts)
    stops = np.minimum(layer.stops[owners], chunk_starts + CHUNK_NBYTES)
    addresses = layer.addresses[owners] + offsets - layer.offsets[owners]
    parts = FileRanges(offsets, addresses, stops - offsets, layer.keys, layer.key_numbers[owners])
    ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for start, stop in itertools.pairwise([0, *ends]):
        wanted = parts[start:stop]
        yield ChunkRead(chunk(int(numbers[start]), size, header_nbytes), layer.keys[wanted.key_numbers[0]], wanted)


def _without_gaps(read: ChunkRead) -> Iterator[ChunkRead]:
    """Yield the parts of a chunk that somebody wants, those with small gaps between them as one."""
    assert read.wanted is not None
    stops = read.wanted.stops
    ends = [*(np.flatnonzero(read.wanted.offsets[1:] - stops[:-1] > _LARGEST_GAP) + 1).tolist(), len(stops)]
    for start, stop in itertools.pairwise([0, *ends]):
        part = read.wanted[start:stop]
        place = Chunk(read.chunk.number, int(part.offsets[0]), int(stops[stop - 1]))
        yield ChunkRead(place, part.keys[part.key_numbers[0]], part)
