"""Digests of a file's chunks: computed while its bytes are written, compared while they are read.

A file is its header, digested by itself where there is one, and then chunks of :data:`CHUNK_NBYTES`, the last one shorter. The digest is
XXH3's 64 bits (https://xxhash.com), 16 hexadecimal digits. It finds damage; it is no proof against someone who means to deceive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_hexdigest

CHUNK_NBYTES = 1 << 20
"""Bytes of a chunk; a part of the format."""

DIGEST_LENGTH = 16
"""Characters of one digest."""


class Chunk(NamedTuple):
    """One chunk of a file: its number, and its bytes ``[start, stop)`` in the file."""

    number: int
    start: int
    stop: int


def digest(data: bytes | memoryview) -> str:
    """Return the digest of some bytes."""
    return xxh3_64_hexdigest(data)


def new_digest() -> xxh3_64:
    """Return what takes bytes by ``update``, and gives the digest of all of them by ``hexdigest``."""
    return xxh3_64()


def digest_of_parts(parts: Iterable[memoryview]) -> str:
    """Return the digest of bytes that lie in several places, in this order."""
    state = new_digest()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def count_chunks(size: int, header_nbytes: int) -> int:
    """Return how many chunks a file of ``size`` bytes has, ``header_nbytes`` of them its header, which counts as a chunk if not empty."""
    return (header_nbytes > 0) - (header_nbytes - size) // CHUNK_NBYTES


def chunk(number: int, size: int, header_nbytes: int) -> Chunk:
    """Return one of the chunks of a file; see :func:`count_chunks`."""
    if header_nbytes and number == 0:
        return Chunk(0, 0, header_nbytes)
    start = header_nbytes + (number - (header_nbytes > 0)) * CHUNK_NBYTES
    return Chunk(number, start, min(start + CHUNK_NBYTES, size))


def chunks_of(start: int, stop: int, header_nbytes: int) -> range:
    """Return the numbers of the chunks that hold the bytes ``[start, stop)``, all behind the header; at least one byte."""
    has_header = header_nbytes > 0
    return range((start - header_nbytes) // CHUNK_NBYTES + has_header, (stop - 1 - header_nbytes) // CHUNK_NBYTES + has_header + 1)


class Digester:
    """Digests the chunks of a file as its bytes pass by, in order."""

    def __init__(self, header_nbytes: int) -> None:
        self._digests: list[str] = []
        self._state = new_digest()
        self._missing = header_nbytes or CHUNK_NBYTES

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the file, 1-D."""
        if len(data) < self._missing:  # nearly every small tensor
            self._state.update(data)
            self._missing -= len(data)
            return
        for part in _cut(data, self._missing):
            self._state.update(part)
            self._missing -= len(part)
            if not self._missing:
                self._end_chunk()

    def finish(self) -> str:
        """Return the digests of all chunks, one behind the other."""
        if self._missing < CHUNK_NBYTES:
            self._end_chunk()
        return "".join(self._digests)

    def _end_chunk(self) -> None:
        self._digests.append(self._state.hexdigest())
        self._state.reset()
        self._missing = CHUNK_NBYTES


def _cut(data: memoryview, first: int) -> Iterator[memoryview]:
    """Yield the data in parts: ``first`` bytes, then chunk after chunk."""
    yield data[:first]
    for start in range(first, len(data), CHUNK_NBYTES):
        yield data[start : start + CHUNK_NBYTES]
