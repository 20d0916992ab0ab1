"""A look at the states of an optimizer makes some only where no rank has any: a rank may keep nothing of the parameters that have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from harness import RankPool
from paddle import nn

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


class Partly(nn.Layer):
    """The first parameter lies on the first rank only, the second on all, and only one of them gets gradients."""

    def __init__(self, used: str, numel: int, small: int) -> None:
        super().__init__()
        self.small, self.large = self.create_parameter([small]), self.create_parameter([numel])
        self.used = used

    def forward(self) -> paddle.Tensor:
        return getattr(self, self.used).square().sum()


def make(used: str, numel: int = 2000, small: int = 4) -> tuple[nn.Layer, Any]:
    paddle.seed(1)
    model = Partly(used, numel, small)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


def keys_of(optimizer: Any) -> list[str]:
    return sorted(ckpt.optimizer_sharded_state_dict(optimizer))


def look(root: str, used: str, minimize: bool) -> dict[str, list[str]]:
    """The states that there are: before a step, after one, after loads, after a load that fails, and after one that starts all afresh."""
    found = {}
    model, optimizer = make(used)
    found["none"] = keys_of(optimizer)
    model, optimizer = make(used)
    if minimize:
        loss = model()
        loss.backward()
        optimizer.minimize(loss)
    else:
        model().backward()
        optimizer.step()
    optimizer.clear_grad()
    ckpt.save(f"{root}/before", model=model, optimizer=optimizer)
    found["stepped"] = keys_of(optimizer)
    ckpt.save(f"{root}/after", model=model, optimizer=optimizer)
    for options in ({}, {"verify_first": True}):  # the second is judged key by key
        model, optimizer = make(used)
        ckpt.load(f"{root}/after", model=model, optimizer=optimizer, **options)  # type: ignore[arg-type]
        found[f"loaded {options}"] = keys_of(optimizer)
    model, optimizer = make(used, 2001)
    with pytest.raises(ckpt.MismatchError):
        ckpt.load(f"{root}/after", model=model, optimizer=optimizer)
    found["failed"] = keys_of(optimizer)
    model, optimizer = make(used, *((2000, 5) if used == "small" else (2001, 4)))
    ckpt.load(f"{root}/after", model=model, optimizer=optimizer, allow_other_shape=[used])
    found["afresh"] = keys_of(optimizer)
    return found


@pytest.mark.parametrize("used", ["small", "large"])
@pytest.mark.parametrize("minimize", [False, True])
def test_all_ranks_know_alike_what_has_states(used: str, minimize: bool, tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(look, str(tmp_path), used, minimize)
    every = [["large.velocity_0", "small.velocity_0"], ["large.velocity_0"]]
    own = [[f"{used}.velocity_0"], [] if used == "small" else ["large.velocity_0"]]
    for name in first:
        expected = every if name in ("none", "failed", "afresh") else own
        assert [first[name], second[name]] == expected, name
