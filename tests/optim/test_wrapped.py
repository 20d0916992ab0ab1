"""Optimizers and models that Paddle put something around: they work as they are, or are refused by name, never cut a second time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from harness import RankPool, this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import errors
from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.optim import bind_optimizer, check_is_optimizer

Ranks = Callable[[int], RankPool]


def net() -> nn.Layer:
    paddle.seed(5)
    return nn.Sequential(nn.Linear(3, 75), nn.GELU(), nn.Linear(75, 2))


def adamw(model: nn.Layer, **options: Any) -> Any:
    return paddle.optimizer.AdamW(0.1, epsilon=1e-4, parameters=model.parameters(), **options)


def train(forward: nn.Layer, optimizer: Any, sharded: bool = True, level: str | None = None) -> None:
    place = this_rank()
    rows = 12 // place.world_size if sharded else 12
    start = rows * place.rank if sharded else 0
    for step in range(2):
        x = np.random.RandomState(step).standard_normal([12, 3]).astype("float32")[start : start + rows]
        with paddle.amp.auto_cast(enable=level is not None, level=level or "O1", dtype="bfloat16"):
            loss = forward(paddle.to_tensor(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()


def assert_like(model: nn.Layer, wanted: nn.Layer, rtol: float = 1e-4) -> None:
    runtime = runtime_of(model)
    assert runtime is not None
    whole = {name: parameter.numpy().reshape(-1) for name, parameter in wanted.named_parameters()}
    for one in runtime.shards:
        name = one.slot.name.removeprefix("_layers.")
        np.testing.assert_allclose(one.local.numpy(), whole[name][one.range.start : one.range.stop], rtol=rtol, atol=rtol / 10)


def decorated(level: str, path: str) -> None:
    """On CPU ``amp.decorate`` gives back what it got; on GPU it casts parameters in place, and sets multi_precision."""
    plain = net()
    train(plain, adamw(plain), sharded=False, level=level)
    model, optimizer = net(), None
    optimizer = adamw(model)
    model, optimizer = paddle.amp.decorate(model, optimizer, level=level, dtype="bfloat16")
    ckpt.fully_shard(model, optimizer=optimizer)
    train(model, optimizer, level=level)
    assert_like(model, plain, 2e-2)  # matmul in bfloat16, of other sizes
    ckpt.save(path, model=model, optimizer=optimizer)
    ckpt.load(path, model=model, optimizer=optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_amp_decorate_returns_is_sharded(level: str, tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(decorated, level, str(tmp_path / "checkpoint"))


def data_parallel(inside: bool) -> None:
    plain = net()
    train(plain, adamw(plain), sharded=False)
    model = net()
    wrapper = paddle.DataParallel(model)
    optimizer = adamw(model)
    ckpt.fully_shard(model if inside else wrapper, optimizer=optimizer)
    train(wrapper, optimizer)
    assert_like(model if inside else wrapper, plain)


@pytest.mark.parametrize("inside", [False, True])
def test_data_parallel_around_a_sharded_model_reduces_nothing_twice(inside: bool, ranks: Ranks) -> None:
    ranks(2).run(data_parallel, inside)


def refused_around() -> str:
    model = net()
    ckpt.fully_shard(model, optimizer=adamw(model))
    with pytest.raises(errors.ShardingError) as caught:
        paddle.DataParallel(model)
    return str(caught.value)


def test_data_parallel_is_told_that_it_is_not_needed(ranks: Ranks) -> None:
    for text in ranks(2).run(refused_around):
        assert "paddle.DataParallel isn't needed around a sharded model" in text


def refused(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(errors.CheckpointError) as caught:
        call(*args, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def under_fleet(path: str) -> dict[str, str]:
    from paddle.distributed import fleet
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionOptimizer

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    found = {}
    model = net()
    optimizer = adamw(model, grad_clip=nn.ClipGradByGlobalNorm(1.0))
    wrapper = fleet.distributed_optimizer(optimizer)
    found["distributed"] = refused(ckpt.fully_shard, model, optimizer=wrapper)
    found["its inner one, whose clip was replaced"] = refused(ckpt.fully_shard, model, optimizer=optimizer)
    found["mixed precision"] = refused(ckpt.fully_shard, model, optimizer=MixPrecisionOptimizer(adamw(model)))
    found["bind"] = refused(bind_optimizer, wrapper)
    found["save"] = refused(ckpt.save, path, model=model, optimizer=wrapper)
    assert all(parameter._is_initialized() for parameter in model.parameters())
    other = net()
    inner = adamw(other)
    fleet.distributed_optimizer(inner)
    ckpt.fully_shard(other, optimizer=inner)
    other(paddle.ones([2, 3])).sum().backward()
    found["its inner one, which holds a part of the parameters"] = refused(inner.step)
    # A model alone may go through fleet, which only broadcasts it.
    plain = net()
    train(plain, adamw(plain), sharded=False)
    model = net()
    distributed = fleet.distributed_model(model)
    optimizer = adamw(model)
    ckpt.fully_shard(distributed, optimizer=optimizer)
    train(distributed, optimizer)
    assert_like(distributed, plain)
    return found


WORDS = {
    "distributed": "UnsupportedOptimizerError: HybridParallelOptimizer wraps AdamW, and would reduce, cut",
    "its inner one, whose clip was replaced": "UnsupportedOptimizerError: HybridParallelClipGrad can't clip",
    "mixed precision": "UnsupportedOptimizerError: MixPrecisionOptimizer wraps AdamW",
    "bind": "UnsupportedOptimizerError: HybridParallelOptimizer wraps AdamW",
    "save": "HybridParallelOptimizer",
    "its inner one, which holds a part of the parameters": "ShardingError: what the optimizer holds differs between ranks",
}


def test_fleets_optimizers_are_refused_and_its_model_works(tmp_path: Path, fresh_ranks: Ranks) -> None:
    for found in fresh_ranks(2).run(under_fleet, str(tmp_path / "checkpoint"), timeout=60):
        assert found.keys() == WORDS.keys()
        for case, words in WORDS.items():
            assert words in found[case], case


class Around:
    def __init__(self, optimizer: Any, where: str) -> None:
        setattr(self, where, optimizer)


@pytest.mark.parametrize("where", ["_inner_opt", "_optim", "inner_optimizer", "inner_opt"])
def test_the_innermost_one_is_named(where: str) -> None:
    optimizer = paddle.optimizer.Momentum(0.1, parameters=net().parameters())
    with pytest.raises(errors.UnsupportedOptimizerError, match="Around wraps Momentum, .* make Momentum alone"):
        check_is_optimizer(Around(Around(optimizer, "_inner_opt"), where))
    check_is_optimizer(optimizer)


def look_ahead() -> str:
    model = net()
    return refused(ckpt.fully_shard, model, optimizer=paddle.incubate.LookAhead(adamw(model)))


def test_look_ahead_is_refused(single: RankPool) -> None:
    assert "LookAhead wraps AdamW" in single.run(look_ahead)[0]


def held_differently() -> list[str]:
    model = net()
    ckpt.fully_shard(model)
    chosen = model.parameters() if dist.get_rank() == 0 else model.parameters()[:2]
    optimizer = paddle.optimizer.SGD(0.1, parameters=chosen)
    bind_optimizer(optimizer)
    loss = model(paddle.ones([2, 3])).sum()
    loss.backward()
    return [refused(optimizer.step), refused(optimizer.minimize, loss)]


def test_ranks_whose_optimizers_hold_other_parameters_are_found(ranks: Ranks) -> None:
    for messages in ranks(2).run(held_differently):
        assert all("what the optimizer holds differs between ranks" in message for message in messages)
