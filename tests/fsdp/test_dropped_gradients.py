"""Setting single gradients to None instead of ``clear_grad``, also where a rank keeps nothing of a parameter and sees None anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


class Net(nn.Layer):
    """Its second head is used in the first step only; by weight decay it would go on moving if it had gradients of zero later."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)
        self.other = nn.Linear(5, 3)

    def forward(self, x: paddle.Tensor, step: int) -> paddle.Tensor:
        x = paddle.tanh(self.body(x))
        return self.head(x) + self.other(x) if step == 0 else self.head(x)


def made(sharded: bool) -> tuple[nn.Layer, Any]:
    paddle.seed(7)
    model = Net()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters(), weight_decay=0.1)
    if sharded:
        ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


def train(model: nn.Layer, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = np.random.RandomState(step).randn(4, 6).astype("float32")
        model(paddle.to_tensor(x), step).square().mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = None


def whole(model: nn.Layer) -> dict[str, np.ndarray]:
    return {name: one.numpy() for name, one in ckpt.full_state_dict(model, to_rank=None).items()}


def trains_and_resumes(path: str) -> None:
    model, optimizer = made(True)
    train(model, optimizer, range(1))
    ckpt.save(path, model=model, optimizer=optimizer)
    train(model, optimizer, range(1, 4))
    resumed, its_optimizer = made(True)
    ckpt.load(path, model=resumed, optimizer=its_optimizer)
    train(resumed, its_optimizer, range(1, 4))
    plain, its_optimizer = made(False)
    train(plain, its_optimizer, range(4))
    uninterrupted, other = whole(model), whole(resumed)
    for name, parameter in plain.named_parameters():
        np.testing.assert_allclose(uninterrupted[name], parameter.numpy(), rtol=0, atol=1e-6, err_msg=name)
        assert other[name].tobytes() == uninterrupted[name].tobytes(), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_set_to_none_one_by_one(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks(world_size).run(trains_and_resumes, str(tmp_path / "checkpoint"))


def dropped_by_one_rank() -> str:
    """A parameter of which several ranks keep pieces."""
    paddle.seed(7)
    model = nn.Linear(50, 50)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    model(paddle.ones([2, 50])).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None
    if this_rank().rank == 0:
        model.weight.grad = None
    model(paddle.ones([2, 50])).sum().backward()
    with pytest.raises(ckpt.ShardingError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_keep_pieces_must_agree(world_size: int, ranks: Ranks) -> None:
    for message in ranks(world_size).run(dropped_by_one_rank):
        assert "set p.grad to None, on all that keep a piece" in message
