"""Whole tensors out of and into a model that Paddle's own fully_shard cut, against the pieces that the ranks hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import paddle
import pytest
from fused_cases import Held, cut_by_paddle, held, train, whole
from harness import RankPool, this_rank

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


def train_and_gather(optimizer: str) -> tuple[dict[str, np.ndarray], Held]:
    with cut_by_paddle(optimizer) as (model, stepper):
        train(model, stepper, 0, 3)
        found = {**ckpt.full_state_dict(model, to_rank=None), **ckpt.full_optimizer_state_dict(stepper, to_rank=None)}
        return {key: tensor.numpy() for key, tensor in found.items()}, held(model, stepper)


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "sgd", "adamw decay"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gather(ranks: Ranks, world_size: int, optimizer: str) -> None:
    results = ranks(world_size).run(train_and_gather, optimizer)
    right = whole([pieces for _, pieces in results])
    for found, _ in results:
        assert found.keys() == right.keys()
        for key, value in right.items():
            np.testing.assert_array_equal(found[key].reshape(-1), value, err_msg=key)


def scatter() -> None:
    with cut_by_paddle("sgd") as (model, stepper):
        train(model, stepper, 0, 1)
        shapes = {name: tensor.shape for name, tensor in ckpt.full_state_dict(model, to_rank=None).items()}
        new = {name: np.random.RandomState(len(name)).rand(*shape).astype("float32") for name, shape in shapes.items()}
        ckpt.load_full_state_dict(model, new if this_rank().rank == 1 else None, from_rank=1)
        found = ckpt.full_state_dict(model, to_rank=None)
        for name, value in new.items():
            np.testing.assert_array_equal(found[name].numpy(), value, err_msg=name)
        losses = train(model, stepper, 1, 2)
        ckpt.load_full_state_dict(model, {name: paddle.to_tensor(value) for name, value in new.items()})
        # What was gathered for the step is gone: the same loss again.
        assert train(model, stepper, 1, 2) == losses


def test_scatter(ranks: Ranks) -> None:
    ranks(2).run(scatter)
