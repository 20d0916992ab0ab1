"""What runs on the ranks to save steps that are then damaged, and to restore what is intact of them."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import pytest
from harness import logged, this_rank
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager

WIDE = (512, 1100)
LONG = 400_000
"""A weight, and an array, of several chunks, so that damage of one thing can be damage of nothing else."""

NAMES = ("first", "second")
AVERAGES = ("long", "longer")
EXTRA = {"epoch": 3}
METRICS = {f"metric {number:06}": float(number) for number in range(100_000)}


class Two(nn.Layer):
    def __init__(self, names: tuple[str, str] = NAMES) -> None:
        super().__init__()
        for name in names:
            self.add_sublayer(name, nn.Linear(*WIDE, bias_attr=False))


def build(seed: float, names: tuple[str, str] = NAMES) -> tuple[Two, Any, Any]:
    model = Two(names)
    for number, parameter in enumerate(model.parameters()):
        parameter.set_value(np.arange(parameter.size, dtype="float32").reshape(WIDE) * 1e-3 + number + seed)
    schedule = paddle.optimizer.lr.StepDecay(0.5, step_size=2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters())
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


def save(root: str, big_extra: bool) -> tuple[dict[str, np.ndarray], tuple[float, float, float]]:
    model, optimizer, schedule = build(0.0)
    other = paddle.optimizer.lr.StepDecay(0.1, step_size=5)
    other.step()
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
    return {key: tensor.numpy() for key, tensor in ckpt.full_state_dict(model, to_rank=None).items()}


@dataclass(frozen=True)
class Restored:
    """What came back on a rank, and what was said of it.

    Attributes:
        report: of the restore.
        values: the whole weights.
        epochs: of the schedule of the optimizer, and of another one.
        random: the numbers that were drawn next, as :func:`save` returns them.
        sharded: the values of each tensor of the user's own, which are alike.
        said: the warnings that were logged.
    """

    report: Any
    values: dict[str, np.ndarray]
    epochs: tuple[int, int]
    random: tuple[float, float, float]
    sharded: dict[str, float]
    said: list[str]


def restore(root: str, *, sharded: tuple[str, ...] = (), names: tuple[str, str] = NAMES, **options: Any) -> Restored:
    model, optimizer, schedule = build(100.0, names)
    other = paddle.optimizer.lr.StepDecay(0.1, step_size=5)
    seed(7)
    tensors = averages(50.0, sharded)
    with CheckpointManager(root) as checkpoints, logged(logging.WARNING) as said:
        assert (
            checkpoints.restore(
                model=model,
                optimizer=optimizer,
                lr_scheduler={"own": schedule, "other": other},
                sharded=tensors or None,
                salvage=True,
                **options,
            )
            == 10
        )
    found = {key: float(one.local_tensor.unique().item()) for key, one in tensors.items()}
    return Restored(checkpoints.restored, values_of(model), (schedule.last_epoch, other.last_epoch), random_numbers(), found, [*said])


def restore_badly(root: str, *, sharded: tuple[str, ...] = (), **options: Any) -> tuple[str, str, bool]:
    """Restore what can't be restored: the error's kind and text, and whether the weights are as they were."""
    model, optimizer, _ = build(100.0)
    before = values_of(model)
    with CheckpointManager(root) as checkpoints, pytest.raises(ckpt.CheckpointError) as caught:
        checkpoints.restore(model=model, optimizer=optimizer, sharded=averages(50.0, sharded) or None, **options)
    after = values_of(model)
    return type(caught.value).__name__, str(caught.value), all(np.array_equal(after[key], value) for key, value in before.items())


def load(path: str, names: tuple[str, str] = NAMES, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    model, optimizer, _ = build(100.0, names)
    report = ckpt.load(path, model=model, optimizer=optimizer, **options)
    return report, values_of(model)
