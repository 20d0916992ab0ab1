"""What runs on the ranks to save steps that are then damaged, and to restore what is intact of them."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import paddle
from harness import logged, this_rank
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager

WIDE = (512, 1100)
LONG = 400_000
"""A weight, and an array, of several chunks, so that damage of one thing can be damage of nothing else."""

AVERAGES = ("long", "longer")
EXTRA = {"epoch": 3}
METRICS = {f"metric {number:06}": float(number) for number in range(100_000)}


class Two(nn.Layer):
    def __init__(self, names: tuple[str, str] = ("first", "second")) -> None:
        super().__init__()
        for name in names:
            self.add_sublayer(name, nn.Linear(*WIDE, bias_attr=False))


def build(seed: float, names: tuple[str, str] = ("first", "second"), dtype: str = "float32") -> tuple[Two, Any, Any]:
    model = Two(names)
    for number, parameter in enumerate(model.parameters()):
        parameter.set_value(np.arange(parameter.size, dtype="float32").reshape(WIDE) * 1e-3 + number + seed)
    if dtype != "float32":
        model.to(dtype=dtype)
    schedule = paddle.optimizer.lr.StepDecay(0.5, step_size=2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters(), multi_precision=dtype != "float32")
    ckpt.fully_shard(model, optimizer=optimizer, unit_layers=[Two])  # so that of 2 ranks each keeps one weight
    ckpt.init_optimizer_state(optimizer)
    return model, optimizer, schedule


def averages(fill: float, keys: tuple[str, ...]) -> dict[str, ShardedWeight]:
    """Tensors of the user's own, of which each rank holds a part."""
    place = this_rank()
    part = 2 * LONG // place.world_size
    return {key: ShardedWeight("x", paddle.full([part], fill + len(key)), (part,), (2 * LONG,), (place.rank * part,)) for key in keys}


def random_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(paddle.rand([1]).item())


def seed(number: int) -> None:
    """Python's and numpy's generators alike on all ranks, and Paddle's not."""
    random.seed(number)
    np.random.seed(number)
    paddle.seed(10 * number + this_rank().rank)


def save(root: str, *, big_extra: bool, trains: bool = True) -> tuple[dict[str, np.ndarray], tuple[float, float, float]]:
    model, optimizer, schedule = build(0.0)
    other = paddle.optimizer.lr.StepDecay(0.1, step_size=5)
    other.step()
    if trains:
        schedule.step()
    seed(5)
    extra = {**EXTRA, "order": np.arange(LONG)} if big_extra else EXTRA
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(
            10,
            model=model,
            optimizer=optimizer,
            lr_scheduler={"own": schedule, "other": other},
            extra_state=extra,
            rank_state={"rank": this_rank().rank, "order": np.arange(LONG)},
            metrics=METRICS,
            sharded=averages(1.0, AVERAGES),
        )
    return values_of(model), random_numbers()


def values_of(model: nn.Layer) -> dict[str, np.ndarray]:
    return {key: tensor.astype("float32").numpy() for key, tensor in ckpt.full_state_dict(model, to_rank=None).items()}


def restore(
    root: str, *, names: tuple[str, str] = ("first", "second"), dtype: str = "float32", sharded: tuple[str, ...] = (), **options: Any
) -> dict[str, Any]:
    """Restore, and tell what came back, what was said of it and what was logged."""
    model, optimizer, schedule = build(100.0, names, dtype)
    other = paddle.optimizer.lr.StepDecay(0.1, step_size=5)
    seed(7)
    tensors = averages(50.0, sharded)
    with CheckpointManager(root) as checkpoints, logged(logging.WARNING) as said:
        step = checkpoints.restore(
            model=model,
            optimizer=optimizer,
            lr_scheduler={"own": schedule, "other": other},
            sharded=tensors or None,
            salvage=True,
            **{"allow_missing": ["*"], **options},
        )
        report = checkpoints.restored
    assert report is not None
    extra = report.extra_state
    return {
        "step": step,
        "values": values_of(model),
        "extra": None if extra is None else extra["epoch"],
        "ranks": {rank: value["rank"] for rank, value in report.rank_states.items()},
        "metrics": len(report.metrics),
        "epochs": (schedule.last_epoch, other.last_epoch),
        "random": random_numbers(),
        "lost": report.lost,
        "exact": report.is_exact,
        "damaged": sorted(report.load.damaged),
        "text": str(report),
        "logged": [*said],
        "sharded": {key: float(one.local_tensor[0].item()) for key, one in tensors.items()},
    }


def restore_badly(root: str, *, sharded: tuple[str, ...] = (), **options: Any) -> tuple[str, str, bool]:
    model, optimizer, _ = build(100.0)
    before = values_of(model)
    try:
        with CheckpointManager(root) as checkpoints:
            checkpoints.restore(model=model, optimizer=optimizer, sharded=averages(50.0, sharded) or None, **options)
    except ckpt.CheckpointError as error:
        after = values_of(model)
        return type(error).__name__, str(error), all(np.array_equal(after[key], value) for key, value in before.items())
    raise AssertionError("it did not raise")


def load(path: str, *, names: tuple[str, str] = ("first", "second"), **options: Any) -> tuple[dict[str, np.ndarray], Any]:
    model, optimizer, _ = build(100.0, names)
    report = ckpt.load(path, model=model, optimizer=optimizer, **options)
    return values_of(model), report
