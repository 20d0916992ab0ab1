"""Two runs don't write to one root at once: the second hears who writes there, and what only reads is not kept off."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import writer_cases
from harness import RankPool
from manager_runs import call
from step_cases import save_in_used_root

from paddle_fsdp_ckpt.errors import CheckpointError
from paddle_fsdp_ckpt.manager import writer_lock
from paddle_fsdp_ckpt.manager.steps import WRITER_LOCK_NAME, read_root, step_name
from paddle_fsdp_ckpt.manager.writer_lock import WriterLock, heal_root
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, replaced_name

Ranks = Callable[[int], RankPool]


def test_the_second_run_is_told_of_the_first(tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    root = str(tmp_path / "root")
    ((pid, in_process),) = single.run(writer_cases.begin_to_write, root, 1)
    assert in_process.startswith(
        f"another CheckpointManager of this process writes to '{root}'; nothing was changed. close() that one first"
    )
    holder = f"process {pid} on host '{socket.gethostname()}' writes to '{root}', as rank 0 of another run"
    for step, at_save, at_once in ranks(2).run(writer_cases.write_beside, root):
        assert step == 1
        assert holder in at_save and holder in at_once
    assert ranks(2).run(writer_cases.look, root) == [1, 1]
    single.run(writer_cases.write_and_end, 2)
    for text in ranks(2).run(writer_cases.save_after_a_look, 3):
        assert "another run saved step_00000002" in text
    assert [*ranks(2).run(call, save_in_used_root, (root,), {"resume": True, "step": 3})] == [[1, 2, 3]] * 2
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["history.jsonl", *(f"step_0000000{n}" for n in (1, 2, 3))]


def test_a_run_whose_step_another_saved_anew_or_removed_is_refused(tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    root = tmp_path / "root"
    single.run(call, save_in_used_root, (str(root),), {"resume": False, "step": 10})

    def refused(change: Callable[[], object]) -> list[str]:
        ranks(2).run(writer_cases.restore_and_keep, str(root))
        change()
        return ranks(2).run(writer_cases.refuse_with_the_kept, 11)

    again = {"resume": False, "step": 10, "overwrite": True}
    for text in refused(lambda: single.run(call, save_in_used_root, (str(root),), again)):
        assert f"another run saved step_00000010 in '{root}' since this one looked; nothing was saved" in text
    for text in refused(lambda: (root / "step_00000010").rename(tmp_path / "elsewhere")):
        assert f"step_00000010, from which this run goes on, is gone from '{root}'; nothing was saved. Make a new manager" in text
    (tmp_path / "elsewhere").rename(root / "step_00000010")
    ranks(2).run(writer_cases.restore_and_keep, str(root))
    os.utime(root / "step_00000010" / MANIFEST_NAME)  # it is the same step
    ranks(2).run(writer_cases.write_and_end, 11)
    assert read_root(root).numbers == [10, 11]


@contextmanager
def holding(root: Path, *, with_a_child: bool = False) -> Iterator[Callable[[], None]]:
    """Let another process hold the lock of a root, and give a function that kills it; a child of it may live on till the end."""
    is_held, tell = os.pipe()
    until, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        lock = WriterLock(root)
        if lock.hold(0.0) and (not with_a_child or os.fork()):
            os.write(tell, b"x")
        os.read(until, 1)
        os._exit(0)
    os.close(until)
    assert os.read(is_held, 1) == b"x"
    try:
        yield lambda: os.kill(pid, signal.SIGKILL)
    finally:
        os.close(end)
        os.waitpid(pid, 0)
        os.close(is_held)
        os.close(tell)


@pytest.mark.parametrize("with_a_child", [False, True])
def test_a_run_that_is_dying_is_waited_for(with_a_child: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = WriterLock(tmp_path / "root")
    with holding(tmp_path / "root", with_a_child=with_a_child) as kill:
        with pytest.raises(CheckpointError, match="process [0-9]+ on host .* writes to"):
            lock.hold(0.0)
        handler = logging.Handler()
        handler.emit = lambda record: kill()  # type: ignore[method-assign]
        log = logging.getLogger("paddle_fsdp_ckpt")
        log.addHandler(handler)
        try:
            started = time.monotonic()
            assert lock.hold(30.0)
        finally:
            log.removeHandler(handler)
        assert time.monotonic() - started < 20
        assert "waiting up to 30 s for it to end" in caplog.messages[-1]
    assert not lock.hold(0.0), "it is held already"
    lock.release()


def test_what_a_run_forked_keeps_nothing_and_gives_up_nothing(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    assert first.hold(0.0)
    child = os.fork()
    if child == 0:
        first.release()
        os._exit(0 if not second.try_to_hold() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not second.try_to_hold()
    assert read_root(tmp_path).skipped == {}
    first.release()
    assert second.hold(0.0)
    second.release()
    assert not list(tmp_path.iterdir())


def test_a_root_that_was_removed_is_held_anew(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path / "root"), WriterLock(tmp_path / "root")
    for _ in range(2):
        assert first.hold(0.0)
        (tmp_path / "root" / WRITER_LOCK_NAME).unlink()
    assert second.hold(0.0)
    with pytest.raises(CheckpointError, match="writes to"):
        first.hold(0.0)
    second.release()


def test_where_there_are_no_locks_nobody_is_kept_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    assert first.hold(0.0) and second.hold(0.0)
    for lock in (first, second):
        lock.release()
    assert not list(tmp_path.iterdir())


@contextmanager
def another_user(*, may_make: bool = True) -> Iterator[None]:
    """Be a user who may not write to files that are there."""
    kept = os.open

    def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR and not (may_make and flags & os.O_EXCL):
            raise PermissionError(errno.EACCES, "not yours", str(path))
        return kept(path, flags, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refusing)
        yield


def test_a_lock_that_another_user_left(tmp_path: Path) -> None:
    path = tmp_path / WRITER_LOCK_NAME
    for is_there in (False, True):  # it may also go between two looks
        if is_there:
            path.touch()
        with another_user():
            lock = WriterLock(tmp_path)
            assert lock.hold(0.0)
        assert not WriterLock(tmp_path).try_to_hold()
        lock.release()


def test_of_two_users_who_find_a_lock_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, first, locks = tmp_path / WRITER_LOCK_NAME, WriterLock(tmp_path), writer_lock.try_to_lock
    path.touch()

    def first_is_quicker(descriptor: int, kind: int) -> bool:
        monkeypatch.setattr(writer_lock, "try_to_lock", locks)
        path.unlink()
        assert first.hold(0.0)
        return locks(descriptor, kind)

    monkeypatch.setattr(writer_lock, "try_to_lock", first_is_quicker)
    with another_user():
        assert not WriterLock(tmp_path).try_to_hold()
    assert not first.hold(0.0), "it is held still"
    first.release()


def test_where_an_exclusive_lock_needs_a_file_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, see flock(2)."""
    locks = fcntl.flock

    def as_on_nfs(descriptor: int, kind: int) -> None:
        if kind & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "not open for writing")
        locks(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    first = WriterLock(tmp_path)
    assert first.hold(0.0)
    with another_user():
        assert not WriterLock(tmp_path).try_to_hold()
    assert not first.hold(0.0), "it is held still"
    first.release()


def test_who_may_not_write_hears_what_a_killed_save_left(tmp_path: Path) -> None:
    aside = tmp_path / replaced_name(step_name(2), "ab" * 8)
    aside.mkdir()
    (aside / MANIFEST_NAME).touch()
    with another_user(may_make=False), pytest.raises(CheckpointError, match="step_00000002 can't be given back .* not yours"):
        heal_root(WriterLock(tmp_path), tmp_path)
    heal_root(WriterLock(tmp_path), tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [step_name(2)]
