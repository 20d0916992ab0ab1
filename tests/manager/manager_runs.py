"""What runs on the ranks to train under a manager, stop, and go on; for the cases of all subjects."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from harness import hybrid_groups, this_rank
from paddle import nn
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager

GLOBAL_BATCH = 12


class Model(nn.Layer):
    """Small, with dropout, so that a resumed run must draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.2))


def call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function with arguments by name too."""
    return function(*arguments, **options)


def build(seed: int = 1, shards: int = 0) -> tuple[Model, Any]:
    """Make and shard a model; with ``shards``, replicas of so many ranks train it."""
    paddle.seed(seed)
    model = Model()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer, **(hybrid_groups(shards) if shards else {}))
    paddle.seed(1000 * seed + this_rank().rank)
    random.seed(seed)
    np.random.seed(seed)
    return model, optimizer


def train_step(model: Model, optimizer: Any) -> float:
    """One step on data drawn from numpy's global generator, which is alike on all ranks."""
    place = this_rank()
    rows = GLOBAL_BATCH // place.world_size
    x = paddle.to_tensor(np.random.randn(GLOBAL_BATCH, 4).astype("float32")[place.rank * rows :][:rows])
    loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    value = loss.detach().clone()
    if place.world_size > 1:
        dist.all_reduce(value)
    return value.item() / place.world_size + random.random()


def weights(model: Model) -> dict[str, np.ndarray]:
    return {key: weight.local_tensor.numpy().copy() for key, weight in ckpt.sharded_state_dict(model).items()}


def run(root: str, first: int, last: int, every: int = 1, shards: int = 0, **options: Any) -> tuple[list[float], list[int]]:
    """Train the steps first to last from what was restored, saving; return losses and what the root holds."""
    model, optimizer = build(first + 1, shards)
    losses = []
    with CheckpointManager(root, **options) as checkpoints:
        start = checkpoints.restore(model=model, optimizer=optimizer) or 0
        assert start == first
        for step in range(start, last):
            losses.append(train_step(model, optimizer))
            if (step + 1) % every == 0:
                checkpoints.save(step + 1, model=model, optimizer=optimizer, metrics={"loss": losses[-1]})
        checkpoints.wait()
        steps = checkpoints.all_steps()
    return losses, steps


def restore_only(root: str, options: dict[str, Any] | None = None, **arguments: Any) -> tuple[int | None, Any]:
    model, optimizer = build(seed=77)
    with CheckpointManager(root, **(options or {})) as checkpoints:
        step = checkpoints.restore(model=model, optimizer=optimizer, **arguments)
        report = checkpoints.restored
        return step, None if report is None else (report.skipped, report.fell_back_from, str(report))


def refuse(root: str, call: str, options: dict[str, Any] | None = None, **arguments: Any) -> tuple[str, str, bool]:
    """Call something that must raise: its kind, its text, and whether model and optimizer are as they were."""
    model, optimizer = build(seed=77)
    before = weights(model)
    checkpoints = CheckpointManager(root, **(options or {}))
    try:
        getattr(checkpoints, call)(model=model, optimizer=optimizer, **arguments)
    except ckpt.CheckpointError as error:
        same = all(np.array_equal(before[key], value) for key, value in weights(model).items())
        return type(error).__name__, str(error), same
    finally:
        checkpoints.close()
    raise AssertionError("it did not raise")
