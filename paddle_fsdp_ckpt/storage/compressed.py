"""Bytes that are kept for later in less memory: compressed as they are made, block by block, and had back in such blocks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

_BLOCK_NBYTES = 1 << 20
_LEVEL = 1  # the fastest; the next ones make nothing smaller of what is said of many alike tensors


def compressed(blocks: Iterable[bytes]) -> bytes:
    """Return what :func:`decompressed` makes the same bytes of."""
    compressor = zlib.compressobj(_LEVEL)
    return b"".join([*map(compressor.compress, blocks), compressor.flush()])


def decompressed(data: bytes) -> Iterator[bytes]:
    """Yield the bytes, at most 1 MiB at a time."""
    decompressor = zlib.decompressobj()
    while not decompressor.eof:
        yield decompressor.decompress(data, _BLOCK_NBYTES)
        data = decompressor.unconsumed_tail
