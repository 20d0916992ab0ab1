"""What a forward writes to whole weights without Paddle counting it would be lost: all ranks raise at the step, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import runtime_of

Ranks = Callable[[int], RankPool]


class Writing(nn.Layer):
    """A block whose forward can do something to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.write: Callable[[Any], Any] | None = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.linear(x)
        if self.write is not None:
            with paddle.no_grad():
                self.write(self.linear.weight)
        return x


def last_element(weight: Any) -> None:
    """Change one element, which the last rank keeps."""
    bits = weight.numpy()
    bits[-1, -1] += 1
    np.frombuffer(_memory(weight), np.float32)[:] = bits.reshape(-1)


def _memory(weight: Any) -> Any:
    import ctypes

    return (ctypes.c_char * (weight.size * 4)).from_address(weight.data_ptr())


WRITES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda weight: nn.initializer.Constant(0.25)(weight),
    "exponential_": lambda weight: weight.exponential_(),
    "last element": last_element,
}


def sharded() -> tuple[nn.Layer, Any]:
    paddle.seed(1)
    model = nn.Sequential(nn.Linear(4, 4), Writing(), Writing(), nn.Linear(4, 1))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


def step(model: nn.Layer, optimizer: Any) -> None:
    model(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()


def lost(name: str, block: int, evaluating: bool) -> str:
    model, optimizer = sharded()
    step(model, optimizer)
    model[block].write = WRITES[name]
    before = {key: value.numpy() for key, value in ckpt.full_state_dict(model, to_rank=None).items()}
    if evaluating:
        with paddle.no_grad():
            model(paddle.ones([2, 4]))
        model[block].write = None
    with pytest.raises(ckpt.ShardingError) as caught:
        step(model, optimizer)
    after = {key: value.numpy() for key, value in ckpt.full_state_dict(model, to_rank=None).items()}
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value)
    model[block].write = None
    optimizer.clear_grad()
    step(model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize(("name", "block", "evaluating"), [("constant", 1, False), ("exponential_", 2, True), ("last element", 1, True)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_raise_at_the_step(world_size: int, name: str, block: int, evaluating: bool, ranks: Ranks) -> None:
    for message in ranks(world_size).run(lost, name, block, evaluating):
        assert f"unit '{block}': a parameter of it was written to inside a forward" in message


def kept() -> None:
    """What is written to the shards, wherever, is no mistake."""
    model, optimizer = sharded()
    runtime = runtime_of(model)
    assert runtime is not None
    model[2].write = lambda weight: weight.set_value(paddle.full([4, 4], 0.5))
    with paddle.no_grad():
        model(paddle.ones([2, 4]))
    model[2].write = None
    step(model, optimizer)
    model(paddle.ones([2, 4])).sum().backward()  # the first unit stays whole
    assert any(unit.is_gathered for unit in runtime.units)
    for buffer in runtime.buffers:  # as stock load_state_dict does
        with paddle.no_grad():
            paddle.assign(paddle.full_like(buffer.shard, 0.125 * (1 + this_rank().rank)), buffer.shard)
    optimizer.clear_grad()
    step(model, optimizer)
    with ckpt.local_parameters(model), paddle.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    step(model, optimizer)
    model[1].linear.weight.set_value(paddle.full([4, 4], float("nan")))
    step(model, optimizer)


def test_writes_to_the_shards_are_right(ranks: Ranks) -> None:
    ranks(2).run(kept)
