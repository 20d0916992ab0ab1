"""A directory that appears as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import TargetExistsError
from ..storage.format import parse_left_over, staging_name


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that gets the name ``path`` where the block ends without an error, and is removed where it doesn't.

    What killed processes left behind of it, ``.NAME.staging-...`` beside it, is removed first. Its files are the block's to bring to the
    disk.

    Raises:
        TargetExistsError: something is there that is no empty directory.
        OSError: the system refused.
    """
    target = Path(os.path.realpath(path))
    _check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    for entry in target.parent.iterdir():
        if parse_left_over(entry.name) == (target.name, "staging"):
            shutil.rmtree(entry, ignore_errors=True)
    staging = target.parent / staging_name(target.name, secrets.token_hex(8))
    staging.mkdir()
    try:
        yield staging
        sync(staging)
        _check_free(target)
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


def _check_free(target: Path) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise TargetExistsError(f"'{target}' is there and is no directory; choose another path")
    if any(target.iterdir()):
        raise TargetExistsError(f"'{target}' is not empty, and nothing is ever written over; choose another path")
