"""What runs on the ranks of two runs that would write to one root."""

from __future__ import annotations

import os

import pytest
from manager_runs import build

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager

_kept: list[CheckpointManager] = []


def begin_to_write(root: str, step: int) -> tuple[int, str]:
    """Save a step, and keep the manager; return this process's number, and what a second manager in it is told."""
    model, optimizer = build()
    _kept.append(CheckpointManager(root, max_to_keep=2))
    _kept[0].save(step, model=model, optimizer=optimizer)
    with pytest.raises(ckpt.CheckpointError) as raised:
        CheckpointManager(root, max_to_keep=2)
    return os.getpid(), str(raised.value)


def write_and_end(step: int) -> None:
    """Save one more step with the manager that was kept, and close it."""
    model, optimizer = build()
    with _kept.pop() as checkpoints:
        checkpoints.save(step, model=model, optimizer=optimizer)


def write_beside(root: str) -> tuple[int | None, str, str]:
    """Restore from a root to which another process writes, and be told that it can't be saved to: at the save, or at once."""
    model, optimizer = build()
    with CheckpointManager(root, timeout_seconds=1.0) as checkpoints:
        step = checkpoints.restore(model=model, optimizer=optimizer)
        with pytest.raises(ckpt.CheckpointError) as at_save:
            checkpoints.save(10, model=model, optimizer=optimizer)
    with pytest.raises(ckpt.CheckpointError) as at_once:
        CheckpointManager(root, save_every_steps=5, timeout_seconds=1.0)
    return step, str(at_save.value), str(at_once.value)


def look(root: str) -> int | None:
    """Make a manager, and keep it."""
    _kept.append(CheckpointManager(root))
    return _kept[0].latest_step()


def save_after_a_look(step: int) -> str:
    """Save with the manager that was kept, which another run has overtaken; return what is said the second time too."""
    model, optimizer = build()
    with _kept.pop() as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer)
        for _ in range(2):
            with pytest.raises(ckpt.CheckpointError) as raised:
                checkpoints.save(step, model=model, optimizer=optimizer)
    return str(raised.value)


def restore_and_keep(root: str) -> None:
    """Restore with a manager that takes no lock of the root before its first save, and keep it."""
    model, optimizer = build()
    _kept.append(CheckpointManager(root))
    _kept[0].restore(model=model, optimizer=optimizer)


def refuse_with_the_kept(step: int) -> str:
    """Save with the manager that was kept, which must be refused, and close it; return what is said."""
    model, optimizer = build()
    with _kept.pop() as checkpoints, pytest.raises(ckpt.CheckpointError) as raised:
        checkpoints.save(step, model=model, optimizer=optimizer)
    return str(raised.value)
