"""One run at a time writes to a root: its manager holds a lock of the system on a file there.

The lock is an exclusive ``flock``, and rank 0's, which alone changes a root. It ends with its process, however that ends. Processes on
other machines see it where the file system shares such locks, see :mod:`~paddle_fsdp_ckpt.storage.read_lock`; where it has none, nothing
keeps two runs apart. The file names the process that holds the lock, and is removed with it; one that a killed process left says nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from pathlib import Path

from ..errors import CheckpointError, listing
from ..storage.commit import heal_target, make_parents
from ..storage.read_lock import try_to_lock
from ..storage.system_errors import describe_error
from .steps import WRITER_LOCK_NAME, step_name, steps_aside

_LOG = logging.getLogger("paddle_fsdp_ckpt")

PATIENCE_SECONDS = 30.0
"""How long a run waits for the one before it to end, which may just be dying."""

_POLL_SECONDS = 0.1
_LONGEST_NAME = 1024


class WriterLock:
    """The right to write to a root; at most one is held, in whatever process."""

    def __init__(self, root: Path) -> None:
        """Name a root, which need not be there; nothing is held yet."""
        self._root = root
        self._path = root / WRITER_LOCK_NAME
        self._descriptor = -1
        self._end: weakref.finalize[[Path, int], WriterLock] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this one holds the lock, and nobody removed the root meanwhile, as far as was looked."""
        return self._end is not None

    def hold(self, patience_seconds: float) -> bool:
        """Hold the lock from now on, and make the root where it is missing; tell whether it was not held before.

        Args:
            patience_seconds: how long to wait for another one that holds it; 30 s at most.

        Raises:
            CheckpointError: another one holds it; nothing was changed.
            OSError: its file can't be written.
        """
        if self.is_held and _is_at(self._path, self._descriptor):
            return False
        self.release()  # somebody removed the root behind it
        patience_seconds = min(patience_seconds, PATIENCE_SECONDS)
        deadline = time.monotonic() + patience_seconds
        is_first = True
        while not self.try_to_hold():
            host, pid = _read_holder(self._path)
            if (host, pid) == _this_process():
                raise CheckpointError(
                    f"another CheckpointManager of this process writes to '{self._root}'; nothing was changed. close() that one first"
                )
            holder = "another process" if pid is None else f"process {pid} on host '{host}'"
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"{holder} writes to '{self._root}', as rank 0 of another run, and two runs can't write to one root; nothing was "
                    "changed. If a launcher that was killed left that run behind, end its processes first; else wait until it is done, or "
                    "choose another root. What only reads needs no more than load(), or a CheckpointManager that is told nothing of saving"
                )
            if is_first:
                _LOG.warning("%s writes to '%s': waiting up to %g s for it to end", holder, self._root, patience_seconds)
                is_first = False
            time.sleep(_POLL_SECONDS)
        return True

    def try_to_hold(self) -> bool:
        """Hold the lock, which is not held, unless another one holds it; tell whether it is held now.

        Raises:
            OSError: its file can't be written.
        """
        while True:
            make_parents(self._path)
            descriptor, is_ours = _open(self._path)
            try:
                # What is open for reading only some network file systems lock as shared only, and say of more what they say without locks.
                kinds = (fcntl.LOCK_EX,) if is_ours else (fcntl.LOCK_SH, fcntl.LOCK_EX)
                if not all(try_to_lock(descriptor, kind) for kind in kinds):
                    os.close(descriptor)
                    return False
                is_there = _is_at(self._path, descriptor)
                if is_ours and is_there:
                    break
                if is_there:
                    os.unlink(self._path)  # another user's, who was killed: it could not say who holds it now
            except BaseException:
                os.close(descriptor)
                raise
            # Who held it before removed the file in between.
            os.close(descriptor)
        with contextlib.suppress(OSError):  # a disk may be full; the lock is held without a name too
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
        self._descriptor = descriptor
        self._end = weakref.finalize(self, _release, self._path, descriptor)
        # A forked process, such as a data loader's, has the descriptor too: it must neither keep the lock nor give it up.
        os.register_at_fork(after_in_child=_Forgetting(self))
        return True

    def release(self) -> None:
        """Let others hold it; nothing happens where it is not held."""
        if self._end is not None:
            self._end()
            self._end = None

    def forget(self) -> None:
        """Close this process's descriptor, in a process that was forked; the lock stays its parent's."""
        if self._end is not None and self._end.detach():
            os.close(self._descriptor)
        self._end = None


def heal_root(lock: WriterLock, root: Path) -> None:
    """Give steps their names back that killed saves renamed aside; not those that another one, which holds the lock, may be replacing.

    Raises:
        CheckpointError: the system refused.
    """
    aside = steps_aside(root)
    was_held = lock.is_held
    try:
        if aside and (was_held or lock.try_to_hold()):
            for step in aside:
                if heal_target(root / step_name(step)):
                    _LOG.warning("'%s' was renamed back: a save that was to replace it was killed", root / step_name(step))
            if not was_held:
                lock.release()
    except OSError as error:
        raise CheckpointError(
            f"'{root}': {listing(map(step_name, aside))} can't be given back the name that a save, which was to replace it and was killed, "
            f"took away: {describe_error(error)}. Let a user who may write there make a CheckpointManager of this root, which does so"
        ) from error


class _Forgetting:
    """What a forked process calls; it keeps no lock alive."""

    def __init__(self, lock: WriterLock) -> None:
        self._lock = weakref.ref(lock)

    def __call__(self) -> None:
        lock = self._lock()
        if lock is not None:
            lock.forget()


def _open(path: Path) -> tuple[int, bool]:
    """Open the file, which is made where it is missing; tell whether it can be written."""
    # A named pipe would wait for ever without O_NONBLOCK.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666), True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | flags), False
        # Another user has just removed it, or this one can't make it.
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666), True


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether an open file is the one at a path."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _release(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        if _is_at(path, descriptor):
            os.unlink(path)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # what a library forked, without Python, has the descriptor too
    os.close(descriptor)


def _this_process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _read_holder(path: Path) -> tuple[str, int] | tuple[None, None]:
    """Return host and process of who holds the lock; None where that can't be read, as in the moment before it is written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            host, pid = json.loads(os.read(descriptor, _LONGEST_NAME))
        finally:
            os.close(descriptor)
    except (OSError, ValueError, TypeError):
        return None, None
    return (host, pid) if isinstance(host, str) and type(pid) is int else (None, None)
