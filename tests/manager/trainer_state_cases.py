"""What a step holds beside model and optimizer, saved and given back on the ranks."""

from __future__ import annotations

import copy
import logging
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from harness import logged, this_rank
from manager_runs import Model, build, train_step
from paddle.amp import grad_scaler
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager


def average_of(model: Model, fill: float) -> dict[str, Any]:
    """A tensor for each weight, cut as it is: an average of the weights, say."""
    average = {}
    for key, weight in ckpt.sharded_state_dict(model).items():
        average[key] = copy.copy(weight)
        average[key].local_tensor = paddle.full(weight.local_tensor.shape, fill) + weight.local_tensor.detach()
    return average


EXTRA = {"epoch": 3, "nested": [1.5, None, "x"], "@array": True, "order": np.arange(5, dtype="uint32"), "big": np.float64(2.5)}


def everything() -> tuple[Any, ...]:
    """A schedule of its own, and a scaler that is enabled as it would be on a GPU."""
    schedule = paddle.optimizer.lr.StepDecay(0.5, step_size=2)
    kept = grad_scaler._dygraph_tracer
    grad_scaler._dygraph_tracer = lambda: SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    try:
        return schedule, paddle.amp.GradScaler(init_loss_scaling=64.0)
    finally:
        grad_scaler._dygraph_tracer = kept


def save_everything(root: str, *, async_save: bool, shards: int = 0) -> dict[str, np.ndarray]:
    model, optimizer = build(3, shards)
    schedule, scaler = everything()
    for _ in range(3):
        schedule.step()
    scaler._scale = paddle.to_tensor([8.0])
    average = average_of(model, 1.0)
    own = {key: weight.local_tensor.numpy().copy() for key, weight in average.items()}
    extra = copy.deepcopy(EXTRA) | {"tensor": paddle.to_tensor([1.0, 2.0]).astype("bfloat16")}
    with CheckpointManager(root, async_save=async_save) as checkpoints:
        checkpoints.save(
            10,
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            grad_scaler=scaler,
            extra_state=extra,
            rank_state={"sample": this_rank().rank * 100, "seen": np.array([this_rank().rank])},
            sharded=average,
        )
        # All of this must not be in the checkpoint.
        schedule.step()
        extra["order"][:] = 0
        for weight in average.values():
            weight.local_tensor.zero_()
    return own


def restore_everything(root: str) -> tuple[Any, ...]:
    model, optimizer = build(seed=4)
    schedule, scaler = everything()
    average = average_of(model, 5.0)
    with CheckpointManager(root) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer, lr_scheduler=schedule, grad_scaler=scaler, sharded=average)
        report = checkpoints.restored
    assert report is not None
    extra = dict(report.extra_state)
    tensor = extra.pop("tensor")
    described = (str(tensor.dtype), tensor.astype("float32").tolist())
    pieces = {key: (weight.flattened_range, weight.local_tensor.numpy().copy()) for key, weight in average.items()}
    return schedule.last_epoch, float(scaler._scale.item()), extra, described, report.rank_states, pieces, report.differences


def save_conflicts(root: str) -> list[str]:
    """What is said of tensors of the user's own that ranks give under one key: whole ones, and parts that overlap."""
    model, optimizer = build()
    rank = this_rank().rank
    value = paddle.full([4], float(rank))
    parts = {
        "whole": ShardedWeight("x", value, (4,), (4,), (0,)),
        "overlap": ShardedWeight("x", value, (4,), (6,), (2 * rank,)),
    }
    alike = ShardedWeight("x", paddle.arange(2 * rank, 2 * rank + 4).astype("float32"), (4,), (6,), (2 * rank,))
    said = []
    with CheckpointManager(root) as checkpoints:
        for step, weight in enumerate([*parts.values(), alike], start=1):
            try:
                checkpoints.save(step, model=model, optimizer=optimizer, sharded={"expert": weight})
                said.append("saved")
            except ckpt.CheckpointError as error:
                said.append(str(error))
    return said


def save_with_an_average(root: str) -> bool:
    """Save a tensor of the user's own that a rank has whole; tell whether its values were compared with those of other ranks."""
    from paddle_fsdp_ckpt import save_comparison

    model, optimizer = build()
    compared = []
    with pytest.MonkeyPatch.context() as patch, CheckpointManager(root) as checkpoints:
        patch.setattr(save_comparison, "digest", lambda data: compared.append(len(data)) or "")
        whole = ShardedWeight("average", paddle.ones([5]), (5,), (5,), (0,))
        checkpoints.save(1, model=model, optimizer=optimizer, sharded={"average": whole})
    return 20 in compared


def restore_parts(root: str) -> list[tuple[int | None, bool, bool, list[str]]]:
    """Restore some parts of a step over values that were changed; tell whether weights, and states, are those that were saved then."""
    model, optimizer = build()
    for _ in range(2):
        train_step(model, optimizer)

    def values() -> tuple[list[np.ndarray], list[np.ndarray]]:
        dicts = ckpt.sharded_state_dict(model), ckpt.optimizer_sharded_state_dict(optimizer)
        weights, states = ([one.local_tensor.numpy().copy() for _, one in sorted(parts.items())] for parts in dicts)
        return weights, states

    found = []
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(2, model=model, optimizer=optimizer)
        saved = values()
        for options in ({"optimizer": optimizer, "parts": {"model"}}, {}, {"optimizer": optimizer, "parts": ["optimizer"]}):
            train_step(model, optimizer)
            step = checkpoints.restore(model=model, **options)
            equal = [all(map(np.array_equal, now, then)) for now, then in zip(values(), saved, strict=True)]
            assert checkpoints.restored is not None
            found.append((step, *equal, checkpoints.restored.load.parts))
    return found


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(paddle.rand([1]).item())


def save_and_draw(root: str, *, alike: bool) -> tuple[float, float, float]:
    model, optimizer = build()
    seed = 5 if alike else 5 + this_rank().rank
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)
    draws()
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
    return draws()


def restore_and_draw(root: str) -> tuple[float, float, float]:
    model, optimizer = build(seed=9)
    with CheckpointManager(root) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer)
    return draws()


def resume_otherwise(root: str) -> list[str]:
    """Resume with other schedules, and return what is logged."""

    def scheduled(step_size: int, rate: float) -> tuple[Model, Any, Any]:
        model = Model()
        optimizer = paddle.optimizer.AdamW(paddle.optimizer.lr.StepDecay(0.1, step_size), parameters=model.parameters())
        ckpt.fully_shard(model, optimizer=optimizer)
        return model, optimizer, paddle.optimizer.lr.ExponentialDecay(rate, 0.9)

    with logged(logging.WARNING) as heard:
        for step_size, rate in ((3, 0.5), (4, 0.25)):
            model, optimizer, schedule = scheduled(step_size, rate)
            with CheckpointManager(root) as checkpoints:
                if not checkpoints.restore(model=model, optimizer=optimizer, lr_scheduler=schedule):
                    checkpoints.save(1, model=model, optimizer=optimizer, lr_scheduler=schedule)
    return heard
