"""A learning rate schedule of every kind goes on where it was, through JSON; what is left as it is, is said."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.optimizer import lr

from paddle_fsdp_ckpt.optim import describe_learning_rate, restore_learning_rate

Maker = Callable[[], Any]


def cosine() -> Any:
    return lr.CosineAnnealingDecay(0.1, T_max=5, eta_min=0.01)


SCHEDULES: dict[str, Maker] = {
    "NoamDecay": lambda: lr.NoamDecay(d_model=8, warmup_steps=4),
    "PiecewiseDecay": lambda: lr.PiecewiseDecay([3, 6, 9], [0.1, 0.07, 0.03, 0.01]),
    "NaturalExpDecay": lambda: lr.NaturalExpDecay(0.1, gamma=0.1),
    "InverseTimeDecay": lambda: lr.InverseTimeDecay(0.1, gamma=0.1),
    "PolynomialDecay": lambda: lr.PolynomialDecay(0.1, decay_steps=5, power=2.0, cycle=True),
    "LinearWarmup": lambda: lr.LinearWarmup(0.1, 9, 0.0, 0.1),
    "ExponentialDecay": lambda: lr.ExponentialDecay(0.1, gamma=0.9),
    "MultiStepDecay": lambda: lr.MultiStepDecay(0.1, milestones=[4, 8], gamma=0.5),
    "StepDecay": lambda: lr.StepDecay(0.1, step_size=4, gamma=0.5),
    "LambdaDecay": lambda: lr.LambdaDecay(0.1, lambda step: 0.9**step),
    "ReduceOnPlateau": lambda: lr.ReduceOnPlateau(0.1, patience=1, cooldown=1),
    "CosineAnnealingDecay": cosine,
    "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(0.1, lambda step: 1 - 0.01 * step),
    "OneCycleLR": lambda: lr.OneCycleLR(0.1, total_steps=20),
    "CyclicLR": lambda: lr.CyclicLR(0.01, 0.1, step_size_up=3, step_size_down=2, mode="exp_range", exp_gamma=0.9),
    "LinearLR": lambda: lr.LinearLR(0.1, total_steps=9),
    "CosineAnnealingWarmRestarts": lambda: lr.CosineAnnealingWarmRestarts(0.1, T_0=3, T_mult=2, eta_min=0.01),
}
NESTED: dict[str, Maker] = {
    f"LinearWarmup of {name}": lambda name=name: lr.LinearWarmup(SCHEDULES[name](), 4, 0.0, 0.1)
    for name in ("CosineAnnealingDecay", "CosineAnnealingWarmRestarts", "LambdaDecay", "LinearWarmup", "PolynomialDecay")
}
STEPS = (2, 7, 13)


def test_every_class_is_tried() -> None:
    found = [value for value in vars(lr).values() if inspect.isclass(value) and issubclass(value, lr.LRScheduler)]
    assert {cls.__name__ for cls in found} - {"LRScheduler"} == SCHEDULES.keys()


def optimizer_at(rate: Any) -> Any:
    return paddle.optimizer.SGD(rate, parameters=nn.Linear(2, 2).parameters())


def go_on(schedule: Any, steps: int, start: int = 0) -> list[float]:
    rates = []
    for step in range(start, start + steps):
        # Falls, stays for long enough, and falls again.
        metrics = paddle.to_tensor(1.0 / (1 + min(step, 3) + step // 9))
        schedule.step(metrics) if isinstance(schedule, lr.ReduceOnPlateau) else schedule.step()
        rates.append(schedule())
    return rates


def through_json(description: Any) -> Any:
    return json.loads(json.dumps(description, allow_nan=False))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", [*SCHEDULES, *NESTED])
def test_a_schedule_goes_on(name: str, steps: int) -> None:
    make = (SCHEDULES | NESTED)[name]
    uninterrupted, resumed, stale = make(), make(), make()
    go_on(uninterrupted, steps)
    go_on(stale, 5)
    saved = through_json(describe_learning_rate(optimizer_at(uninterrupted)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restore_learning_rate(optimizer_at(resumed), saved) is None
        assert restore_learning_rate(optimizer_at(stale), saved) is None
    assert through_json(describe_learning_rate(optimizer_at(resumed))) == saved
    rates = go_on(uninterrupted, 5, steps)
    assert go_on(resumed, 5, steps) == rates
    assert go_on(stale, 5, steps) == rates


@pytest.mark.parametrize("name", [*SCHEDULES, *NESTED])
def test_all_that_steps_change_is_described(name: str) -> None:
    """An attribute that changes and is in no state would be lost; it is then among the settings, and differs."""
    schedule = (SCHEDULES | NESTED)[name]()
    seen = []
    for step in range(12):
        seen.append(through_json(describe_learning_rate(optimizer_at(schedule)))["settings"])
        go_on(schedule, 1, step)
    assert all(settings == seen[0] for settings in seen)


METRICS: dict[str, Any] = {
    "paddle": paddle.to_tensor([0.3], dtype="float32"),
    "numpy": np.array([0.3], dtype="float32"),
    "numpy number": np.float32(0.3),
    "numpy double": np.float64(0.3),
    "nan": math.nan,
    "infinity": math.inf,
}


@pytest.mark.parametrize("kind", METRICS)
def test_what_a_plateau_remembers_keeps_its_precision(kind: str) -> None:
    before, after = lr.ReduceOnPlateau(0.1), lr.ReduceOnPlateau(0.1)
    before.step(METRICS[kind])
    restore_learning_rate(optimizer_at(after), through_json(describe_learning_rate(optimizer_at(before))))
    best, restored = np.asarray(before.best), np.asarray(after.best)
    np.testing.assert_array_equal(restored, best)
    assert (restored.dtype, restored.shape) == (best.dtype, best.shape)


def test_a_checkpoint_of_an_earlier_version_is_read() -> None:
    schedule = lr.LinearWarmup(cosine(), 3, 0.0, 0.1)
    go_on(schedule, 6)
    saved = {"scheduler": "LinearWarmup", "state": through_json(schedule.state_dict())}
    resumed = lr.LinearWarmup(cosine(), 3, 0.0, 0.1)
    assert restore_learning_rate(optimizer_at(resumed), saved) is None
    assert go_on(resumed, 5) == go_on(schedule, 5)


def test_other_settings_stay_and_are_reported() -> None:
    saved = through_json(describe_learning_rate(optimizer_at(lr.LinearWarmup(cosine(), 3, 0.0, 0.1))))
    other = lr.LinearWarmup(lr.CosineAnnealingDecay(0.2, T_max=9, eta_min=0.01), 4, 0.0, 0.1)
    text = restore_learning_rate(optimizer_at(other), saved)
    assert text is not None
    assert "SGD: the schedule of its learning rate goes on, but " in text
    assert "warmup_steps was saved as 3 and is 4 now" in text
    assert "learning_rate.T_max was saved as 5 and is 9 now" in text
    assert "learning_rate.base_lr was saved as 0.1 and is 0.2 now" in text
    assert (other.warmup_steps, other.learning_rate.T_max) == (4, 9)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (cosine, lambda: 0.3),
        (lambda: 0.1, lambda: 0.3),
        (lambda: 0.1, cosine),
        (cosine, SCHEDULES["StepDecay"]),
        (NESTED["LinearWarmup of CosineAnnealingDecay"], SCHEDULES["LinearWarmup"]),
        (SCHEDULES["LinearWarmup"], NESTED["LinearWarmup of CosineAnnealingDecay"]),
        (NESTED["LinearWarmup of CosineAnnealingDecay"], NESTED["LinearWarmup of LambdaDecay"]),
    ],
)
def test_another_kind_of_rate_is_left_and_reported(saved: Maker, now: Maker) -> None:
    made = saved()
    if isinstance(made, lr.LRScheduler):
        go_on(made, 3)
    optimizer = optimizer_at(now())
    before = describe_learning_rate(optimizer)
    text = restore_learning_rate(optimizer, through_json(describe_learning_rate(optimizer_at(made))))
    assert text is not None
    assert "was left as" in text
    assert describe_learning_rate(optimizer) == before


def test_a_state_that_lacks_something_is_left_and_reported() -> None:
    """As another version of Paddle may save it."""
    schedule, now = SCHEDULES["ReduceOnPlateau"](), SCHEDULES["ReduceOnPlateau"]()
    go_on(schedule, 7)
    saved = through_json(describe_learning_rate(optimizer_at(schedule)))
    del saved["state"]["best"]
    before = describe_learning_rate(optimizer_at(now))
    assert "a ReduceOnPlateau (at 0.1) with other entries in its state, which was left" in str(
        restore_learning_rate(optimizer_at(now), saved)
    )
    assert describe_learning_rate(optimizer_at(now)) == before


def test_set_lr_is_described_and_never_restored() -> None:
    optimizer = optimizer_at(0.1)
    optimizer.set_lr(0.05)
    saved = through_json(describe_learning_rate(optimizer))
    assert saved == {"value": 0.05}
    fresh = optimizer_at(0.1)
    text = restore_learning_rate(fresh, saved)
    assert text == "SGD: the run had a fixed 0.05, and this has a fixed 0.1, which was left as it is"
    fresh.set_lr(0.05)
    assert restore_learning_rate(fresh, saved) is None


class Forgetful(lr.LRScheduler):  # type: ignore[misc]
    """A user's own scheduler, whose state lacks what it counts."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__(0.1)

    def get_lr(self) -> float:
        self.count += 1
        return 0.1 / self.count


def test_what_a_users_scheduler_leaves_out_is_reported() -> None:
    schedule = Forgetful()
    go_on(schedule, 3)
    text = restore_learning_rate(optimizer_at(Forgetful()), through_json(describe_learning_rate(optimizer_at(schedule))))
    assert "count was saved as 4 and is 1 now" in str(text)
