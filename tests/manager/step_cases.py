"""Steps on the ranks: which one a run goes on from, which ones stay, and what is said of damaged ones."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle.distributed as dist
import pytest
from harness import logged, this_rank
from manager_runs import build, refuse

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager
from paddle_fsdp_ckpt.manager.steps import read_root
from paddle_fsdp_ckpt.storage import system_errors
from paddle_fsdp_ckpt.storage.read_lock import reading, removing


def save_in_used_root(root: str, *, resume: bool, step: int, **options: Any) -> list[int]:
    model, optimizer = build(seed=5)
    with CheckpointManager(root, **options) as checkpoints:
        if resume:
            checkpoints.restore(model=model, optimizer=optimizer)
        checkpoints.save(step, model=model, optimizer=optimizer)
        return checkpoints.all_steps()


class _Fails:
    """A policy with a mistake, which shows where there are two steps."""

    def kept(self, steps: Any) -> list[int]:
        return [one.step for one in steps if one.step // (2 - len(steps)) > 0]


def save_with_a_policy_that_fails(root: str) -> tuple[list[list[int]], list[str]]:
    model, optimizer = build()
    kept = []
    with logged(logging.ERROR) as lines, CheckpointManager(root, keep=[_Fails()], max_to_keep=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, model=model, optimizer=optimizer)
            kept.append(checkpoints.all_steps())
        return kept, lines


def go_back(root: str, step: int, later: int, *, discard_later: bool) -> tuple[list[int], list[int]]:
    model, optimizer = build(seed=5)
    with CheckpointManager(root) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer, step=step, discard_later=discard_later)
        before = checkpoints.all_steps()
        checkpoints.save(later, model=model, optimizer=optimizer)
        return before, checkpoints.all_steps()


def warned_of_going_back(root: str) -> list[list[str]]:
    """Restore an earlier step, the same where later ones may go, and the newest; return what each warns of."""
    model, optimizer = build(seed=5)
    told = []
    for options in ({"step": 1}, {"step": 1, "discard_later": True}, {}):
        with CheckpointManager(root) as checkpoints, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoints.restore(model=model, optimizer=optimizer, **options)
        told.append([str(one.message) for one in caught if "discard_later" in str(one.message)])
    return told


def give_up_what_is_read(root: str, *, anew: bool) -> tuple[list[int], int | None, list[int], list[int]]:
    """Give up step 3, which is read at the next save, so that it stays, and go on in a new manager; return the steps each time."""
    model, optimizer = build(seed=5)
    with CheckpointManager(root, overwrite=anew) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer, **({} if anew else {"step": 1, "discard_later": True}))
        with reading(Path(root) / "step_00000003"):
            dist.barrier()
            checkpoints.save(2, model=model, optimizer=optimizer)
            dist.barrier()
    on_disk = read_root(Path(root)).numbers
    with CheckpointManager(root) as checkpoints:
        step, own = checkpoints.restore(model=model, optimizer=optimizer), checkpoints.all_steps()
        checkpoints.save(3, model=model, optimizer=optimizer)
        dist.barrier()
    with CheckpointManager(root) as checkpoints:
        return on_disk, step, own, checkpoints.all_steps()


def fall_back_and_go_on(root: str, later: int) -> tuple[int | None, list[int]]:
    model, optimizer = build(seed=5)
    with CheckpointManager(root) as checkpoints:
        step = checkpoints.restore(model=model, optimizer=optimizer, fall_back=True)
        checkpoints.save(later, model=model, optimizer=optimizer)
        return step, checkpoints.all_steps()


def restore_and_save(root: str, later: int, **options: Any) -> tuple[int | None, list[int], list[str]]:
    """Restore, and save a later step; return what was restored, what is there then, and what was warned of."""
    model, optimizer = build(seed=5)
    with logged(logging.WARNING) as lines, CheckpointManager(root, **options) as checkpoints:
        step = checkpoints.restore(model=model, optimizer=optimizer)
        checkpoints.save(later, model=model, optimizer=optimizer)
        checkpoints.wait()
        return step, checkpoints.all_steps(), lines


@contextmanager
def bad_disk(code: int, times: int | None = None) -> Iterator[None]:
    """Let the system give rank 1 an error for the values of step 3: always, or some times in a row."""
    read, failed = os.preadv, 0

    def fail(descriptor: int, *rest: Any) -> int:
        nonlocal failed
        if this_rank().rank == 1 and "step_00000003" in os.readlink(f"/proc/self/fd/{descriptor}") and failed != times:
            failed += 1
            raise OSError(code, os.strerror(code))
        return read(descriptor, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        patch.setattr(system_errors, "PAUSES_SECONDS", (0.0,) * len(system_errors.PAUSES_SECONDS))
        yield


def restore_from_a_bad_disk(root: str, code: int) -> tuple[str, str, tuple[int | None, list[int]] | None]:
    """Restore where rank 1 can't read step 3: kind and text; and with ``fall_back``, where that works."""
    with bad_disk(code):
        kind, text, same = refuse(root, "restore")
        assert same
        return kind, text, fall_back_and_go_on(root, 3) if "fall_back" in text else None


def restore_from_a_disk_that_stumbles(root: str, code: int) -> tuple[int | None, list[int]]:
    """Restore where rank 1 can't read step 3 at first, and save the next."""
    with bad_disk(code, times=2):
        return fall_back_and_go_on(root, 4)


def keep_best(root: str) -> tuple[str, list[int]]:
    """Save without the metric that decides, then with it, then where it wasn't measured."""
    model, optimizer = build()
    with CheckpointManager(root, keep=[ckpt.KeepBest("loss", mode="min")]) as checkpoints:
        try:
            checkpoints.save(1, model=model, optimizer=optimizer, metrics={"accuracy": 0.5})
        except ckpt.CheckpointError as error:
            text = str(error)
        for step, loss in enumerate([0.5, 0.25, float("nan"), float("nan")], start=2):
            checkpoints.save(step, model=model, optimizer=optimizer, metrics={"loss": loss})
        return text, checkpoints.all_steps()


def find_the_best(root: str, losses: list[float]) -> tuple[list[int | None], dict[str, float], str, list[str]]:
    """Save steps with losses, the last in the background, and say which are best; restore one; ask for none, and for what can't be read."""
    model, optimizer = build()
    found, refused = [], []
    with CheckpointManager(root, async_save=True) as checkpoints:
        found.append(checkpoints.best_step("loss", mode="min"))
        for step, loss in enumerate(losses, start=1):
            checkpoints.save(step, model=model, optimizer=optimizer, metrics={"loss": loss})
        found += [checkpoints.best_step("loss", mode=mode) for mode in ("min", "max")]
        found.append(checkpoints.restore(model=model, optimizer=optimizer, step=found[1]))
        report = checkpoints.restored
        assert report is not None
        for metric in ("accuracy", ["loss"], "loss"):
            dist.barrier()
            if metric == "loss" and this_rank().rank == 0:
                (Path(root) / "step_00000002" / "0_0.safetensors").unlink()
            dist.barrier()
            try:
                checkpoints.best_step(metric, mode="min")  # type: ignore[arg-type]
            except ckpt.CheckpointError as error:
                refused.append(str(error))
    return found, report.metrics, str(report), refused


def fail_to_remove(root: str) -> tuple[list[int], list[int]]:
    """A step that can't be removed is there after the save, and gone after the next."""
    from paddle_fsdp_ckpt.manager import save_job as module

    model, optimizer = build()
    original = module.hide_step

    def refuse_once(where: Path, step: int) -> Path:
        raise PermissionError(13, "not today", str(where))

    with CheckpointManager(root, max_to_keep=1) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        module.hide_step = refuse_once
        try:
            checkpoints.save(2, model=model, optimizer=optimizer)
        finally:
            module.hide_step = original
        kept = checkpoints.all_steps()
        checkpoints.save(3, model=model, optimizer=optimizer)
        return kept, checkpoints.all_steps()


def remove_while_read(root: str) -> tuple[list[bool], list[int], list[int]]:
    """Save with one step kept, while the first is being loaded; then again."""
    model, optimizer = build()
    free: list[bool] = []

    def look(name: str) -> str:
        with removing(Path(root) / "step_00000001") as is_free:
            free.append(is_free)
        return name

    with CheckpointManager(root, max_to_keep=1) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        ckpt.load(Path(root) / "step_00000001", model=model, optimizer=optimizer, key_map=look)
        with reading(Path(root) / "step_00000001"):
            dist.barrier()
            checkpoints.save(2, model=model, optimizer=optimizer)
            kept = checkpoints.all_steps()
        dist.barrier()
        checkpoints.save(3, model=model, optimizer=optimizer)
        return free, kept, checkpoints.all_steps()
