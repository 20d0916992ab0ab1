"""What a manager is given wrongly on the ranks, how it is closed, and its steps for plain save and load."""

from __future__ import annotations

import os
import runpy
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from harness import this_rank
from manager_runs import build, weights
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from trainer_state_cases import average_of, everything

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager


def plain_load(path: str) -> tuple[Any, list[str], list[str], bool]:
    model, optimizer = build(seed=6)
    report = ckpt.load(path, model=model, optimizer=optimizer)
    return report.extra_state, report.unexpected, report.not_restored, report.is_exact


def save_with_extra(root: str) -> None:
    model, optimizer = build()
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer, extra_state={"epoch": 2}, sharded=average_of(model, 1.0))


def save_plainly(root: str) -> None:
    model, optimizer = build()
    ckpt.save(f"{root}/step_00000003", model=model, optimizer=optimizer, step=3, extra_state={"epoch": 2})


def restore_plain(root: str) -> tuple[int | None, Any, dict[int, Any], list[str]]:
    model, optimizer = build(seed=6)
    with CheckpointManager(root) as checkpoints:
        step = checkpoints.restore(model=model, optimizer=optimizer)
        report = checkpoints.restored
    assert report is not None
    return step, report.extra_state, report.rank_states, report.differences


def restore_other(root: str, which: str) -> None:
    """Give a restore what was not saved."""
    model, optimizer = build(seed=6)
    schedule, scaler = everything()
    average = average_of(model, 5.0)
    more = {f"more.{key}": weight for key, weight in average.items()}
    options: dict[str, Any] = {
        "lr_scheduler": {"lr_scheduler": schedule},
        "grad_scaler": {"grad_scaler": scaler},
        "two schedules": {"lr_scheduler": [schedule, schedule]},
        "sharded": {"sharded": average | more},
        "an average": {"sharded": {"ema.up.bias": average["up.bias"]} if "up.bias" in average else {}, "allow_missing": ["ema.*"]},
        "other shape": {"sharded": average | {"up.bias": ShardedWeight("x", paddle.ones([3]), (3,), (3,), (0,))}},
        "less sharded": {"sharded": {"up.bias": average["up.bias"]} if "up.bias" in average else {}},
    }
    before = weights(model)
    checkpoints = CheckpointManager(root)
    try:
        checkpoints.restore(model=model, optimizer=optimizer, **options[which])
    finally:
        checkpoints.close()
        if any(not np.array_equal(before[key], value) for key, value in weights(model).items()):
            raise AssertionError("it changed something")


def save_other(root: str, which: str) -> None:
    """Give a save what can't be saved, or what differs between ranks."""
    model, optimizer = build()
    rank = this_rank().rank
    options: dict[str, Any] = {
        "extra_state": {"extra_state": {"epoch": 1, "data": {"rank": rank, "seed": 1}}},
        "long": {"extra_state": {"order": [*range(100), rank]}},
        "left out": {"extra_state": {"epoch": 1} if rank else {"epoch": 1, "only": "first"}},
        "other order": {"extra_state": {"b": 1, "a": 2} if rank else {"a": 2, "b": 1}},
        "loss": {"metrics": {"accuracy": 0.5, "loss": np.float64(0.1 * (1 + rank))}},
        "schedule": {"lr_scheduler": paddle.optimizer.lr.StepDecay(0.5, step_size=3 + rank)},
        "long keys": {"extra_state": {"k" * 70 + "1": rank, "k" * 70 + "2": 0}},
        "one rank's dict": {"extra_state": {"of": {"epoch": 1} if rank else None}},
        "list of metrics": {"metrics": [0.5]},
        "large metric": {"metrics": {"loss": 10**400}},
        "complex metric": {"metrics": {"loss": np.complex64(1)}},
        "metric as a text": {"metrics": {"loss": "0.3"}},
        "step": {"step": 1 + rank},
        "time as a step": {"step": 1_700_000_000_000_000_000},
        "tuple": {"rank_state": (1, 2)},
        "metrics": {"metrics": {"loss": "low"}},
        "lr_scheduler": {"lr_scheduler": 0.1},
        "grad_scaler": {"grad_scaler": 64.0},
        "sharded": {"sharded": {"x": paddle.ones([3])}},
    }
    checkpoints = CheckpointManager(root)
    try:
        checkpoints.save(**({"step": 1} | options[which]), model=model, optimizer=optimizer)
    finally:
        checkpoints.close()


def open_with(root: str, options: dict[str, Any]) -> None:
    CheckpointManager(root, **options).close()


def open_differently(root: str) -> None:
    CheckpointManager(f"{root}{this_rank().rank}").close()


def use_after_close(root: str) -> list[str]:
    model, _ = build()
    checkpoints = CheckpointManager(root)
    checkpoints.close()
    checkpoints.close()
    texts = []
    for use in (lambda: checkpoints.save(1, model=model), lambda: checkpoints.restore(model=model)):
        try:
            use()
        except ckpt.CheckpointError as error:
            texts.append(str(error))
    return texts


def leave_by_an_error(root: str) -> list[int]:
    """Leave the block by an error on every rank at once: nobody waits for another, and what was begun is finished."""
    model, optimizer = build()
    try:
        with CheckpointManager(root, async_save=True, stop_signals=[signal.SIGTERM]) as checkpoints:
            checkpoints.save(1, model=model, optimizer=optimizer)
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return checkpoints.all_steps()


def stop_signals_while_closing(root: str, by_error: bool) -> list[int]:
    """Get another SIGTERM while the last save is being written, as from Paddle's launcher, which sends it three times in 0.6 seconds."""
    model, optimizer = build()
    checkpoints = CheckpointManager(root, async_save=True, stop_signals=[signal.SIGTERM])
    waits = checkpoints.wait

    def wait() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        waits()
        os.kill(os.getpid(), signal.SIGTERM)

    checkpoints.wait = wait  # type: ignore[method-assign]
    with suppress(ZeroDivisionError), checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        if by_error:
            raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return checkpoints.all_steps()


def soak(root: str, saves: int) -> dict[str, int]:
    """The short form of ``ci/soak.py``."""
    path = Path(__file__).resolve().parents[2] / "ci" / "soak.py"
    return runpy.run_path(str(path))["soak"](root, saves)
