"""What a disk doesn't give is damage of the checkpoint, for all that read it; what the process or the path lacks is not."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cut, write_checkpoint

from paddle_fsdp_ckpt.errors import CorruptCheckpointError
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage import index, system_errors
from paddle_fsdp_ckpt.storage.plan import plan_read
from paddle_fsdp_ckpt.storage.reader import UNCHANGED, execute_read
from paddle_fsdp_ckpt.storage.system_errors import describe_error, is_there
from paddle_fsdp_ckpt.storage.verify import verify


def read_values(path: Path) -> None:
    found = index.read_index(path)
    plan = plan_read(found, [Piece("w", "float32", (6,), (0,), (6,))], found.keys())
    execute_read(plan, [memoryview(bytearray(24))], UNCHANGED)


def failing_at(patch: pytest.MonkeyPatch, where: str, name: str, code: int, times: int | None = None) -> None:
    """Let the system refuse to look at a file of this name, to open it, or to read its beginning or its middle; always, or some times."""
    failed = 0

    def checked(file: int | str, call: Callable[[], Any]) -> Any:
        nonlocal failed
        if Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file).name == name and failed != times:
            failed += 1
            raise OSError(code, os.strerror(code))
        return call()

    real_open, real_os_open, real_preadv, real_lstat = open, os.open, os.preadv, os.lstat
    if where == "look":
        patch.setattr(os, "lstat", lambda path, **options: checked(path, lambda: real_lstat(path, **options)))
    elif where == "open":
        patch.setattr(os, "open", lambda path, *rest, **options: checked(path, lambda: real_os_open(path, *rest, **options)))
    elif where == "values":
        patch.setattr(os, "preadv", lambda descriptor, *rest: checked(descriptor, lambda: real_preadv(descriptor, *rest)))
    else:

        def open_badly(descriptor: int, mode: str) -> Any:
            file = real_open(descriptor, mode)
            read = file.read
            file.read = lambda *size: checked(descriptor, lambda: read(*size))
            return file

        patch.setattr(index, "open", open_badly, raising=False)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("look", "manifest.json"),
        ("open", "manifest.json"),
        ("open", "0_0.safetensors"),
        ("begin", "manifest.json"),
        ("begin", "0_0.safetensors"),
        ("values", "0_0.safetensors"),
    ],
)
def test_errors_of_the_medium_are_damage(
    where: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut("w", np.arange(6, dtype=np.float32))]])
    monkeypatch.setattr(system_errors, "PAUSES_SECONDS", (0.0,) * 3)
    for code in (errno.EIO, errno.EUCLEAN, errno.EBADMSG):
        with monkeypatch.context() as patch:
            failing_at(patch, where, name, code)
            with pytest.raises(CorruptCheckpointError, match=rf"{name}' can't be read: .*{os.strerror(code)}"):
                read_values(path)
            if (where, name) != ("begin", "0_0.safetensors"):  # which verify reads otherwise
                assert os.strerror(code) in str(verify(path))
    for code in (errno.EMFILE, errno.EACCES, errno.ESTALE, errno.ENOMEM):
        with monkeypatch.context() as patch:
            failing_at(patch, where, name, code)
            with pytest.raises(OSError, match=f"{os.strerror(code)}.*{name}"):
                read_values(path)
    with monkeypatch.context() as patch:
        failing_at(patch, where, name, errno.EIO, times=3)
        read_values(path)
        assert [one.getMessage().count("is read again in 0 s") for one in caplog.records[-3:]] == [1, 1, 1]
    with monkeypatch.context() as patch:
        failing_at(patch, where, name, errno.EIO, times=3)
        assert verify(path).is_good
    with monkeypatch.context() as patch:  # what will not pass is not asked for again
        failing_at(patch, where, name, errno.ENODATA, times=1)
        with pytest.raises(CorruptCheckpointError, match=os.strerror(errno.ENODATA)):
            read_values(path)
    read_values(path)
    assert verify(path).is_good


@pytest.mark.parametrize(
    ("parent", "message"),
    [("/proc/none", "FileNotFoundError.*check the path: .*can't be made there"), ("file", "NotADirectoryError.*is a file")],
)
def test_a_wrong_path_has_a_way_out(parent: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((FileNotFoundError, NotADirectoryError)) as caught:
        (tmp_path / parent / "step").mkdir(parents=True)
    assert re.search(message, describe_error(caught.value))


def test_only_what_is_missing_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert [is_there(tmp_path / name) for name in ("file", "link", "loop")] == [True] * 3
    assert not any(is_there(tmp_path / name) for name in ("none", "file/below", "none/below", "loop/below", "null\0"))
    monkeypatch.setattr(system_errors, "PAUSES_SECONDS", (0.0, 0.0))
    for code, times, raises in ((errno.EIO, 2, False), (errno.EIO, None, True), (errno.ESTALE, 1, True), (errno.EACCES, 1, True)):
        with monkeypatch.context() as patch:
            failing_at(patch, "look", "file", code, times)
            if raises:
                with pytest.raises(OSError, match=re.escape(os.strerror(code))):
                    is_there(tmp_path / "file")
            else:
                assert is_there(tmp_path / "file")


def test_a_file_that_tells_nothing_of_itself_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(OSError, match="Input/output"):
            index.open_inside(tmp_path, "file")
    assert len(os.listdir("/proc/self/fd")) == len(before)
