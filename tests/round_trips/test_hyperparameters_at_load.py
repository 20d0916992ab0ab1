"""Hyper-parameters are saved, compared at load by the names of parameters, and never changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from harness import RankPool
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.export.difference import compare

Ranks = Callable[[int], RankPool]


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3, bias_attr=False) for _ in range(3))


def groups_of(kind: str, model: nn.Layer) -> Any:
    first, second, third = model.parameters()
    decayed = {"weight_decay": 0.1, "beta1": 0.8}
    return {
        "saved": [{"params": [first, second], **decayed}, {"params": []}, {"params": [third], "learning_rate": 0.5}],
        "other order": [{"params": [third], "learning_rate": 0.5}, {"params": [second, first], **decayed}],
        "split": [{"params": [first], **decayed}, {"params": [third], "learning_rate": 0.5}, {"params": [second], **decayed}],
        "other decay": [{"params": [first, second], **decayed, "weight_decay": 0.2}, {"params": [third], "learning_rate": 0.5}],
        "merged": [first, second, third],
    }[kind]


def build(kind: str) -> tuple[nn.Layer, Any]:
    model = Net()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=groups_of(kind, model), weight_decay=0.01, epsilon=1e-6)
    ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


def save(path: str) -> None:
    model, optimizer = build("saved")
    ckpt.init_optimizer_state(optimizer)
    ckpt.save(path, model=model, optimizer=optimizer)


def settings_of(optimizer: Any) -> Any:
    groups = [group for group in optimizer._param_groups if isinstance(group, dict)]
    return repr(optimizer._default_dict), [{key: repr(value) for key, value in group.items() if key != "params"} for group in groups]


def load(path: str, kind: str, parts: Any = None) -> list[str]:
    model, optimizer = build(kind)
    before = settings_of(optimizer)
    report = ckpt.load(path, model=model, optimizer=optimizer, parts=parts)
    assert settings_of(optimizer) == before
    return report.differences


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pools: Any) -> str:
    path = str(tmp_path_factory.mktemp("hyperparameters") / "checkpoint")
    rank_pools.pool(2).run(save, path)
    return path


@pytest.mark.parametrize("kind", ["saved", "other order", "split"])
def test_groups_in_another_order_or_split_are_the_same(ranks: Ranks, saved: str, kind: str) -> None:
    assert ranks(2).run(load, saved, kind) == [[], []]


def test_a_difference_is_reported_by_name_and_left(ranks: Ranks, saved: str) -> None:
    for differences in ranks(2).run(load, saved, "other decay"):
        assert differences == ["AdamW, 2 parameters (first 'first.weight'): weight_decay was saved as 0.1 and is 0.2 now"]


def test_groups_that_were_merged_differ_parameter_by_parameter(ranks: Ranks, saved: str) -> None:
    for differences in ranks(3).run(load, saved, "merged"):
        assert "AdamW, 2 parameters (first 'first.weight'): beta1 was saved as 0.8 and is 0.9 now" in differences
        assert "AdamW, 2 parameters (first 'first.weight'): weight_decay was saved as 0.1 and is 0.01 now" in differences
        assert any("'third.weight'" in one and "0.5" in one for one in differences)


def test_weights_alone_are_loaded_without_a_look_at_hyperparameters(ranks: Ranks, saved: str) -> None:
    assert ranks(2).run(load, saved, "other decay", {"model"}) == [[], []]


def save_with_ranks_that_differ(path: str) -> str:
    from harness import this_rank

    model = Net()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.1 * (1 + this_rank().rank))
    ckpt.fully_shard(model, optimizer=optimizer)
    with pytest.raises(ckpt.RankFailedError) as caught:
        ckpt.save(path, model=model, optimizer=optimizer)
    return str(caught.value)


def test_ranks_with_other_settings_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(save_with_ranks_that_differ, str(tmp_path / "checkpoint")):
        assert "model and optimizers must be the same on all ranks" in said


def reduced(reduction: Any, path: str, kind: str) -> list[str]:
    model = Net()
    optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    if reduction is not None:
        ckpt.fully_shard(model, optimizer=optimizer, gradient_reduction=reduction)
    if kind == "save":
        ckpt.save(path, model=model, optimizer=optimizer)
        return []
    report = ckpt.load(path, model=model, optimizer=optimizer)
    assert report.is_exact == (not report.differences)
    return report.differences


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_another_gradient_reduction_is_reported(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    path = str(tmp_path / "checkpoint")
    ranks(world_size).run(reduced, "sum", path, "save")
    assert ranks(world_size).run(reduced, "sum", path, "load") == [[]] * world_size
    for differences in ranks(world_size).run(reduced, "mean", path, "load"):
        assert differences == ["SGD, 3 parameters (first 'first.weight'): gradient_reduction was saved as 'sum' and is 'mean' now"]
    ranks(world_size).run(reduced, "mean", f"{path} of means", "save")
    (fact,) = compare(Path(path), Path(f"{path} of means")).facts
    assert (fact.what, fact.one, fact.other, fact.parameters) == ("gradient_reduction", "sum", "mean", 3)


def test_a_gradient_reduction_that_nobody_knows_is_no_difference(ranks: Ranks, tmp_path: Path) -> None:
    """As of a plain model, and of older checkpoints, of which the golden ones are some."""
    plain, cut = str(tmp_path / "plain"), str(tmp_path / "cut")
    ranks(1).run(reduced, None, plain, "save")
    ranks(1).run(reduced, "sum", cut, "save")
    assert ranks(1).run(reduced, "sum", plain, "load") == [[]]
    assert ranks(1).run(reduced, None, cut, "load") == [[]]
    assert not compare(Path(plain), Path(cut)).facts
