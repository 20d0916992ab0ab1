"""What runs on the ranks to keep an average of a model's weights.

All ranks take the same gradients, small whole numbers, so that their means are exact and the plain run is the same to the bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
from harness import hybrid_groups, this_rank
from low_precision_cases import adamw_on_cpu
from paddle import nn
from paddle.amp.auto_cast import _set_multi_precision, amp_initialize

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import Communicator, runtime_of

WEIGHT = 0.1


class Part(nn.Layer):
    """A norm, which stays float32, a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.weight = self.create_parameter([13, 7])
        self.bias = self.create_parameter([7], default_initializer=nn.initializer.Normal())

    def forward(self, step: int) -> paddle.Tensor:
        return _sum_of(step, [self.norm.weight, self.norm.bias, self.weight, self.bias])


class Net(nn.Layer):
    """Two parts, a matrix that has two names, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.LayerList([Part(), Part()])
        self.first = self.create_parameter([11, 9])
        self.second = self.first
        self.register_buffer("steps", paddle.zeros([1], dtype="int64"))
        self.parts[1].bias.stop_gradient = True

    def forward(self, step: int) -> paddle.Tensor:
        return self.parts[0](step) + self.parts[1](step + 1) + _sum_of(step, [self.first, self.second])


def _sum_of(step: int, parameters: list[paddle.Tensor]) -> paddle.Tensor:
    factors = [np.random.RandomState(step).randint(-9, 10, one.shape).astype("float32") for one in parameters]
    return paddle.add_n([(one.astype("float32") * paddle.to_tensor(by)).sum() for one, by in zip(parameters, factors, strict=True)])


@dataclass
class Run:
    """A model, its optimizer, and the average of the model."""

    model: Any
    optimizer: Any
    average: Any

    def step(self, number: int) -> None:
        """Step the model alone."""
        with adamw_on_cpu(set()):
            self.model(number).backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
        paddle.assign(self.model.steps + 1, self.model.steps)

    def average_steps(self, first: int, last: int, **options: Any) -> None:
        for number in range(first, last):
            self.step(number)
            ckpt.update_average(self.average, self.model, WEIGHT, **options)


def build(dtype: str, average_dtype: str = "float32", cut: str = "both", seed: int = 3, **groups: Any) -> Run:
    """Make them.

    Args:
        dtype: of the model's matrices.
        average_dtype: of all of the average.
        cut: "both" are cut over the ranks, one or "none".
        seed: of the initial values, which the average has another of.
        groups: for ``fully_shard``.
    """
    paddle.seed(seed)
    model, average = Net(), Net()
    optimizer = paddle.optimizer.AdamW(0.01, epsilon=1e-4, parameters=model.parameters())
    if dtype != "float32":
        amp_initialize([model], dtype, [nn.LayerNorm])
        _set_multi_precision(optimizer, True)
    if average_dtype != "float32":
        average.to(dtype=average_dtype)
    if cut in ("both", "model"):
        ckpt.fully_shard(model, optimizer=optimizer, **groups)
    if cut in ("both", "average"):
        ckpt.fully_shard(average, optimizer=None, **groups)
    return Run(model, optimizer, average)


def right_averages(dtype: str, steps: int, masters: bool) -> dict[str, np.ndarray]:
    """The plain run, and by numpy the average of its weights in float32."""
    run = build(dtype, cut="none")
    right = {name: value.numpy() for name, value in run.average.state_dict().items()}
    for number in range(steps):
        run.step(number)
        found = run.optimizer._master_weights if masters else {}
        for name, value in run.model.state_dict().items():
            now = found.get(value.name, value.astype("float32")).numpy()
            right[name] = value.numpy() if name == "steps" else right[name] + np.float32(WEIGHT) * (now - right[name])
    return right


def whole(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in ckpt.full_state_dict(model, to_rank=None).items()}


def in_float32(model: Any) -> dict[str, np.ndarray]:
    return {name: value.astype("float32").numpy() for name, value in ckpt.full_state_dict(model, to_rank=None).items()}


def rounded(values: np.ndarray) -> np.ndarray:
    """To bfloat16."""
    return np.asarray(paddle.to_tensor(values).astype("bfloat16").astype("float32").numpy())


@contextmanager
def counted_gathers() -> Iterator[list[str]]:
    """Give the dtype of each flat buffer that is gathered."""
    seen: list[str] = []
    gather = Communicator.all_gather

    def counting(self: Communicator, shard: paddle.Tensor) -> paddle.Tensor:
        seen.append(str(shard.dtype).removeprefix("paddle."))
        return gather(self, shard)

    with patch.object(Communicator, "all_gather", counting):
        yield seen


def averages(dtype: str, cut: str, masters: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
    """The average after three steps, the right one, and which buffers the last update gathered."""
    right = right_averages(dtype, 3, masters)
    run = build(dtype, cut=cut)
    options = {"optimizer": run.optimizer} if masters else {}
    ckpt.update_average(run.average, run.model, 0.0, **options)  # before there are master weights
    run.average_steps(0, 2, **options)
    run.step(2)
    before = ckpt.parameter_versions(run.average) if runtime_of(run.average) else {}
    with counted_gathers() as gathered:
        ckpt.update_average(run.average, run.model, WEIGHT, **options)
    if before:
        assert all(now > before[name] for name, now in ckpt.parameter_versions(run.average).items())
    found = whole(run.average)
    ckpt.update_average(run.average, run.model, 1.0)
    copied, values = whole(run.average), in_float32(run.model)
    assert all((copied[name] == value).all() for name, value in values.items())
    return found, right, gathered


def computes_with_new_values() -> tuple[float, float]:
    """What the average's own forward gives, and a plain model with its values."""
    run = build("float32")
    with paddle.no_grad():
        run.average(0)
    run.average_steps(0, 1, optimizer=run.optimizer)
    plain = Net()
    plain.set_state_dict(ckpt.full_state_dict(run.average, to_rank=None))
    with paddle.no_grad():
        return run.average(0).item(), plain(0).item()


def save_and_go_on(path: str) -> dict[str, np.ndarray]:
    run = build("bfloat16")
    run.average_steps(0, 2, optimizer=run.optimizer)
    with ckpt.CheckpointManager(path) as checkpoints:
        checkpoints.save(2, model={"model": run.model, "average": run.average}, optimizer=run.optimizer)
    run.average_steps(2, 4, optimizer=run.optimizer)
    return whole(run.average)


def restore_and_go_on(path: str) -> dict[str, np.ndarray]:
    run = build("bfloat16", seed=4)
    with ckpt.CheckpointManager(path) as checkpoints:
        assert checkpoints.restore(model={"model": run.model, "average": run.average}, optimizer=run.optimizer) == 2
        assert checkpoints.restored is not None
        assert checkpoints.restored.is_exact
    run.average_steps(2, 4, optimizer=run.optimizer)
    return whole(run.average)


def in_16_bits() -> tuple[list[str], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What is warned of, and one update of a bfloat16 average: found, and right, as float32; then a copy."""
    run = build("bfloat16", "bfloat16")
    before = in_float32(run.average)
    run.step(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.update_average(run.average, run.model, WEIGHT)
        found = in_float32(run.average)
        ckpt.update_average(run.average, run.model, 1.0)
        copied = in_float32(run.average)
    values = in_float32(run.model)
    right = {name: rounded(before[name] + np.float32(WEIGHT) * (value - before[name])) for name, value in values.items()}
    right["steps"] = values["steps"]
    assert all((copied[name] == rounded(value)).all() for name, value in values.items())
    return [str(one.message) for one in caught], found, right


def replicas(over: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two replicas of two ranks, and an average that is cut so too, or over all four."""
    right = right_averages("float32", 2, False)
    run = build("float32", cut="none")
    ckpt.fully_shard(run.model, optimizer=run.optimizer, **hybrid_groups(2))
    ckpt.fully_shard(run.average, optimizer=None, **(hybrid_groups(2) if over == "replicas" else {}))
    run.average_steps(0, 2)
    return whole(run.average), right


def _other_model(change: Callable[[Any], None]) -> Any:
    average = Net()
    change(average)
    return ckpt.fully_shard(average, optimizer=None)


class _Updating(nn.Layer):
    """Updates an average in its forward."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.weight = self.create_parameter([3])
        self.run = [run]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        ckpt.update_average(self, self.run[0].model, 0.5)
        return x * self.weight


def refusals() -> dict[str, str]:
    """What is said, by case; nothing moves."""
    run, other = build("float32"), build("float32", seed=5)
    before = whole(run.average)
    rank = this_rank().rank
    pending = build("float32")
    pending.model(0).backward()
    updating = ckpt.fully_shard(_Updating(run), optimizer=None)
    shared = Net()
    calls: dict[str, Callable[[], Any]] = {
        "too large": lambda: ckpt.update_average(run.average, run.model, 1.5),
        "no number": lambda: ckpt.update_average(run.average, run.model, True),
        "not a number": lambda: ckpt.update_average(run.average, run.model, float("nan")),
        "no model": lambda: ckpt.update_average({"average": run.average}, run.model, 0.5),  # type: ignore[arg-type]
        "names": lambda: ckpt.update_average(_other_model(lambda m: setattr(m, "more", nn.Linear(2, 2))), run.model, 0.5),
        "shapes": lambda: ckpt.update_average(_other_model(lambda m: setattr(m.parts[0], "norm", nn.LayerNorm(6))), run.model, 0.5),
        "buffers": lambda: ckpt.update_average(_other_model(lambda m: m.register_buffer("own", paddle.ones([2]))), run.model, 0.5),
        "tied": lambda: ckpt.update_average(run.average, _other_model(_untie), 0.5),
        "optimizer": lambda: ckpt.update_average(run.average, run.model, 0.5, optimizer=other.optimizer),
        "no optimizer": lambda: ckpt.update_average(run.average, run.model, 0.5, optimizer="adamw"),
        "gradients": lambda: ckpt.update_average(pending.average, pending.model, 0.5),
        "forward": lambda: updating(paddle.ones([3])),
        "itself": lambda: ckpt.update_average(run.model, run.model, 0.5),
        "itself plain": lambda: ckpt.update_average(shared, copy.copy(shared), 0.5),
        "part": lambda: ckpt.update_average(run.average.parts[0], run.model.parts[0], 0.5),
        "differs": lambda: ckpt.update_average(run.average, run.model, 0.5 + 0.1 * rank),
        "on one rank": lambda: ckpt.update_average(run.average, run.model, 2.0 if rank else 0.5),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ckpt.CheckpointError as error:
            said[name] = f"{type(error).__name__}: {error}"
    assert all((value == before[name]).all() for name, value in whole(run.average).items())
    pending.optimizer.step()
    ckpt.update_average(pending.average, pending.model, 0.5, optimizer=[pending.optimizer])
    untied = _other_model(_untie)
    ckpt.update_average(untied, run.model, 1.0)
    assert (whole(untied)["second"] == whole(run.model)["first"]).all()
    return said


def _untie(model: Any) -> None:
    model.second = model.create_parameter([11, 9])
