"""Let the system begin to write a file to the disk while the rest of it is being made, so that waiting for the disk at the end is short."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache

_WRITE = 2
"""``SYNC_FILE_RANGE_WRITE`` of Linux: begin to write what is dirty in the range, and wait for nothing (sync_file_range(2))."""

_STRIDE_NBYTES = 32 << 20

_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""What says that bytes did not reach the disk; the other errors say that the system can't begin early with this file."""


class Writeback:
    """Follows what is written to an open file, from its beginning on; where the system can't begin early, it does nothing.

    It is no promise that anything is on the disk: ``fsync`` must follow, and reports what fails after this returned.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun = self._end = 0

    def advance(self, nbytes: int) -> None:
        """Take note that so many more bytes were written.

        Raises:
            OSError: the disk failed, or is full. Whether ``fsync`` would say that once more depends on the file system.
        """
        self._end += nbytes
        begin = _sync_file_range()
        if begin is None or self._end - self._begun < _STRIDE_NBYTES:
            return
        code = begin(self._descriptor, self._begun, self._end - self._begun)
        if code in _LOST:
            raise OSError(code, os.strerror(code))
        self._begun = self._end


@cache
def _sync_file_range() -> Callable[[int, int, int], int] | None:
    """Return the system's function for a descriptor, the first byte and how many; it returns 0 or the number of an error."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int

    def begin(descriptor: int, start: int, nbytes: int) -> int:
        return ctypes.get_errno() if function(descriptor, start, nbytes, _WRITE) else 0

    return begin
