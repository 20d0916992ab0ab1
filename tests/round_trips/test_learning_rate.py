"""A resumed run goes on with the learning rate of the uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from checkpoint_cases import Tied, train
from harness import RankPool
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


def resume(rate: str, path: str) -> tuple[list[tuple[float, float]], list[str]]:
    model, optimizer, made = _make(rate, 9)
    report = ckpt.load(path, model=model, optimizer=optimizer)
    return _train(model, optimizer, made, 3, 7), report.differences


@pytest.mark.parametrize("rate", RATES)
def test_the_learning_rate_goes_on(rate: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    uninterrupted = ranks(2).run(save_in_the_middle, rate, path)
    assert [(seen, []) for seen in uninterrupted] == ranks(2).run(resume, rate, path)


def test_another_learning_rate_is_left_and_reported(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    ranks(2).run(save_in_the_middle, "cosine", path)
    for seen, differences in ranks(2).run(resume, "number", path):
        assert seen[0][1] == 0.01
        assert len(differences) == 1
        assert "CosineAnnealingDecay" in differences[0]
        assert "{'value': 0.01}" in differences[0]
