"""Models that are built without values, under ``paddle.LazyGuard``: they get them while they are sharded, one flat buffer at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, this_rank
from paddle import nn
from paddle.base import core
from training_models import Net

from paddle_fsdp_ckpt import fully_shard, iter_full_parameters, load, save
from paddle_fsdp_ckpt.errors import ShardingError
from paddle_fsdp_ckpt.fsdp import runtime_of

Ranks = Callable[[int], RankPool]
Values = dict[str, np.ndarray]

MIB = 1 << 20


def mixed() -> nn.Layer:
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.BatchNorm1D(16), nn.LayerNorm(16), nn.Linear(16, 3))


def lazily(build: Callable[[], nn.Layer], seed: int) -> nn.Layer:
    """Build a model without values; the seed is for those that it gets later."""
    with paddle.LazyGuard():
        model = build()
    assert not any(one._is_initialized() for one in model.parameters())
    paddle.seed(seed)
    return model


def adamw(model: nn.Layer) -> Any:
    return paddle.optimizer.AdamW(1e-2, parameters=model.parameters())


def whole(model: nn.Layer) -> Values:
    return {name: tensor.numpy() for name, tensor in iter_full_parameters(model)}


def initial_values() -> tuple[Values, Values, float]:
    """Return what sharding gave a model on this rank, what Paddle's own ``initialize`` gives it, and what its generator draws next."""
    model = lazily(mixed, 5)
    fully_shard(model, optimizer=adamw(model))
    following = paddle.rand([1]).item()
    right = lazily(mixed, 5)
    for parameter in right.parameters():
        parameter.initialize()
    assert paddle.rand([1]).item() == following
    statistics = {name: tensor.numpy() for name, tensor in model.named_parameters() if name in ("2._mean", "2._variance")}
    return {**whole(model), **statistics}, {name: one.numpy() for name, one in right.named_parameters()}, following


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_are_those_of_paddles_own_initialize(ranks: Ranks, world_size: int) -> None:
    for got, right, _ in ranks(world_size).run(initial_values):
        assert got.keys() == right.keys()
        for name, value in right.items():
            np.testing.assert_array_equal(got[name], value, name)


def trained(lazy: bool, save_to: str | None, load_from: str | None) -> Values:
    """Train a model with tied weights for a step, which may have been built without values, and return them."""
    model = lazily(lambda: Net(2, tied="same"), 5) if lazy else Net(2, tied="same")
    optimizer = adamw(model)
    fully_shard(model, optimizer=optimizer)
    if load_from is not None:
        load(load_from, model=model, optimizer=optimizer)
    model(paddle.to_tensor(np.arange(12).reshape(4, 3) % 7 + this_rank().rank)).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    if save_to is not None:
        save(save_to, model=model, optimizer=optimizer)
    return whole(model)


def test_a_run_goes_on_in_a_model_without_values(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    ranks(2).run(trained, False, path, None)
    right = ranks(2).run(trained, False, None, path)
    got = ranks(2).run(trained, True, None, path)
    for one, other in zip(right, got, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def room_needed() -> tuple[int, int, int]:
    """Return the most that this rank held beside what it had, what it holds in the end, and the bytes of the largest flat buffer."""
    model = lazily(lambda: nn.Sequential(*[nn.Linear(256, 1024, bias_attr=False) for _ in range(24)]), 5)
    before = int(core.host_memory_stat_current_value("Allocated", 0))
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    fully_shard(model, optimizer=None)
    runtime = runtime_of(model)
    assert runtime is not None
    most = int(core.host_memory_stat_peak_value("Allocated", 0)) - before
    return most, runtime.memory_bytes()[0], max(buffer.layout.nbytes for buffer in runtime.buffers)


def test_no_rank_ever_holds_the_whole_model(ranks: Ranks) -> None:
    for most, shards, largest in ranks(2).run(room_needed):
        assert (shards, largest) == (12 * MIB, MIB)
        assert most <= shards + 2 * largest + MIB // 4


def test_values_that_are_gone_are_not_made_up(single: RankPool) -> None:
    assert "parameters without values: 0.weight" in single.run(without_values)[0]


def without_values() -> str:
    model = nn.Sequential(nn.Linear(3, 4))
    model[0].weight._clear_data()
    with pytest.raises(ShardingError) as caught:
        fully_shard(model, optimizer=None)
    return str(caught.value)


def test_a_model_without_values_that_nobody_sharded_is_no_model_to_save_or_load(tmp_path: Path, single: RankPool) -> None:
    path = str(tmp_path / "checkpoint")
    for text in single.run(unsharded_without_values, path)[0]:
        assert "LazyGuard: 0.weight, 0.bias; call fully_shard(model, optimizer=...) first" in text


def unsharded_without_values(path: str) -> list[str]:
    save(path, model=nn.Sequential(nn.Linear(3, 4)))
    with paddle.LazyGuard():
        model = nn.Sequential(nn.Linear(3, 4))
    texts = []
    for use in (lambda: save(path, model=model, overwrite=True), lambda: load(path, model=model)):
        with pytest.raises(ShardingError) as caught:
            use()
        texts.append(str(caught.value))
    return texts
