"""A directory that appears as a whole or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import TargetExistsError
from ..storage.format import parse_left_over, staging_name
from ..storage.read_lock import try_to_lock
from ..storage.system_errors import is_there


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that gets the name ``path`` where the block ends without an error, and is removed where it doesn't.

    What killed processes left behind of it, ``.NAME.staging-...`` beside it, is removed first. Its files are the block's to bring to the
    disk. While the block runs, a lock of the system on the directory tells others that it is no left-over, where there are such locks.

    Raises:
        TargetExistsError: something is there that is no empty directory, or another process is making it.
        OSError: the system refused.
    """
    target = Path(os.path.realpath(path))
    check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    for entry in target.parent.iterdir():
        if parse_left_over(entry.name) == (target.name, "staging"):
            with _locked(entry, target):
                shutil.rmtree(entry, ignore_errors=True)
    staging = target.parent / staging_name(target.name, secrets.token_hex(8))
    staging.mkdir()
    try:
        with _locked(staging, target):
            yield staging
            sync(staging)
            check_free(target)
            os.rename(staging, target)
            sync(target.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # a write doesn't say to where
            error.filename = str(target)
        raise


def sync(path: Path) -> None:
    """Bring a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(staging: Path, target: Path) -> Iterator[None]:
    try:
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone, no directory, or not ours to read: what is then done with it says so where it matters
        yield
        return
    try:
        if not try_to_lock(descriptor, fcntl.LOCK_EX):
            raise TargetExistsError(f"another process is writing '{target}' right now; wait for it, or choose another path")
        yield
    finally:
        os.close(descriptor)


def check_free(target: Path) -> None:
    """Raise unless a directory may be made here.

    Raises:
        TargetExistsError: something is there that is no empty directory.
    """
    if not is_there(target):
        return
    if not target.is_dir():
        raise TargetExistsError(f"'{target}' is there and is no directory; choose another path")
    if any(target.iterdir()):
        raise TargetExistsError(f"'{target}' is not empty, and nothing is ever written over; choose another path")
