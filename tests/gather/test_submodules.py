"""Layers taken out before sharding leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import paddle
import pytest
from gather_cases import Net, values_of
from harness import RankPool
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.storage.index import read_index

Ranks = Callable[[int], RankPool]


class WithValueHead(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.value = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))


def drop_and_save(path: str) -> None:
    model = WithValueHead()
    right = values_of(model)
    ckpt.drop_submodules(model, ["value.1", "net.conv"])
    ckpt.drop_submodules(model, "value")
    ckpt.fully_shard(model, optimizer=None)
    left = {name for name in right if not name.startswith(("value.", "net.conv."))}
    runtime = runtime_of(model)
    assert runtime is not None
    assert {name for shard in runtime.shards for name in shard.slot.names} == left - {"net.steps", "net.norm._mean", "net.norm._variance"}
    ckpt.save(path, model=model)
    assert set(read_index(Path(path)).keys()) == left
    with pytest.raises(ckpt.ShardingError, match="already sharded"):
        ckpt.drop_submodules(model, ["net"])


def refuse_unknown_names() -> None:
    model = WithValueHead()
    before = list(model.state_dict())
    with pytest.raises(ckpt.ShardingError, match=r"no layers 'valve', 'net\.head\.weight'; it has net, net\.embed"):
        ckpt.drop_submodules(model, ["value", "valve", "net.head.weight"])
    assert list(model.state_dict()) == before
    assert isinstance(model.value(paddle.ones([1, 6])), paddle.Tensor)


def test_nothing_is_left_in_layout_and_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(drop_and_save, str(tmp_path / "checkpoint"))


def test_unknown_names_are_refused(single: RankPool) -> None:
    single.run(refuse_unknown_names)
