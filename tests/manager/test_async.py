"""Promise 10: a save in the background holds the bytes at the call, and its failures are heard."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import async_cases
import pytest
from harness import RankPool

import paddle_fsdp_ckpt
from paddle_fsdp_ckpt.manager.background import Worker

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bytes_are_those_at_the_call(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(world_size).run(async_cases.save_async_and_change, str(tmp_path / "root"), str(tmp_path / "plain"))
    assert results == [(True, [10.0])] * world_size
    equal = ranks(world_size).run(async_cases.same_values, str(tmp_path / "plain"), str(tmp_path / "root" / "step_00000010"))
    assert equal == [True] * world_size


def test_nothing_is_allocated_after_the_first_save(tmp_path: Path, ranks: Ranks) -> None:
    own_nbytes = 3 * 4 * 2048 * 1024 // 2
    for *grown, is_right in ranks(2).run(async_cases.copy_again, str(tmp_path / "root")):
        assert all(nbytes < own_nbytes / 6 for nbytes in grown), grown
        assert is_right


@pytest.mark.parametrize("when_busy", ["wait", "refuse"])
def test_one_save_at_a_time(when_busy: str, tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(2).run(async_cases.save_often, str(tmp_path / "root"), when_busy, 8)
    assert results[0][:2] == results[1][:2]
    steps, refused, _ = results[0]
    if when_busy == "wait":
        assert (steps, refused) == ([7, 8], 0)
    assert 1 <= len(steps) <= 2
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["history.jsonl"] + [f"step_{step:08d}" for step in steps]


@pytest.mark.parametrize("call", ["wait", "restore", "close"])
def test_a_failure_comes_at_the_next_call_and_once(call: str, tmp_path: Path, ranks: Ranks) -> None:
    for text, steps in ranks(2).run(async_cases.fail_in_background, str(tmp_path / "root"), call):
        assert "step_00000001' is there and is no directory" in text
        assert steps == []


def test_a_second_save_is_refused_while_one_is_held_up(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(async_cases.save_while_held_up, str(tmp_path / "root")) == [("CheckpointError", [1])] * 2


@pytest.mark.parametrize(("what", "why"), [("copy", "MemoryError: Unable to allocate"), ("write", "No space left on device")])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_is_heard_by_all_at_the_next_call(failing: int, what: str, why: str, tmp_path: Path, ranks: Ranks) -> None:
    for text, steps, later, seconds in ranks(2).run(async_cases.fail_once_in_background, str(tmp_path / "root"), failing, what):
        assert text.startswith("the save of step 2 in the background failed: ")
        assert f"rank {failing} failed" in text
        assert why in text
        assert (steps, later) == ([1], [1, 3])
        assert seconds < 30, "nobody waits for a time-out"
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["history.jsonl", "step_00000001", "step_00000003"]


def test_a_save_is_written_where_there_can_be_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    worker = Worker()
    worker.start(lambda: done.append(1), "a job")
    assert done == [1]
    assert not worker.is_busy
    worker.wait()


def test_a_rank_killed_while_it_writes_is_named_in_time(tmp_path: Path, fresh_ranks: Ranks) -> None:
    first, second = fresh_ranks(2).outcomes(async_cases.die_in_background, str(tmp_path / "root"), 1, may_die=[1])
    assert second.exit_code is not None
    kind, text, seconds = first.value
    assert (kind, "rank 1 failed: no answer within 1 s" in text, seconds < 20) == ("RankFailedError", True, True)
    assert not list((tmp_path / "root").iterdir())


SCRIPT = """
import paddle
from paddle_fsdp_ckpt import CheckpointManager, fully_shard
model = paddle.nn.Linear(300, 300)
fully_shard(model, optimizer=None)
checkpoints = CheckpointManager("root", async_save=True)
checkpoints.save(1, model=model)
if {fail}:
    from paddle_fsdp_ckpt.manager import save_job
    def fail(*_, **__):
        raise OSError(28, "no room")
    checkpoints.wait()
    save_job.commit_save = fail
    checkpoints.save(2, model=model)
"""


@pytest.mark.parametrize("fail", [False, True])
def test_a_process_that_ends_waits_and_says_what_failed(fail: bool, tmp_path: Path) -> None:
    package = Path(paddle_fsdp_ckpt.__file__).parents[1]
    command = [sys.executable, "-c", SCRIPT.format(fail=fail)]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(package)}, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "root" / "step_00000001" / "manifest.json").exists()
    assert ("the save of step 2 in the background failed, and nobody asked any more: [Errno 28] no room" in run.stderr) == fail
