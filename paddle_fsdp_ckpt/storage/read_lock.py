"""A checkpoint that is being read is not removed: readers hold a lock of the system on its manifest, and who removes asks for it.

The lock is a shared ``flock``. It ends with its process, however that ends, needs no permission to write, and leaves nothing behind.
Processes on other machines see it where the file system shares such locks, as NFS 4 does, and Lustre mounted with ``flock``. Where it
has no locks, all is read and removed without.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from ..errors import CheckpointError, ReplacedCheckpointError
from .format import MANIFEST_NAME
from .system_errors import says_missing

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@contextmanager
def reading(directory: str | os.PathLike[str]) -> Iterator[Callable[[object], None]]:
    """Keep a checkpoint from being removed by a ``CheckpointManager``, in whatever process, while the block runs.

    Where that can't be, the block runs all the same: whoever reads a checkpoint that is gone hears so. The block is given a function that
    raises where another checkpoint has taken the place of this one, as by a save with ``overwrite=True``; it takes what was found wrong.

    Raises:
        ReplacedCheckpointError: the block raised a CheckpointError, and another checkpoint has taken the place of this one meanwhile.
    """
    # ~ as load understands it.
    path = Path(os.path.expanduser(directory))
    with ExitStack() as lock:
        with suppress(OSError):
            lock.enter_context(_locked(path, fcntl.LOCK_SH, os.O_RDONLY))
        before = _identity(path)

        def check_there(found: object) -> None:
            if before is not None and _identity(path) not in (None, before):
                raise ReplacedCheckpointError(
                    f"'{path}' was replaced by another checkpoint while it was read, which may be all that is wrong; read it again. {found}"
                )

        try:
            yield check_there
        except ReplacedCheckpointError:
            raise
        except CheckpointError as error:
            check_there(error)
            raise


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return what tells the manifest from any other that is there while it is open; None where there is none."""
    try:
        found = os.stat(directory / MANIFEST_NAME)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def while_reading(*names: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Let a function run as in a block of :func:`reading`, for those of its arguments that have these names.

    A report that it returns is checked as an error is, where the report's ``is_good`` is False.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            given = signature.bind(*args, **kwargs).arguments
            with ExitStack() as stack:
                # What is no path the function itself refuses.
                paths = [path for name in names if isinstance(path := given.get(name), (str, os.PathLike))]
                checks = [stack.enter_context(reading(path)) for path in paths]
                result = function(*args, **kwargs)
                if not getattr(result, "is_good", True):
                    for check_there in checks:
                        check_there(result)
                return result

        return call

    return decorate


@contextmanager
def removing(directory: Path) -> Iterator[bool]:
    """Tell the block whether nobody reads the checkpoint, so that it may be removed; nobody is told so twice at once.

    Raises:
        OSError: it can't be asked whether somebody does; what is no checkpoint nobody reads.
    """
    # Some network file systems give an exclusive lock only on what is open for writing.
    with _locked(directory, fcntl.LOCK_EX, os.O_RDWR, os.O_RDONLY) as is_free:
        yield is_free


@contextmanager
def _locked(directory: Path, kind: int, *accesses: int) -> Iterator[bool]:
    """Hold a lock on the manifest, where there is one and locks work; yield False where one of another process stands against it.

    Raises:
        OSError: there is one that can't be opened.
    """
    descriptor = _open(directory / MANIFEST_NAME, accesses)
    if descriptor is None:
        yield True
        return
    try:
        yield try_to_lock(descriptor, kind)
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too, and would hold the lock
        os.close(descriptor)


def _open(path: Path, accesses: tuple[int, ...]) -> int | None:
    """Open a file in the first of these ways that the system allows; return None where it is missing or a link."""
    for access in accesses:
        try:
            # A named pipe would wait for ever without O_NONBLOCK.
            return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            if says_missing(error):
                return None
            if access == accesses[-1]:
                raise
    return None


def try_to_lock(descriptor: int, kind: int) -> bool:
    """Take a lock of the system, of this kind, on an open file or directory; True also where there are no locks.

    Returns:
        whether there was none against it.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    return True
