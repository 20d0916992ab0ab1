"""The hyper-parameters of an optimizer over Paddle's fused buffers are described as those of one over the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fused_cases import DECAYED, EVERY, cut_by_paddle, plain_model, train
from harness import RankPool

from paddle_fsdp_ckpt.layout import Slot
from paddle_fsdp_ckpt.optim import WholeParameter, describe_hyperparameters, differences
from paddle_fsdp_ckpt.optim.fused import held_shards

Ranks = Callable[[int], RankPool]


def described(optimizer: str) -> tuple[Any, Any, Any]:
    """Over a plain model; over fused buffers, before and after a step."""
    model = plain_model()
    plain = EVERY[optimizer](model)
    held = [WholeParameter(Slot((name,), tuple(p.shape), 0), p) for name, p in model.named_parameters()]
    right = describe_hyperparameters(plain, held)
    with cut_by_paddle(optimizer) as (model, stepper):
        shards = held_shards(stepper)
        before = describe_hyperparameters(stepper, shards)
        train(model, stepper, 0, 1)
        return right, before, describe_hyperparameters(stepper, shards)


@pytest.mark.parametrize("optimizer", [name for name in EVERY if not name.endswith("named")])
def test_a_fused_optimizer_is_described_as_a_plain_one(optimizer: str, ranks: Ranks) -> None:
    for right, before, after in ranks(2).run(described, optimizer):
        assert before == after
        assert differences(right, before) == differences(before, right) == []
        assert sorted(name for one in before for name in one["parameters"]) == sorted(name for one in right for name in one["parameters"])
        assert len(before) == (2 if optimizer in DECAYED else 1)
