"""What was written goes to the disk early, range by range, where the system can do that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddle_fsdp_ckpt.storage import writeback
from paddle_fsdp_ckpt.storage.writeback import Writeback

MIB = 1 << 20


def test_the_ranges_lie_end_to_end_and_leave_a_short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int, int, int]] = []
    monkeypatch.setattr(writeback, "_sync_file_range", lambda: lambda *range_: begun.append(range_))
    follower = Writeback(7)
    for nbytes in [MIB] * 70 + [100 * MIB, 1]:
        follower.advance(nbytes)
    # 2 of the enum of linux/fs.h: SYNC_FILE_RANGE_WRITE, which waits for nothing.
    assert begun == [(7, 0, 32 * MIB, 2), (7, 32 * MIB, 32 * MIB, 2), (7, 64 * MIB, 106 * MIB, 2)]


def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_sync_file_range", lambda: None)
    Writeback(7).advance(100 * MIB)


def test_the_systems_own_function_takes_it(tmp_path: Path) -> None:
    begin = writeback._sync_file_range()
    assert begin is not None
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * MIB)
        file.flush()
        assert begin(file.fileno(), 0, MIB, writeback._WRITE) == 0
    read, write = os.pipe()
    assert begin(write, 0, MIB, writeback._WRITE) == -1, "a pipe has no ranges"
    os.close(read)
    os.close(write)
