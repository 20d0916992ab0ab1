"""A resumed run goes on with the learning rate of the uninterrupted one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from checkpoint_cases import Tied, train
from harness import RankPool, logged
from paddle.optimizer import lr

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]

RATES: dict[str, Callable[[], Any]] = {
    "number": lambda: 0.01,
    "cosine": lambda: lr.CosineAnnealingDecay(0.01, T_max=10),
    "warm-up": lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.01, T_max=10), 3, 0.0, 0.01),
    "plateau": lambda: lr.ReduceOnPlateau(0.01, patience=1),
    "noam": lambda: lr.NoamDecay(d_model=8, warmup_steps=4),
    "warm restarts": lambda: lr.CosineAnnealingWarmRestarts(0.01, T_0=2, T_mult=2),
}


def _make(rate: str, seed: int) -> tuple[Any, Any, Any]:
    paddle.seed(seed)
    model = Tied()
    made = RATES[rate]()
    optimizer = paddle.optimizer.AdamW(made, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer, made


def _train(model: Any, optimizer: Any, rate: Any, first: int, last: int) -> list[tuple[float, float]]:
    seen = []
    for step in range(first, last):
        loss = train(model, optimizer, step, step + 1)[0]
        if isinstance(rate, lr.ReduceOnPlateau):
            rate.step(paddle.to_tensor(1.0 + loss * 0.0))
        elif isinstance(rate, lr.LRScheduler):
            rate.step()
        seen.append((loss, optimizer.get_lr()))
    return seen


def save_in_the_middle(rate: str, path: str) -> list[tuple[float, float]]:
    model, optimizer, made = _make(rate, 1)
    _train(model, optimizer, made, 0, 3)
    ckpt.save(path, model=model, optimizer=optimizer)
    return _train(model, optimizer, made, 3, 7)


def resume(rate: str, path: str) -> tuple[list[tuple[float, float]], list[str], list[str], list[str]]:
    """How the run goes on, what differs, which parts were loaded, and what was logged."""
    model, optimizer, made = _make(rate, 9)
    with logged(logging.WARNING) as heard:
        report = ckpt.load(path, model=model, optimizer=optimizer)
    return _train(model, optimizer, made, 3, 7), report.differences, report.parts, heard


@pytest.mark.parametrize("rate", RATES)
def test_the_learning_rate_goes_on(rate: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    uninterrupted = ranks(2).run(save_in_the_middle, rate, path)
    every = ["model", "optimizer", "learning_rate"]
    assert [(seen, [], every, []) for seen in uninterrupted] == ranks(2).run(resume, rate, path)


WARM_UP = "the run had a LinearWarmup of CosineAnnealingDecay (at 0.01), and this has "


@pytest.mark.parametrize(("rate", "has"), [("number", "a fixed 0.01"), ("cosine", "a CosineAnnealingDecay (at 0.01)")])
def test_another_learning_rate_is_left_reported_and_logged(rate: str, has: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    ranks(2).run(save_in_the_middle, "warm-up", path)
    results = ranks(2).run(resume, rate, path)
    left = 'which was left as it is: make the optimizer with that schedule, or leave the rate out by parts={"model", "optimizer"}'
    text = f"AdamW: {WARM_UP}{has}, {left}"
    for seen, differences, parts, _ in results:
        assert seen[0][1] == pytest.approx(0.01, rel=0.05)
        assert differences == [text] and parts == ["model", "optimizer"]
    assert [heard for *_, heard in results] == [[f"loaded '{path}': {text}"], []]
