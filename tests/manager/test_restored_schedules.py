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
