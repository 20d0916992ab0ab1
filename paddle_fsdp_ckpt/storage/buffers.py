"""Moving bytes between files and memory: many buffers a system call, none of them copied."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)

SMALL_NBYTES = 32 << 10
"""Of what has fewer bytes, many are copied together before they are written."""

TOGETHER_NBYTES = 1 << 20
"""About how many bytes of them."""

CACHED_NBYTES = 256 << 10
"""What a processor core still has in a cache of its own right after it was copied, so that to digest it then takes little time."""


def as_bytes(buffer: object, key: str, what: str = "'{}'") -> memoryview:
    """Return the memory behind ``buffer`` as a 1-D view of bytes, without a copy; ``what`` and the key in it name it for the messages.

    Raises:
        ValueError: the object gives no buffer, or one that isn't C-contiguous.
    """
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{what.format(key)}: a {type(buffer).__name__} is not a buffer of bytes") from None
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise ValueError(f"{what.format(key)}: its memory is not contiguous")
    # memoryview.cast knows neither ctypes' formats nor empty views; numpy takes any.
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(bytearray())


def together(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield all bytes of the buffers, in order: large buffers as they are, and small ones copied together, as many as make a large one.

    To hand many small ones over one by one costs more time in Python than to copy them.
    """
    small: list[memoryview] = []
    total = 0
    for buffer in buffers:
        if len(buffer) < SMALL_NBYTES:
            small.append(buffer)
            total += len(buffer)
            if total < TOGETHER_NBYTES:
                continue
            yield _joined(small)
        else:
            if small:
                yield _joined(small)
            yield buffer
        small, total = [], 0
    if small:
        yield _joined(small)


def _joined(buffers: list[memoryview]) -> memoryview:
    return buffers[0] if len(buffers) == 1 else memoryview(b"".join(buffers))


def in_groups(buffers: Iterable[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """Yield all bytes of the buffers, in order, in groups that one system call takes: at most ``nbytes`` bytes each; none empty."""
    group: list[memoryview] = []
    room = nbytes
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            part = buffer[start : start + room]
            group.append(part)
            start += len(part)
            room -= len(part)
            if not room or len(group) == _IOV_MAX:
                yield group
                group, room = [], nbytes
    if group:
        yield group


def write_group(descriptor: int, group: Sequence[memoryview]) -> None:
    """Write a group of :func:`in_groups` to the descriptor's position.

    Raises:
        OSError: the system refused.
    """
    written = os.writev(descriptor, group)
    while group := _rest(group, written):
        written = os.writev(descriptor, group)


def read_all(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read bytes from ``offset`` on into the buffers, none of them empty, one after another.

    Returns:
        How many bytes were read; fewer than the buffers hold where the file ends before.

    Raises:
        OSError: the system refused.
    """
    total = 0
    for first in range(0, len(buffers), _IOV_MAX):
        group = buffers[first : first + _IOV_MAX]
        while group:
            count = os.preadv(descriptor, group, offset + total)
            if count == 0:
                return total
            total += count
            group = _rest(group, count)
    return total


def _rest(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Return what is left of the buffers after their first ``done`` bytes."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []
