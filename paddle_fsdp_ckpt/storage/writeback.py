"""Let the system begin to write a file to the disk while the rest of it is being made, so that waiting for the disk at the end is short."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_WRITE = 2
"""``SYNC_FILE_RANGE_WRITE`` of Linux: begin to write what is dirty in the range, and wait for nothing (sync_file_range(2))."""

_STRIDE_NBYTES = 32 << 20


class Writeback:
    """Follows what is written to an open file, from its beginning on; where the system can't begin early, it does nothing.

    It is no promise that anything is on the disk: ``fsync`` must follow, and reports all failures, also those of what was begun here.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun = self._end = 0

    def advance(self, nbytes: int) -> None:
        """Take note that so many more bytes were written."""
        self._end += nbytes
        begin = _sync_file_range()
        if begin is not None and self._end - self._begun >= _STRIDE_NBYTES:
            begin(self._descriptor, self._begun, self._end - self._begun, _WRITE)
            self._begun = self._end


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        function.restype = ctypes.c_int
    return function
