"""A plain model's optimizer with ``use_multi_tensor=True`` goes on as it was, or is refused: Paddle keeps its states in lists as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool
from paddle import nn

import paddle_fsdp_ckpt as ckpt


def make(cls: str, seed: int, steps: int) -> tuple[nn.Layer, Any]:
    """A model that has taken steps of its own."""
    paddle.seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = getattr(paddle.optimizer, cls)(0.1, parameters=model.parameters(), use_multi_tensor=True)
    train(model, optimizer, 100, 100 + steps)
    return model, optimizer


def train(model: nn.Layer, optimizer: Any, first: int, last: int) -> list[list[float]]:
    """Train on the batches of these numbers, and return the weights."""
    for number in range(first, last):
        model(paddle.to_tensor(np.random.RandomState(number).randn(4, 3).astype("float32"))).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [one.numpy().reshape(-1).tolist() for one in model.parameters()]


def goes_on(cls: str, path: str) -> bool:
    """Whether an optimizer goes on bit for bit that had not stepped, and one that had."""
    model, optimizer = make(cls, 1, 3)
    ckpt.save(path, model=model, optimizer=optimizer)
    right = train(model, optimizer, 0, 3)
    found = []
    for steps in (0, 2):
        model, optimizer = make(cls, 2, steps)
        ckpt.load(path, model=model, optimizer=optimizer)
        found.append(train(model, optimizer, 0, 3))
    return found == [right, right]


def starts_afresh(cls: str, path: str) -> str:
    """What is said where states are to start afresh, after an optimizer without any was given them; nothing may have changed."""
    model, optimizer = make(cls, 1, 0)
    ckpt.save(path, model=model, optimizer=optimizer)
    right = train(model, optimizer, 0, 3)
    model, optimizer = make(cls, 2, 0)
    ckpt.load(path, model=model, optimizer=optimizer)
    assert train(model, optimizer, 0, 3) == right
    weights = train(model, optimizer, 0, 0)
    with pytest.raises(ckpt.MismatchError) as raised:
        ckpt.load(path, model=model, optimizer=optimizer)
    assert train(model, optimizer, 0, 0) == weights
    return str(raised.value)


@pytest.mark.parametrize("cls", ["Adam", "Momentum"])
def test_it_goes_on(cls: str, tmp_path: Path, single: RankPool) -> None:
    assert single.run(goes_on, cls, str(tmp_path / "saved")) == [True]


@pytest.mark.parametrize("cls", ["Adam", "Momentum"])
def test_states_that_would_stay_are_refused(cls: str, tmp_path: Path, single: RankPool) -> None:
    (message,) = single.run(starts_afresh, cls, str(tmp_path / "saved"))
    assert f"the states of 4 parameters are to start afresh, and {cls} with use_multi_tensor=True has stepped" in message
    assert "load into a new one" in message
