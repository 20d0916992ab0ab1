"""What a manager refuses, on all ranks alike, and what its steps are to ``save`` and ``load``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import manager_argument_cases
import pytest
from harness import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("which", "text"),
    [
        (
            "extra_state",
            "extra_state must be the same on all ranks, and extra_state['data']['rank'] is 0 on rank 0 and 1 on rank 1; nothing",
        ),
        ("extra_state", "Give all ranks the same; what is a rank's own goes into rank_state="),
        ("long", "extra_state['order'] differs between rank 0 and rank 1, where it is written alike: [0, 1, 2, 3, 4, 5"),
        ("left out", "extra_state['only'] is 'first' on rank 0 and missing on rank 1"),
        ("other order", "the same keys came in another order on other ranks"),
        (
            "loss",
            "metrics must be the same on all ranks, and metrics['loss'] is 0.1 on rank 0 and 0.2 on rank 1; nothing was written. Give",
        ),
        ("schedule", "lr_scheduler['0']['settings']['step_size'] is 3 on rank 0 and 4 on rank 1"),
        ("long keys", f"extra_state['{'k' * 70}1'] is 0 on rank 0 and 1 on rank 1"),
        ("one rank's dict", "extra_state['of'] is None on rank 0 and {'epoch': 1} on rank 1"),
        ("list of metrics", "metrics is [0.5]; give a dict of numbers by name"),
        ("large metric", "metrics['loss'] is 1000"),
        ("complex metric", "metrics['loss'] is np.complex64(1+0j), not a number"),
        ("step", "step must be the same on all ranks, and differ: rank 0 1 and rank 1 2"),
        ("time as a step", "step is 1700000000000000000, and a root holds steps up to 999999999999999999; give the number of steps"),
        ("tuple", "rank_state is of type tuple"),
        ("metrics", "metrics['loss'] is 'low', not a number"),
        ("metric as a text", "metrics['loss'] is '0.3', not a number"),
        ("lr_scheduler", "lr_scheduler: float is not one of paddle.optimizer.lr"),
        ("grad_scaler", "float is not a paddle.amp.GradScaler"),
        ("sharded", "sharded: give a dict of ShardedWeight"),
    ],
)
def test_what_can_not_be_saved(which: str, text: str, tmp_path: Path, ranks: Ranks) -> None:
    for error in ranks(2).errors(manager_argument_cases.save_other, str(tmp_path / "root"), which):
        assert text in error.message
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("lr_scheduler", "was saved without the lr_scheduler given"),
        ("two schedules", "was saved without the 2 lr_schedulers given"),
        ("grad_scaler", "was saved without the grad_scaler given"),
        ("sharded", "step_00000001 holds no value 'more.down.bias', 'more.down.weight', 'more.up.bias', 'more.up.weight' of sharded=;"),
        ("sharded", "Restore with those alone that it holds (down.bias, down.weight, up.bias, up.weight), and start what it lacks afresh"),
        ("less sharded", "sharded: step_00000001 has besides down.bias, down.weight, up.weight"),
        ("other shape", "holds these otherwise than they were given; nothing was changed: 'up.bias': checkpoint has shape"),
    ],
)
def test_what_can_not_be_restored(which: str, text: str, tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(manager_argument_cases.save_with_extra, str(tmp_path / "root"))
    for error in ranks(2).errors(manager_argument_cases.restore_other, str(tmp_path / "root"), which):
        assert text in error.message
        assert "is damaged" not in error.message and "@paddle" not in error.message and "allow_" not in error.message


def test_tensors_that_an_older_step_lacks(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(manager_argument_cases.save_plainly, str(tmp_path / "root"))
    for error in ranks(2).errors(manager_argument_cases.restore_other, str(tmp_path / "root"), "an average"):
        assert error.message.endswith(
            "step_00000003 holds no value 'ema.up.bias' of sharded=; nothing was changed. Restore without sharded=, and start what it "
            "lacks afresh (from the weights, for an average)"
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_to_keep": 0}, "max_to_keep is 0, not a whole number from 1 on; None keeps all steps"),
        ({"max_to_keep": "3"}, "max_to_keep is '3', not a whole number from 1 on"),
        ({"keep": 3}, "keep: give a list of policies"),
        ({"save_every_steps": 0}, "save_every_steps is 0, and must be at least 1"),
        ({"save_every_minutes": 0}, "save_every_minutes is 0, not a number above 0"),
        ({"when_busy": "skip"}, "when_busy is 'skip', and must be 'wait' or 'refuse'"),
        ({"stop_signals": [9]}, "signal 9 can't be listened to"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], text: str, tmp_path: Path, ranks: Ranks) -> None:
    for error in ranks(2).errors(manager_argument_cases.open_with, str(tmp_path / "root"), options):
        assert text in error.message


def test_other_roots_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    for error in ranks(2).errors(manager_argument_cases.open_differently, str(tmp_path / "root")):
        assert "root must be the same on all ranks" in error.message


def test_a_root_that_is_a_file_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "root").write_text("x")
    for error in ranks(2).errors(manager_argument_cases.open_with, str(tmp_path / "root"), {}):
        assert "is no directory" in error.message


def test_a_root_that_is_a_checkpoint_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    for error in ranks(2).errors(manager_argument_cases.open_with, str(tmp_path), {}):
        assert "which is a checkpoint itself" in error.message


def test_a_closed_manager_does_nothing(tmp_path: Path, ranks: Ranks) -> None:
    assert (
        ranks(2).run(manager_argument_cases.use_after_close, str(tmp_path / "root"))
        == [["the CheckpointManager was closed; make a new one"] * 2] * 2
    )


def test_an_error_in_the_block_comes_through(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(manager_argument_cases.leave_by_an_error, str(tmp_path / "root")) == [[1], [1]]


@pytest.mark.parametrize("by_error", [False, True])
def test_a_stop_signal_that_comes_again_does_not_kill_the_last_save(by_error: bool, tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(manager_argument_cases.stop_signals_while_closing, str(tmp_path / "root"), by_error) == [[1], [1]]


def test_load_reads_a_managers_step(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(manager_argument_cases.save_with_extra, str(tmp_path / "root"))
    for world_size in (2, 1):
        results = ranks(world_size).run(manager_argument_cases.plain_load, str(tmp_path / "root" / "step_00000001"))
        assert results == [({"epoch": 2}, [], ["sharded: give CheckpointManager.restore(sharded=...)"], False)] * world_size


def test_a_manager_restores_what_save_saved(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(manager_argument_cases.save_plainly, str(tmp_path / "root"))
    assert (
        ranks(2).run(manager_argument_cases.restore_plain, str(tmp_path / "root"))
        == [(3, {"epoch": 2}, {}, ["no random number states were saved"])] * 2
    )


def test_short_soak(tmp_path: Path, ranks: Ranks) -> None:
    for found in ranks(2).run(manager_argument_cases.soak, str(tmp_path / "root"), 40):
        assert (found["files"], found["empty_looks"], found["steps"]) == (0, 0, 7)
        assert found["memory"] < 16 << 20
