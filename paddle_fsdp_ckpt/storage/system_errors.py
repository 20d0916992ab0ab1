"""What to do about an error of the operating system."""

from __future__ import annotations

import errno

_WAYS_OUT = {
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


def describe_error(error: BaseException) -> str:
    """Return an error's kind and text, and the way out where it is one of the operating system that has one."""
    text = f"{type(error).__name__}: {error}"
    way_out = _WAYS_OUT.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{text}; {way_out}" if way_out else text
