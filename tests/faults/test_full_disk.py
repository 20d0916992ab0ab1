"""Case 16: no room or no permission, on one rank or on all: the same error everywhere, with the way out, and nothing is left."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from processes import Fault, Ranks, step_at


def check_all_fail(results: list[str], *texts: str) -> None:
    for result in results:
        for text in texts:
            assert text in result, results


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where a checkpoint of step 1 is."""
    path = tmp_path / "root" / "step"
    path.parent.mkdir()
    assert Ranks(tmp_path / "first", path, 2, step=1).results() == ["saved"] * 2
    return path


def check_old_is_there_and_saving_goes_on(tmp_path: Path, target: Path) -> None:
    assert step_at(target) == 1
    assert [path.name for path in target.parent.iterdir()] == ["step"]
    assert Ranks(tmp_path / "later", target, 2, step=9, overwrite=True).results() == ["saved"] * 2
    assert step_at(target) == 9


@pytest.mark.parametrize("rank", [0, 1, -1], ids=["rank 0", "rank 1", "all"])
@pytest.mark.parametrize(
    ("number", "way_out"),
    [(errno.ENOSPC, "the disk is full: make room"), (errno.EDQUOT, "quota is used up"), (errno.EACCES, "change the permissions")],
    ids=["full", "quota", "permission"],
)
def test_one_rank_or_all_can_not_write(tmp_path: Path, target: Path, rank: int, number: int, way_out: str) -> None:
    denied = number == errno.EACCES
    # One that may open nothing at all couldn't remove what it wrote either; the next save does.
    fault = Fault(rank, 0, number, ["open" if denied else "writev"], lasting=not denied)
    results = Ranks(tmp_path / "save", target, 2, step=2, overwrite=True, fault=fault).results()
    check_all_fail(results, "RankFailedError", way_out, os.strerror(number), f"rank {max(rank, 0)}" if rank >= 0 else "rank")
    check_old_is_there_and_saving_goes_on(tmp_path, target)


def test_the_system_stops_a_file_from_growing(tmp_path: Path, target: Path) -> None:
    """A real refusal by the system in the middle of a write: a limit on the size of files."""
    results = Ranks(tmp_path / "save", target, 2, step=2, elements=1 << 18, overwrite=True, largest_file=1 << 16).results()
    check_all_fail(results, "RankFailedError: rank 0 failed", "File too large", "0_0.safetensors", "ulimit -f")
    check_old_is_there_and_saving_goes_on(tmp_path, target)


def test_room_for_all_is_looked_for_first(tmp_path: Path, target: Path) -> None:
    status = os.statvfs(tmp_path)
    too_much = status.f_blocks * status.f_frsize
    results = Ranks(tmp_path / "save", target, 2, step=2, overwrite=True, nbytes=too_much).results()
    check_all_fail(results, "needs about", "are free; nothing was written. Make room there, or save elsewhere")
    for result in results:
        needed = re.search(r"needs about ([0-9.]+) ([KMGTP])B, and [0-9.]+ [KMGTP]B are free", result)
        assert needed is not None, result
        assert float(needed[1]) * 1000 ** (1 + "KMGTP".index(needed[2])) == pytest.approx(2 * too_much, rel=0.005)
    assert results[0].startswith("CheckpointError: ")
    check_old_is_there_and_saving_goes_on(tmp_path, target)


def test_a_directory_that_nobody_may_write_to(tmp_path: Path) -> None:
    """Not even root may make a directory in the kernel's own file systems."""
    results = Ranks(tmp_path / "save", Path("/sys/kernel/step"), 2, step=2).results()
    check_all_fail(results, "RankFailedError: rank 0 failed", "/sys/kernel/", "use another directory")
