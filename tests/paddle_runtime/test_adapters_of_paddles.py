"""What trains by itself, and weights of two moments, where Paddle's own fully_shard cut the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fused_cases import Held, cut_by_paddle, held, partly_frozen, train, whole
from harness import RankPool, assert_equal_states

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


def save_what_trains(path: str) -> Held:
    with partly_frozen(1) as (model, optimizer):
        train(model, optimizer, 0, 2)
        ckpt.save(path, model=model, optimizer=optimizer, trainable_only=True)
        return held(model, optimizer)


def load_what_trained(path: str) -> tuple[list[str], Held, str]:
    with partly_frozen(2) as (model, optimizer):
        report = ckpt.load(path, model=model, optimizer=optimizer)
        found = held(model, optimizer)
    with partly_frozen(2, base=1.5) as (model, optimizer), pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(path, model=model, optimizer=optimizer)
    return report.base, found, str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_trains_is_saved_and_restored_onto_its_base(ranks: Ranks, world_size: int, tmp_path: Path) -> None:
    saved = ranks(2).run(save_what_trains, str(tmp_path / "checkpoint"))
    loaded = ranks(world_size).run(load_what_trained, str(tmp_path / "checkpoint"))
    assert_equal_states(whole([found for _, found, _ in loaded]), whole(saved))
    for base, _, said in loaded:
        assert base == ["embed.weight"]
        assert "1 of the base's 1 parameters have other values, shapes or dtypes here: embed.weight" in said


def step_in_the_middle() -> str:
    with cut_by_paddle("adamw decay") as (model, optimizer):
        train(model, optimizer, 0, 1)
        pairs = ckpt.iter_full_parameters(model)
        next(pairs)
        train(model, optimizer, 1, 2)
        with pytest.raises(ckpt.ShardingError) as caught:
            list(pairs)
        assert len(list(ckpt.iter_full_parameters(model))) == len(np.unique([name for name, _ in model.named_parameters()]))
        return str(caught.value)


def test_weights_of_two_moments_are_an_error(ranks: Ranks) -> None:
    for said in ranks(2).run(step_in_the_middle):
        assert "the weights changed while iter_full_parameters ran" in said
