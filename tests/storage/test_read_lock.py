"""What reads a checkpoint keeps it from being removed, until its process ends; and reads all the same where there are no locks."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cut, write_checkpoint

from paddle_fsdp_ckpt.errors import CorruptCheckpointError, ReplacedCheckpointError
from paddle_fsdp_ckpt.export.difference import compare
from paddle_fsdp_ckpt.export.huggingface import export_huggingface
from paddle_fsdp_ckpt.export.shard_map import read_shard_map
from paddle_fsdp_ckpt.storage import index, read_lock, survey
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME
from paddle_fsdp_ckpt.storage.index import read_manifest
from paddle_fsdp_ckpt.storage.read_lock import reading, removing
from paddle_fsdp_ckpt.storage.salvage import salvage
from paddle_fsdp_ckpt.storage.verify import verify

READER = """
import sys
from paddle_fsdp_ckpt.storage.read_lock import reading
with reading(sys.argv[1]):
    print("reading", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "step", [[cut("w", np.arange(6, dtype=np.float32))]])


def may_remove(path: Path) -> bool:
    with removing(path) as is_free:
        return is_free


def test_readers_share_and_keep_off(checkpoint: Path) -> None:
    with reading(checkpoint):
        with reading(checkpoint):
            assert not may_remove(checkpoint)
        assert not may_remove(checkpoint)
    assert may_remove(checkpoint)
    with removing(checkpoint), reading(checkpoint):
        assert not may_remove(checkpoint)


def test_what_cannot_be_asked_is_not_taken_for_unread(checkpoint: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            may_remove(checkpoint)
        with reading(checkpoint):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert may_remove(checkpoint)
    (checkpoint / MANIFEST_NAME).unlink()
    assert may_remove(checkpoint)


@pytest.mark.parametrize("read", [read_shard_map, verify, lambda path: compare(path, path)], ids=["plot", "verify", "diff"])
def test_what_is_replaced_meanwhile_is_not_called_damaged(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    other = write_checkpoint(checkpoint.parent / "other", [[cut("w", np.arange(8, dtype=np.float32))]])

    def replaced_behind(path: Path, *args: Any, **kwargs: Any) -> Any:
        manifest = read_manifest(path, *args, **kwargs)
        checkpoint.rename(checkpoint.parent / "before")
        other.rename(checkpoint)
        return manifest

    for module in (index, survey):
        monkeypatch.setattr(module, "read_manifest", replaced_behind)
    with pytest.raises(ReplacedCheckpointError, match="step' was replaced by another checkpoint while it was read"):
        read(checkpoint)
    monkeypatch.undo()
    read(checkpoint)
    (checkpoint / "0_0.safetensors").write_bytes(b"damaged")
    if read is verify:
        assert not verify(checkpoint).is_good
    else:
        with pytest.raises(CorruptCheckpointError):
            read(checkpoint)


def test_what_a_reader_forked_keeps_nothing(checkpoint: Path) -> None:
    until, tell = os.pipe()
    with reading(checkpoint):
        child = os.fork()
        if child == 0:
            os.close(tell)
            os.read(until, 1)  # till the parent is done
            os._exit(0)
    assert may_remove(checkpoint)
    os.close(tell)
    os.waitpid(child, 0)
    os.close(until)


def test_a_dead_reader_keeps_nothing(checkpoint: Path) -> None:
    command = [sys.executable, "-c", READER, str(checkpoint)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(read_lock.__file__).parents[2])
    assert reader.stdout is not None and reader.stdin is not None
    assert reader.stdout.readline() == b"reading\n"
    assert not may_remove(checkpoint)
    os.kill(reader.pid, signal.SIGKILL)
    reader.wait()
    reader.stdin.close()
    reader.stdout.close()
    assert may_remove(checkpoint)


@pytest.mark.parametrize(
    "read",
    [
        lambda path, out, seen: verify(path, progress=seen),
        lambda path, out, seen: salvage(path, progress=seen),
        lambda path, out, seen: export_huggingface(path, out, recipe="none", progress=seen),
    ],
    ids=["verify", "salvage", "export"],
)
def test_readers_hold_it(checkpoint: Path, tmp_path: Path, read: Callable[..., Any]) -> None:
    seen: list[bool] = []
    read(checkpoint, tmp_path / "out", lambda done, total: seen.append(may_remove(checkpoint)))
    assert seen and not any(seen)
    assert may_remove(checkpoint)


def test_a_path_may_begin_at_the_home_directory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    with reading(f"~/{checkpoint.name}"):
        assert not may_remove(checkpoint)


def test_nothing_is_needed_of_the_directory(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that may not be written, a directory without one, and a file system without locks."""
    opened = os.open

    def refuse_to_write(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "no", str(path))
        return opened(path, flags, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse_to_write)
        with reading(checkpoint):
            assert verify(checkpoint).is_good
            assert not may_remove(checkpoint)
    with reading(tmp_path / "nothing"):
        assert may_remove(tmp_path / "nothing")

    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with reading(checkpoint):
        assert may_remove(checkpoint)
        assert compare(checkpoint, checkpoint).is_none
