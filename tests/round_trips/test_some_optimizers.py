"""Several optimizers of one model: what of their learning rates can't be given back, and who of them is forgotten."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from harness import RankPool
from paddle import nn
from paddle.optimizer import lr

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]

RATES: dict[str, Callable[[], Any]] = {
    "0.01": lambda: 0.01,
    "0.5": lambda: 0.5,
    "halves": lambda: lr.StepDecay(0.01, 1, 0.5),
    "decays": lambda: lr.ExponentialDecay(0.02, 0.9),
}
HALVED, DECAYED = "a StepDecay (at 0.0025)", "a ExponentialDecay (at 0.0162)"


def _model() -> nn.Layer:
    paddle.seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _two(model: nn.Layer, first: Any, second: Any, cls: Any = paddle.optimizer.Adam) -> list[Any]:
    """Shard a model, and return an optimizer of each half of it."""
    made = [
        paddle.optimizer.Adam(learning_rate=first, parameters=model[0].parameters()),
        cls(learning_rate=second, parameters=model[2].parameters()),
    ]
    ckpt.fully_shard(model, optimizer=made)
    return made


def _train(model: nn.Layer, optimizers: list[Any]) -> None:
    """Take two steps, each schedule with its optimizer."""
    for _ in range(2):
        model(paddle.ones([2, 4])).mean().backward()
        for one in optimizers:
            one.step()
            one.clear_grad()
            if isinstance(one._learning_rate, lr.LRScheduler):
                one._learning_rate.step()


def merge(path: str, first: str, second: str, now: str) -> tuple[float, bool, list[str], list[str]]:
    """Save two optimizers, load them into one: its rate, and what the report says."""
    model = _model()
    optimizers = _two(model, RATES[first](), RATES[second]())
    _train(model, optimizers)
    ckpt.save(path, model=model, optimizer=optimizers)
    model = _model()
    optimizer = paddle.optimizer.Adam(learning_rate=RATES[now](), parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    report = ckpt.load(path, model=model, optimizer=optimizer)
    return optimizer.get_lr(), report.is_exact, report.parts, report.differences


@pytest.mark.parametrize(
    ("first", "second", "now", "rate", "dropped"),
    [
        ("halves", "decays", "halves", 0.0025, DECAYED),
        ("decays", "halves", "decays", 0.0162, HALVED),
        ("0.01", "0.5", "0.01", 0.01, "a fixed 0.5"),
        ("halves", "halves", "halves", 0.0025, None),
        ("0.5", "0.5", "0.5", 0.5, None),
    ],
)
def test_one_optimizer_has_the_rate_of_one(
    first: str, second: str, now: str, rate: float, dropped: str | None, tmp_path: Path, ranks: Ranks
) -> None:
    for seen, is_exact, parts, differences in ranks(2).run(merge, str(tmp_path / "merged"), first, second, now):
        assert seen == pytest.approx(rate, rel=1e-12)
        assert is_exact == (dropped is None)
        assert parts == ["model", "optimizer", *["learning_rate"] * (dropped is None)]
        assert len(differences) == (dropped is not None)
        assert all(one.startswith(f"Adam: the run had {dropped} besides, for others of the parameters") for one in differences)


def split(path: str) -> list[tuple[list[float], bool, list[str]]]:
    """Save one optimizer and load it into two that have schedules of their own, or share one; and two into such that share one."""
    model = _model()
    optimizer = paddle.optimizer.Adam(learning_rate=RATES["halves"](), parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    _train(model, [optimizer])
    ckpt.save(f"{path}/one", model=model, optimizer=optimizer)
    model = _model()
    optimizers = _two(model, lr.StepDecay(0.01, 1, 0.5), lr.StepDecay(0.9, 1, 0.9))
    _train(model, optimizers)
    ckpt.save(f"{path}/two", model=model, optimizer=optimizers)
    seen = []
    shared = [RATES["halves"]() for _ in range(2)]
    for name, rates in (
        ("one", [RATES["halves"](), RATES["halves"]()]),
        ("one", [shared[0]] * 2),
        ("one", [RATES["halves"](), RATES["decays"]()]),
        ("two", [shared[1]] * 2),
    ):
        model = _model()
        optimizers = _two(model, *rates)
        report = ckpt.load(f"{path}/{name}", model=model, optimizer=optimizers)
        seen.append(([one.get_lr() for one in optimizers], "learning_rate" in report.parts, report.differences))
    return seen


def test_several_optimizers_have_the_rate_of_one(tmp_path: Path, ranks: Ranks) -> None:
    for own, shared, other, two in ranks(2).run(split, str(tmp_path)):
        assert own == shared == ([0.0025, 0.0025], True, [])
        assert other[:2] == ([0.0025, 0.02], False)
        (left,) = other[2]
        assert left.startswith(f"Adam: the run had {HALVED}, and this has a ExponentialDecay (at 0.02)")
        assert two[:2] == ([0.0025, 0.0025], False)
        assert [one.partition(" besides")[0] for one in two[2]] == ["Adam: the run had a StepDecay (at 0.729)"]


def forget_one(folder: str) -> tuple[list[list[str]], list[float], bool, list[str]]:
    """What is warned of where one of two optimizers is not given, its rate after such a load, and what the report says."""
    model = _model()
    first, second = optimizers = _two(model, 0.01, RATES["halves"](), paddle.optimizer.SGD)
    _train(model, optimizers)
    with ckpt.CheckpointManager(f"{folder}/managed") as checkpoints:
        ways: list[Callable[[], Any]] = [
            lambda: ckpt.save(f"{folder}/first", model=model, optimizer=first),
            lambda: checkpoints.save(1, model=model, optimizer=first),
            lambda: ckpt.save(f"{folder}/none", model=model, optimizer=[]),
            lambda: ckpt.save(f"{folder}/both", model=model, optimizer=optimizers),
            lambda: ckpt.load(f"{folder}/both", model=model, optimizer=first),
            lambda: ckpt.load(f"{folder}/both", model=model, optimizer=first, parts={"model", "optimizer", "learning_rate"}),
            lambda: ckpt.load(f"{folder}/first", model=model, optimizer=first),  # which holds nothing of the second
            lambda: ckpt.load(f"{folder}/both", model=model, optimizer=[]),
        ]
        said = []
        for way in ways:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                way()
            said.append([str(one.message) for one in caught])
    model = _model()
    first, second = _two(model, 0.01, RATES["halves"](), paddle.optimizer.SGD)
    report = ckpt.load(f"{folder}/both", model=model, optimizer=first)
    return said, [first.get_lr(), second.get_lr()], report.is_exact, report.differences


def test_one_of_several_optimizers_that_is_not_given_is_told_of(tmp_path: Path, ranks: Ranks) -> None:
    (said, *reported), (others, *again) = ranks(2).run(forget_one, str(tmp_path))
    assert others == [[]] * 8
    assert reported == again
    rates, is_exact, differences = reported
    assert (rates, is_exact) == ([0.01, 0.01], False)
    assert len(differences) == 1 and differences[0].startswith(f"the SGD of '2.bias' and others was not restored, with {HALVED}")
    (saved,), (managed,), none, both, (loaded,), *rest = said
    assert saved == managed
    assert saved.startswith("save: SGD of '2.bias' and others is bound to the model and was not given")
    assert "Give optimizer=[...] with all that step the model" in saved
    assert loaded.startswith("load: SGD of '2.bias' and others is bound to the model and was not given")
    assert [none, both, *rest] == [[]] * 5
