"""A restore says what was saved beside model and optimizers and was not given to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from harness import RankPool, logged
from manager_runs import Model
from paddle.optimizer import lr

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


def _made(attached: bool) -> tuple[Model, Any, lr.LRScheduler]:
    schedule = lr.StepDecay(0.5, 1)
    model = Model()
    optimizer = paddle.optimizer.AdamW(schedule if attached else 0.01, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer, schedule


def restore(root: str, attached: bool, given: bool) -> tuple[list[bool], str, list[str], int]:
    """Save with a schedule, that of the optimizer or another; restore with it or without."""
    model, optimizer, schedule = _made(attached)
    schedule.step()
    with ckpt.CheckpointManager(root) as checkpoints:
        checkpoints.save(2, model=model, optimizer=optimizer, lr_scheduler=schedule)
    model, optimizer, schedule = _made(attached)
    with ckpt.CheckpointManager(root) as checkpoints, logged(logging.WARNING) as heard:
        checkpoints.restore(model=model, optimizer=optimizer, lr_scheduler=schedule if given else None)
    report = checkpoints.restored
    assert report is not None
    return [report.is_exact, report.load.is_exact], str(report), heard, schedule.last_epoch


def test_a_schedule_that_is_forgotten(tmp_path: Path, ranks: Ranks) -> None:
    words = "lr_scheduler, a StepDecay (at 0.05): give restore(lr_scheduler=...)"
    results = ranks(2).run(restore, str(tmp_path / "forgotten"), False, False)
    for exact, text, _, epoch in results:
        assert exact == [False, False] and epoch == 0
        assert f"1 thing saved besides, and not restored: {words}" in text and "everything in it" not in text
    assert [heard for _, _, heard, _ in results] == [[f"restored step 2 without all that was saved: {words}"], []]
    # With its optimizer a schedule comes back too.
    for attached, given in ((False, True), (True, True), (True, False)):
        for exact, text, heard, epoch in ranks(2).run(restore, str(tmp_path / f"{attached} {given}"), attached, given):
            assert exact == [True, True] and epoch == 1 and heard == []
            assert "everything in it, as it was saved" in text


def load(root: str, attached: bool) -> tuple[list[str], bool, list[str], str]:
    """Save with a schedule, that of the optimizer or another, and a scaler; load the step, and one of which those can't be read."""
    model, optimizer, schedule = _made(attached)
    schedule.step()
    scaler = paddle.amp.GradScaler()
    with ckpt.CheckpointManager(root) as checkpoints:
        checkpoints.save(2, model=model, optimizer=optimizer, lr_scheduler=schedule)
        checkpoints.save(3, model=model, optimizer=optimizer, lr_scheduler=schedule, grad_scaler=scaler)
    model, optimizer, schedule = _made(attached)
    one, other = (ckpt.load(f"{root}/step_0000000{step}", model=model, optimizer=optimizer) for step in (2, 3))
    return one.not_restored, one.is_exact, other.not_restored, str(other)


def test_a_load_says_it_too(tmp_path: Path, ranks: Ranks) -> None:
    schedule = "lr_scheduler, a StepDecay (at 0.05): give CheckpointManager.restore(lr_scheduler=...)"
    scaler = "grad_scaler: give CheckpointManager.restore(grad_scaler=...)"
    for attached, left in ((True, []), (False, [schedule])):
        for one, is_exact, other, text in ranks(2).run(load, str(tmp_path / f"{attached}"), attached):
            assert (one, is_exact, other) == (left, attached, [*left, scaler])
            assert scaler in text and "everything in it" not in text


def load_damaged(root: str) -> list[str]:
    model, optimizer, _ = _made(True)
    return ckpt.load(f"{root}/step_00000002", model=model, optimizer=optimizer, check_digests=False).not_restored


def test_what_can_not_be_read_keeps_no_load_from_the_model(tmp_path: Path, ranks: Ranks) -> None:
    root = tmp_path / "root"
    ranks(2).run(restore, str(root), True, True)
    file = root / "step_00000002" / "0_0.safetensors"
    data = file.read_bytes()
    assert data.count(b'"lr_schedulers"') == 1
    file.write_bytes(data.replace(b'"lr_schedulers"', b'"lr_schedulars"'))
    words = f"what a CheckpointManager saved besides, which can't be read: paddle-fsdp-ckpt verify '{file.parent}' says why"
    assert ranks(2).run(load_damaged, str(root)) == [[words]] * 2
