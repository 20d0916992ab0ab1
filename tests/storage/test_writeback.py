"""What was written goes to the disk early, range by range, where the system can do that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paddle_fsdp_ckpt.storage import writeback
from paddle_fsdp_ckpt.storage.writeback import Writeback
from paddle_fsdp_ckpt.storage.writer import write_file

MIB = 1 << 20


def test_the_ranges_lie_end_to_end_and_leave_a_short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int, int]] = []

    def note(descriptor: int, start: int, nbytes: int) -> int:
        begun.append((descriptor, start, nbytes))
        return 0

    monkeypatch.setattr(writeback, "_sync_file_range", lambda: note)
    follower = Writeback(7)
    for nbytes in [MIB] * 70 + [100 * MIB, 1]:
        follower.advance(nbytes)
    assert begun == [(7, 0, 32 * MIB), (7, 32 * MIB, 32 * MIB), (7, 64 * MIB, 106 * MIB)]


@pytest.mark.parametrize("function", [None, lambda *_: errno.ENOSYS, lambda *_: errno.EPERM, lambda *_: errno.EINVAL])
def test_a_system_that_cannot_is_left_alone(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_sync_file_range", lambda: function)
    Writeback(7).advance(100 * MIB)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_early_fails_the_write(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_sync_file_range", lambda: lambda *_: code)
    path = tmp_path / "file"
    with pytest.raises(OSError, match=str(path)) as caught:
        write_file(path, [memoryview(bytes(33 * MIB))])
    assert caught.value.errno == code
    assert not path.exists()


def test_the_systems_own_function_takes_it(tmp_path: Path) -> None:
    begin = writeback._sync_file_range()
    assert begin is not None
    # The enum of linux/fs.h: SYNC_FILE_RANGE_WRITE alone waits for nothing.
    assert writeback._WRITE == 2
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * MIB)
        file.flush()
        assert begin(file.fileno(), 0, MIB) == 0
    read, write = os.pipe()
    assert begin(write, 0, MIB) == errno.ESPIPE, "a pipe has no ranges"
    os.close(read)
    os.close(write)
