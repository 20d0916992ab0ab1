from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import ThreadRendezvous, cut, make_manifest, run_ranks, write_checkpoint

from paddle_fsdp_ckpt.errors import CheckpointError, IncompleteCheckpointError, MismatchError, RankFailedError, TargetExistsError
from paddle_fsdp_ckpt.storage.commit import commit_checkpoint, heal_target
from paddle_fsdp_ckpt.storage.format import PADDLE_METADATA_NAME, rank_file_name, replaced_name, staging_name
from paddle_fsdp_ckpt.storage.index import CheckpointIndex, read_index, read_manifest
from paddle_fsdp_ckpt.storage.manifest import FileRecord, Manifest
from paddle_fsdp_ckpt.storage.writer import write_rank_file

NONCE = "0123456789abcdef"


class Killed(BaseException):
    """The process is gone."""


LONG = 30.0
"""Seconds; for what comes as soon as its thread gets on."""


def write_files(ranks: ThreadRendezvous, value: float = 1.0) -> Callable[[Path], FileRecord]:
    whole = np.full((2 * ranks.world_size,), value, np.float32)
    piece = cut("w", whole, flat=(2 * ranks.rank, 2 * ranks.rank + 2))
    return lambda staging: write_rank_file(staging / rank_file_name(ranks.rank), [piece])


def save(ranks: ThreadRendezvous, path: Path, **options: Any) -> None:
    step = options.pop("step", 7)
    arguments: dict[str, Any] = {
        "write_files": write_files(ranks, float(step)),
        "build_manifest": lambda records: make_manifest(records, step),
        "nbytes": 1000,
        "token": "save",
        "timeout_seconds": LONG,
    }
    commit_checkpoint(path, ranks, **(arguments | options))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint, whose values must be that step's."""
    index = read_index(path)
    for stored in index.pieces("w"):
        raw = (path / stored.file_name).read_bytes()[stored.byte_offset :]
        assert set(np.frombuffer(raw, np.float32).tolist()) == {float(index.manifest.step or 0)}
    return index.manifest.step


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_save_one_checkpoint(tmp_path: Path, world_size: int) -> None:
    target = tmp_path / "new" / "parents" / "step"
    assert run_ranks(world_size, lambda ranks: save(ranks, target)) == [None] * world_size
    assert read_manifest(target).world_size == world_size
    assert names(target) == sorted([*(rank_file_name(rank) for rank in range(world_size)), "manifest.json"])
    assert names(target.parent) == ["step"]
    assert step_of(target) == 7
    index: CheckpointIndex = read_index(target)
    assert sum(stored.piece.numel for stored in index.pieces("w")) == 2 * world_size


def test_an_empty_directory_or_a_link_to_one_may_be_the_target(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert run_ranks(2, lambda ranks: save(ranks, tmp_path / "link"))[1] is None
    assert step_of(tmp_path / "empty") == 7
    assert (tmp_path / "link").is_symlink()


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run_ranks(1, lambda ranks: save(ranks, tmp_path / "step"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "step").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "step").iterdir()} == {0o640}


def test_extra_files_are_made_by_rank_0_before_the_manifest(tmp_path: Path) -> None:
    def add(staging: Path, records: Sequence[FileRecord]) -> None:
        assert [record.name for record in records] == [rank_file_name(0), rank_file_name(1)]
        assert not (staging / "manifest.json").exists()
        (staging / PADDLE_METADATA_NAME).write_bytes(b"x")

    run_ranks(2, lambda ranks: save(ranks, tmp_path / "step", before_manifest=add))
    assert names(tmp_path / "step") == ["0.metadata", "0_0.safetensors", "1_0.safetensors", "manifest.json"]


def test_different_paths_are_refused_and_both_are_shown(tmp_path: Path) -> None:
    results = run_ranks(3, lambda ranks: save(ranks, tmp_path / f"step{ranks.rank // 2}"))
    for result in results:
        assert isinstance(result, RankFailedError)
        assert f"rank 0 '{tmp_path / 'step0'}' and rank 2 '{tmp_path / 'step1'}'" in str(result)
    assert names(tmp_path) == []


def test_ranks_that_share_no_file_system_are_recognised(tmp_path: Path) -> None:
    class Elsewhere(ThreadRendezvous):
        """Sees, under the path that rank 0 made, a directory of another machine."""

        def get(self, key: str, timeout_seconds: float) -> bytes:
            return super().get(key, timeout_seconds).replace(b"/here/", b"/there/")

    def work(ranks: ThreadRendezvous) -> None:
        if ranks.rank == 2:
            ranks = Elsewhere(ranks.rank, ranks.world_size, ranks._store, ranks._changed)
        return save(ranks, tmp_path / "here" / "step")

    results = run_ranks(3, work)
    for result in results:
        assert isinstance(result, RankFailedError)
        assert re.search(r"rank 2 failed: it doesn't see what rank 0 made.*share no file system", str(result))
    assert names(tmp_path / "here") == []


@pytest.mark.parametrize(
    ("make", "overwrite", "message"),
    [
        (lambda target: write_checkpoint(target, [[]]), False, "holds a checkpoint already.*another path, or pass overwrite=True"),
        (lambda target: (target.mkdir(), (target / "thesis.tex").write_text("x")), False, "not empty.*no checkpoint.*another path"),
        (lambda target: (target.mkdir(), (target / "thesis.tex").write_text("x")), True, "not empty.*never replaced.*another path"),
        (lambda target: target.write_text("x"), True, "is no directory.*another path"),
        (lambda target: target.symlink_to("nowhere"), False, None),
    ],
)
def test_a_target_that_may_not_be_replaced_is_refused(
    tmp_path: Path, make: Callable[[Path], object], overwrite: bool, message: str | None
) -> None:
    make(tmp_path / "step")
    before = names(tmp_path)
    results = run_ranks(2, lambda ranks: save(ranks, tmp_path / "step", overwrite=overwrite))
    if message is None:
        assert step_of(tmp_path / "step") == 7
        return
    assert type(results[0]) is TargetExistsError
    assert type(results[1]) is RankFailedError
    for result in results:
        assert re.search(f"{tmp_path / 'step'}.*{message}", str(result))
    assert names(tmp_path) == before


@pytest.mark.parametrize("name", [staging_name("step", NONCE), replaced_name("step", NONCE)])
def test_a_target_with_a_left_overs_name_is_refused(tmp_path: Path, name: str) -> None:
    """Nothing would load it, and the next save to the other target would remove it."""
    for result in run_ranks(2, lambda ranks: save(ranks, tmp_path / name)):
        assert isinstance(result, CheckpointError)
        assert "has a name that a save to 'step' gives what it leaves behind" in str(result)
    assert names(tmp_path) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_mounted_file_system_is_refused_before_anything_is_written(tmp_path: Path, overwrite: bool) -> None:
    """``/proc`` is one everywhere; nothing is written beside it."""
    before = names(Path("/"))
    for result in run_ranks(2, lambda ranks: save(ranks, Path("/proc"), overwrite=overwrite)):
        assert isinstance(result, CheckpointError)
        assert "is where a file system is mounted" in str(result) and "'/proc/checkpoint'" in str(result)
    assert names(Path("/")) == before


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    run_ranks(4, lambda ranks: save(ranks, tmp_path / "step", step=1))
    run_ranks(2, lambda ranks: save(ranks, tmp_path / "step", step=2, overwrite=True))
    assert names(tmp_path) == ["step"]
    assert names(tmp_path / "step") == ["0_0.safetensors", "1_0.safetensors", "manifest.json"]
    assert step_of(tmp_path / "step") == 2


def test_only_this_targets_left_overs_are_cleared(tmp_path: Path) -> None:
    mine = [staging_name("step", NONCE), staging_name("step", NONCE[::-1])]
    others = [staging_name("step2", NONCE), replaced_name("step2", NONCE), ".step.staging-mine", "step.staging-" + NONCE]
    for name in [*mine, *others]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "0_0.safetensors").write_text("x")
    run_ranks(1, lambda ranks: save(ranks, tmp_path / "step"))
    assert names(tmp_path) == sorted([*others, "step"])


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MismatchError("odd")])
def test_one_failing_rank_fails_all_and_leaves_nothing(tmp_path: Path, failing: int, error: Exception) -> None:
    def work(ranks: ThreadRendezvous) -> None:
        def fail(staging: Path) -> FileRecord:
            (staging / "half").write_text("x")
            raise error

        return save(ranks, tmp_path / "step", **({"write_files": fail} if ranks.rank == failing else {}))

    results = run_ranks(3, work)
    own = results.pop(failing)
    assert own is error or own.__cause__ is error
    for result in results:
        assert type(result) is RankFailedError
        assert f"rank {failing} failed: " in str(result) and str(error) in str(result)
    assert names(tmp_path) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_writes_is_named_by_all_others(tmp_path: Path, victim: int) -> None:
    class TimePasses(ThreadRendezvous):
        """Waits in no time for what the victim, dead by then, would have said."""

        def put(self, key: str, value: bytes) -> None:
            if self.rank == victim and "/write/" in key:
                raise Killed
            super().put(key, value)

        def get(self, key: str, timeout_seconds: float) -> bytes:
            if key == f"save/write/report/{victim}" or (victim == 0 and key == "save/write/verdict"):
                raise TimeoutError
            return super().get(key, timeout_seconds)

    def work(ranks: ThreadRendezvous) -> None:
        def die(staging: Path) -> FileRecord:
            raise Killed

        ranks = TimePasses(ranks.rank, ranks.world_size, ranks._store, ranks._changed)
        return save(ranks, tmp_path / "step", **({"write_files": die} if ranks.rank == victim else {}))

    results = run_ranks(3, work)
    assert isinstance(results.pop(victim), Killed)
    for result in results:
        assert type(result) is RankFailedError
        assert re.search(f"rank {victim}.*killed", str(result))
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"build_manifest": lambda records: 1 // 0}, "ZeroDivisionError"),
        ({"build_manifest": lambda records: make_manifest(records[:1])}, "other files or ranks"),
        ({"before_manifest": lambda staging, records: (staging / "no" / "such").write_text("x")}, "FileNotFoundError"),
        ({"before_manifest": lambda staging, records: (staging / ".nonce").unlink()}, "FileNotFoundError"),
        ({"write_files": lambda staging: write_rank_file(staging / f"{get_ident()}_0.safetensors", [])}, "must write '1_0.safetensors'"),
        ({"write_files": lambda staging: FileRecord("1_0.safetensors", 5, 0)}, r"rank 0 failed: FileNotFoundError|must write '0_0"),
    ],
)
def test_a_caller_that_does_something_else_than_promised_fails_all(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    results = run_ranks(2, lambda ranks: save(ranks, tmp_path / "step", **options))
    for result in results:
        assert type(result) is RankFailedError
        assert re.search(message, str(result))
    assert names(tmp_path) == []


def test_a_file_that_arrived_shorter_than_it_was_written_is_noticed(tmp_path: Path) -> None:
    def work(ranks: ThreadRendezvous) -> None:
        def shorten(staging: Path) -> FileRecord:
            record = write_files(ranks)(staging)
            os.truncate(staging / record.name, record.size - 1)
            return record

        return save(ranks, tmp_path / "step", write_files=shorten)

    for result in run_ranks(2, work):
        assert re.search(r"0_0.safetensors' has \d+ bytes, and its rank wrote", str(result))
    assert names(tmp_path) == []


def test_extra_state_that_json_cannot_hold_fails_all(tmp_path: Path) -> None:
    def build(records: Sequence[FileRecord]) -> Manifest:
        return Manifest(1, len(records), make_manifest(records).created, {}, [], {"betas": (0.9, 0.95)}, tuple(records))

    for result in run_ranks(2, lambda ranks: save(ranks, tmp_path / "step", build_manifest=build)):
        assert "extra_state['betas'] is a tuple" in str(result)
    assert names(tmp_path) == []


OPERATIONS = ["mkdir", "rename", "fsync", "unlink", "rmdir", "writev", "close"]


class Faults:
    """Makes one of the file system operations fail, counted from 0; where ``lasting``, all after it as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int, error: BaseException, lasting: bool) -> None:
        self.count = 0
        self.armed = True
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name), nth, error, lasting))

    def _wrap(self, real: Callable[..., Any], nth: int, error: BaseException, lasting: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.armed:
                self.count += 1
                if self.count == nth + 1 or (lasting and self.count > nth):
                    raise error
            return real(*args, **kwargs)

        return call


def solo(**options: Any) -> Any:
    """Save from one rank; return the manifest, or the exception."""
    return run_ranks(1, lambda ranks: save(ranks, **options))[0]


@pytest.mark.parametrize("existing", [False, True])
def test_killed_at_any_operation_the_old_or_the_new_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    seen = set()
    for nth in range(200):
        target = tmp_path / str(nth) / "step"
        if existing:
            solo(path=target, step=1)
        with monkeypatch.context() as patch:
            faults = Faults(patch, nth, Killed(), lasting=True)
            result = solo(path=target, step=2, overwrite=True)
            faults.armed = False
        try:
            state = step_of(target)
        except IncompleteCheckpointError as error:
            aside = existing and "mv '" in str(error)
            assert aside or not existing
            state = None
            if aside:
                assert heal_target(target)
                state = step_of(target)
                assert state == 1
        assert state in ((1, 2) if existing else (None, 2))
        seen.add(state)
        assert solo(path=target, step=3, overwrite=True) is None
        assert step_of(target) == 3
        assert names(target.parent) == ["step"], "the next save clears what the dead one left"
        if result is None:
            break
    else:
        pytest.fail("a save has fewer operations than that")
    assert seen == ({1, 2} if existing else {None, 2})


@pytest.mark.parametrize("existing", [False, True])
def test_an_error_at_any_operation_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    for nth in range(200):
        target = tmp_path / str(nth) / "step"
        if existing:
            solo(path=target, step=1)
        else:
            target.parent.mkdir()
        with monkeypatch.context() as patch:
            faults = Faults(patch, nth, OSError(errno.EIO, "Input/output error"), lasting=False)
            result = solo(path=target, step=2, overwrite=True)
            faults.armed = False
        if result is None:
            assert step_of(target) == 2
        else:
            assert isinstance(result, RankFailedError)
            assert "Input/output error" in str(result)
            if existing:
                assert step_of(target) == 1
            else:
                assert not target.exists()
            assert solo(path=target, step=3, overwrite=existing) is None
            assert step_of(target) == 3
            assert names(target.parent) == ["step"]
        if faults.count <= nth:
            break
    else:
        pytest.fail("a save has fewer operations than that")


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "step"
    solo(path=target, step=1)
    real = os.unlink

    def keep(path: Any, **options: Any) -> None:
        if os.path.basename(path) == "manifest.json":
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", keep)
        assert solo(path=target, step=2, overwrite=True) is None
    assert step_of(target) == 2
    assert solo(path=target, step=3, overwrite=True) is None
    assert names(tmp_path) == ["step"]


def test_healing_gives_only_a_whole_checkpoint_its_name_back(tmp_path: Path) -> None:
    target = tmp_path / "step"
    half = tmp_path / replaced_name("step", NONCE)
    half.mkdir()
    assert not heal_target(target)
    assert not heal_target(tmp_path / "no" / "parent")
    write_checkpoint(tmp_path / "whole", [[]]).rename(tmp_path / replaced_name("step", NONCE[::-1]))
    assert heal_target(target)
    assert read_manifest(target).step == 7
    assert not heal_target(target)
    assert json.loads((target / "manifest.json").read_text())["world_size"] == 1


def test_a_save_heals_its_target_before_it_judges_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", [[]]).rename(tmp_path / replaced_name("step", NONCE))
    assert isinstance(solo(path=tmp_path / "step"), TargetExistsError)
    assert names(tmp_path) == ["step"]
    assert read_manifest(tmp_path / "step").step == 7


def test_what_appears_at_the_target_while_ranks_write_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "step"

    def write(staging: Path) -> FileRecord:
        write_checkpoint(target, [[cut("w", np.full(2, 3.0, np.float32))]])
        return write_rank_file(staging / rank_file_name(0), [cut("w", np.zeros(2, np.float32))])

    assert isinstance(solo(path=target, write_files=write), TargetExistsError)
    assert names(tmp_path) == ["step"]
    (stored,) = read_index(target).pieces("w")
    values = (target / stored.file_name).read_bytes()[stored.byte_offset :]
    np.testing.assert_array_equal(np.frombuffer(values, np.float32), [3.0, 3.0])


def test_room_that_is_kept_back_for_root_is_roots_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(f_blocks=20_000, f_frsize=1, f_bfree=10_500, f_bavail=500)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused = solo(path=tmp_path / "step", nbytes=1000)
    assert isinstance(refused, CheckpointError) and "500 B are free" in str(refused)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert solo(path=tmp_path / "step", nbytes=1000) is None


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES])
def test_what_cannot_be_looked_at_is_not_taken_for_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Neither a target, which would be replaced without a word, nor one that was renamed aside, in whose place there would be none."""
    target = tmp_path / "step"
    solo(path=target, step=1)
    real = os.lstat

    def hiding(hidden: Path) -> Any:
        def lstat(path: Any, **options: Any) -> os.stat_result:
            if os.fspath(path) == os.fspath(hidden):
                raise OSError(code, os.strerror(code))
            return real(path, **options)

        return lstat

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", hiding(target))
        assert isinstance(solo(path=target, step=2), RankFailedError)
    assert step_of(target) == 1
    aside = target.rename(tmp_path / replaced_name("step", NONCE))
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", hiding(aside / "manifest.json"))
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            heal_target(target)
    assert heal_target(target)
    assert step_of(target) == 1


def test_an_old_checkpoint_is_kept_until_there_is_a_new_one(tmp_path: Path) -> None:
    aside = write_checkpoint(tmp_path / "whole", [[]]).rename(tmp_path / replaced_name("step", NONCE))
    (tmp_path / "step").mkdir()
    assert isinstance(solo(path=tmp_path / "step", build_manifest=lambda records: 1 // 0), RankFailedError)
    assert (aside / "manifest.json").exists()


def test_a_half_removed_checkpoint_can_never_get_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Killed

    solo(path=tmp_path / "step", step=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        assert isinstance(solo(path=tmp_path / "step", step=2, overwrite=True), Killed)
    (aside,) = (path for path in tmp_path.iterdir() if path.name != "step")
    assert names(aside) == ["0_0.safetensors"]


def test_everything_is_on_the_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split("-")[0])
        fsync(descriptor)

    def note_rename(source: str, target: str) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    parent = tmp_path / "parent"
    solo(path=parent / "step", before_manifest=lambda staging, records: (staging / PADDLE_METADATA_NAME).write_bytes(b"x"))
    made, written, files, staging, *rest = events[0], events[1], events[2:4], events[4], *events[5:]
    assert (made, written, staging, rest) == (tmp_path.name, "0_0.safetensors", ".step.staging", ["rename", "parent"])
    assert sorted(files) == ["0.metadata", "manifest.json"]
    (parent / "step").rename(parent / replaced_name("step", NONCE))
    events.clear()
    assert heal_target(parent / "step")
    assert events == ["rename", "parent"]
