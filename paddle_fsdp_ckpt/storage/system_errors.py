"""What to do about an error of the operating system."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import CorruptCheckpointError

Result = TypeVar("Result")

_LOG = logging.getLogger("paddle_fsdp_ckpt")

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

_CAN_PASS = frozenset({errno.EIO, errno.EREMOTEIO, errno.EILSEQ, errno.EBADMSG})
"""Those of them that the way to the disk can cause too, and not only what lies on it: a connection that was lost for a moment, and
a checksum that didn't fit since bytes were damaged under way."""

PAUSES_SECONDS = (0.1, 1.0, 5.0)
"""How long is waited each time before something that could not be read is read again."""


def read_file(
    path: Path, read: Callable[[], Result], consequence: str = "restore the file from a copy, or load another checkpoint"
) -> Result:
    """Return what ``read`` reads from the file of a checkpoint; an error of the medium that stays is damage of that file, no other is.

    Args:
        path: the file.
        read: reads, and can be called again; see :func:`try_again`.
        consequence: what a failure leaves behind, in words; nothing where there is nothing to say.

    Raises:
        CorruptCheckpointError: the medium did not give the file's bytes.
    """
    try:
        return try_again(path, read)
    except OSError as error:
        error.filename = error.filename or str(path)  # a read doesn't say of what
        if error.errno not in _OF_THE_MEDIUM:
            raise
        tries = f"; it was tried {len(PAUSES_SECONDS) + 1} times within {sum(PAUSES_SECONDS):.1f} s" if error.errno in _CAN_PASS else ""
        raise CorruptCheckpointError(f"'{path}' can't be read: {describe_error(error)}{tries}{after(consequence)}") from error


def after(consequence: str) -> str:
    """Return what a failure leaves behind as the end of a sentence."""
    return f"; {consequence}" if consequence else ""


def try_again(path: Path, read: Callable[[], Result]) -> Result:
    """Return what ``read`` reads; where the medium gives an error that can pass, of which a warning is logged, it is called again.

    What passes must not cost a checkpoint, and what is called damaged may be removed.

    Args:
        path: the file, for the warning.
        read: reads the same bytes to the same place each time.

    Raises:
        OSError: of another kind, or one that stays, after a few seconds.
    """
    for pause in PAUSES_SECONDS:
        try:
            return read()
        except OSError as error:
            if error.errno not in _CAN_PASS:
                raise
            _LOG.warning("'%s' can't be read: %s; it is read again in %g s", path, describe_error(error), pause)
            time.sleep(pause)
    return read()


def is_there(path: Path) -> bool:
    """Tell whether something has this name, be it a link that leads nowhere. What can't be looked at is not taken for missing.

    Raises:
        OSError: it can't be looked at.
    """
    try:
        try_again(path, lambda: os.lstat(path))
    except (OSError, ValueError) as error:
        if not says_missing(error):
            raise
        return False
    return True


def says_missing(error: OSError | ValueError) -> bool:
    """Tell whether a look at a path failed because there is nothing of this name, or can't be (a null character is a ValueError)."""
    return not isinstance(error, OSError) or error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def describe_error(error: BaseException) -> str:
    """Return an error's kind and text, and the way out where it is one of the operating system that has one."""
    text = f"{type(error).__name__}: {error}"
    way_out = _WAYS_OUT.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{text}; {way_out}" if way_out else text
