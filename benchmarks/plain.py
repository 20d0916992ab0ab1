"""Plain reads and writes of as many bytes: what the disk, or the page cache, can do."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from .measure import Measurement, measure

_memory = np.empty(0, np.uint8)
_kept: list[np.ndarray[Any, np.dtype[np.uint8]]] = []


def _buffer(nbytes: int) -> memoryview:
    """Return memory that is there already, page for page."""
    global _memory
    if _memory.nbytes < nbytes:
        _memory = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return _memory[:nbytes].data


def write(directory: str, nbytes: int) -> Measurement:
    """Write a new file of so many bytes, one a rank, and wait until it is on the disk."""
    data = _buffer(nbytes)
    path = Path(directory) / os.environ.get("PADDLE_TRAINER_ID", "0")
    path.parent.mkdir(exist_ok=True)

    def call() -> None:
        with open(path, "wb", buffering=0) as file:
            written = 0
            while written < nbytes:
                written += file.write(data[written : written + (64 << 20)])
            os.fsync(file.fileno())

    return measure(call)


def read(paths: list[str], world_size: int) -> Measurement:
    """Read this rank's share of the files, end to end."""
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    sizes = [os.path.getsize(path) for path in paths]
    start, stop = (sum(sizes) * number // world_size for number in (rank, rank + 1))
    data = _buffer(stop - start)

    def call() -> None:
        before = 0
        for path, size in zip(paths, sizes, strict=True):
            first, last = max(start, before), min(stop, before + size)
            with open(path, "rb", buffering=0) as file:
                position = first
                while position < last:
                    file.seek(position - before)
                    position += file.readinto(data[position - start : last - start])
            before += size

    return measure(call)


def copy(nbytes: int, times: int = 1) -> Measurement:
    """Copy so many bytes from memory to memory, an equal part at a time."""
    data = np.frombuffer(_buffer(2 * nbytes), np.uint8)
    borders = [nbytes * number // times for number in range(times + 1)]

    def call() -> None:
        for start, stop in itertools.pairwise(borders):
            np.copyto(data[nbytes + start : nbytes + stop], data[start:stop])

    return measure(call)


def copy_into_new_memory(nbytes: int) -> Measurement:
    """Copy so many bytes into memory that the process gets for it, and keeps."""
    data = np.frombuffer(_buffer(2 * nbytes), np.uint8)[:nbytes]
    return measure(lambda: _kept.append(data.copy()))


def sync(directory: str) -> None:
    """Wait until the files of a directory are on the disk."""
    for path in Path(directory).iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(directory: str) -> None:
    """Let the kernel forget what it keeps of a directory's files in memory; they must be on the disk."""
    for path in Path(directory).iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
