"""Writing from memory to the disk without a copy in the system's cache: less work and fewer calls, so that training beside has the rest."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

BLOCK_NBYTES = 4096
"""What addresses, positions and sizes must be multiples of; some disks take smaller ones, none larger."""

_LEAST_NBYTES = 1 << 20
_AT_ONCE_NBYTES = 8 << 20
"""More in a call saves nothing any more. Between calls a thread needs Python's lock, and so stops whoever trains, or waits for that."""

_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP)


def write_directly(descriptor: int, data: memoryview, take: Callable[[memoryview], None]) -> int:
    """Write the beginning of ``data`` to the descriptor's position, a multiple of :data:`BLOCK_NBYTES`, as far as that can go directly.

    Args:
        descriptor: of a file.
        data: 1-D bytes, which nobody changes meanwhile.
        take: called with each part right after it was written.

    Returns:
        How many bytes were written: all but the last part of a block; none of little data, or where the file system or the memory's
        address doesn't allow it, and maybe fewer where it stopped. The rest is to be written in the ordinary way, which says what fails.

    Raises:
        OSError: the system refused, e.g. the disk is full.
    """
    stop = len(data) - len(data) % BLOCK_NBYTES
    done = 0
    if stop < _LEAST_NBYTES or not hasattr(os, "O_DIRECT"):
        return done
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < stop and not done % BLOCK_NBYTES:
            part = data[done : min(done + _AT_ONCE_NBYTES, stop)]
            written = os.writev(descriptor, [part])
            take(part[:written])
            done += written
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done
