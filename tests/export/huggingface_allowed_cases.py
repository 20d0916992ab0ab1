"""Loads of published weights in which something may differ: what ranks do, and what they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from made_models import build

import paddle_fsdp_ckpt as ckpt

Shapes = Mapping[str, tuple[int, ...]]
BEFORE = -7.0
MASTER = np.float32(-7.0001)


def load_each(path: str, shapes: Shapes, tied: Mapping[str, str], calls: Sequence[Mapping[str, Any]], sharded: bool) -> list[Any]:
    """Return for each call, of a model full of one value, its report and what the model holds then; or its error's type and words."""
    return [_load(path, shapes, tied, options, sharded) for options in calls]


def _load(path: str, shapes: Shapes, tied: Mapping[str, str], options: Mapping[str, Any], sharded: bool) -> Any:
    model = build({name: np.full(shape, BEFORE, np.float32) for name, shape in shapes.items()}, "float32", tied)
    if sharded:
        ckpt.fully_shard(model, optimizer=None)
    result: Any = None
    error = None
    try:
        result = ckpt.load_huggingface(path, model=model, **options)
    except ckpt.CheckpointError as raised:
        error = (type(raised).__name__, str(raised))
    values = {name: one.numpy() for name, one in (ckpt.full_state_dict(model) if sharded else model.state_dict()).items()}
    if error is None:
        return result, values
    assert all((value == BEFORE).all() for value in values.values())
    return error


def options_that_differ(path: str, shapes: Shapes) -> Any:
    allowed = ["score.*"] if dist.get_rank() else ["score.*", "head.*"]
    return _load(path, shapes, {}, {"allow_missing": allowed, "allow_unexpected": ["lm_head.*"]}, True)


def masters_after(path: str, shapes: Shapes, kept: str, options: Mapping[str, Any]) -> dict[str, bool]:
    """Load into a bfloat16 model, and say of each of this rank's master weights whether it is the parameter; ``kept`` has its own."""
    model = build({name: np.full(shape, BEFORE, np.float32) for name, shape in shapes.items()}, "bfloat16", {})
    stepper = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    masters = {
        key.removesuffix(".w_0"): weight.local_tensor
        for key, weight in ckpt.optimizer_sharded_state_dict(stepper).items()
        if key.endswith(".w_0")
    }
    if kept in masters:
        paddle.assign(paddle.full_like(masters[kept], float(MASTER)), output=masters[kept])
    ckpt.load_huggingface(path, model=model, cast=True, **options)
    if kept in masters:
        assert (masters[kept].numpy() == MASTER).all()
    weights = ckpt.sharded_state_dict(model)
    return {key: bool((one.numpy() == weights[key].local_tensor.astype("float32").numpy()).all()) for key, one in masters.items()}
