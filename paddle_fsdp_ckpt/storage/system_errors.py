"""What to do about an error of the operating system."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CorruptCheckpointError

_WAYS_OUT = {
    errno.ENOENT: "check the path: something of it is missing, can't be made there, or was removed meanwhile",
    errno.ENOTDIR: "check the path: a part of it that must be a directory is a file",
    errno.ENOSPC: "the disk is full: make room there, or save elsewhere",
    errno.EDQUOT: "the disk quota is used up: make room there, have it raised, or save elsewhere",
    errno.EFBIG: "files may not become that large there: raise the limit (ulimit -f), save elsewhere, or save from more ranks",
    errno.EACCES: "this user may not do that there: change the permissions (chmod, chown), or use another directory",
    errno.EPERM: "this user may not do that there: change the permissions (chmod, chown), or use another directory",
    errno.EROFS: "the file system is read-only: use another directory, or mount it for writing",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EIO: "the disk or its connection failed: look at the system's log (dmesg), or use another disk",
    errno.ESTALE: "the shared file system lost the file: try again, or look at its server",
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n)",
}

_OF_THE_MEDIUM = frozenset({errno.EIO, errno.EREMOTEIO, errno.ENODATA, errno.EILSEQ, errno.EUCLEAN, errno.EBADMSG})
"""What Linux says where bytes can't be had from a disk, or are not those that were written: of what the disk itself says
(``blk_errors`` in block/blk-core.c) EIO, ENODATA and EILSEQ; of what file systems with checksums of their own do, EIO, EUCLEAN and EBADMSG.
Not ESTALE: a file that is gone from a server may have been removed while it was read."""


@contextmanager
def reading_file(path: Path, consequence: str = "restore the file from a copy, or load another checkpoint") -> Iterator[None]:
    """Let an error of the medium in the block, which reads the file of a checkpoint, be damage of that file; any other passes.

    Args:
        path: the file.
        consequence: what a failure leaves behind, in words.

    Raises:
        CorruptCheckpointError: the medium did not give the file's bytes.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)  # a read doesn't say of what
        if error.errno not in _OF_THE_MEDIUM:
            raise
        raise CorruptCheckpointError(f"'{path}' can't be read: {describe_error(error)}; {consequence}") from error


def describe_error(error: BaseException) -> str:
    """Return an error's kind and text, and the way out where it is one of the operating system that has one."""
    text = f"{type(error).__name__}: {error}"
    way_out = _WAYS_OUT.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{text}; {way_out}" if way_out else text
