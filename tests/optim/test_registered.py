"""Optimizers from elsewhere: subclasses that step as their base does work, others when they are registered, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import errors
from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.layout import Slot
from paddle_fsdp_ckpt.optim import WholeParameter, describe_hyperparameters, differences, entry_of, register_optimizer

Ranks = Callable[[int], RankPool]
ROWS = 12


class Halved(paddle.optimizer.AdamW):  # type: ignore[misc]
    """AdamW with another constructor, and a method of its own."""

    def __init__(self, learning_rate: float, **options: Any) -> None:
        super().__init__(learning_rate / 2, **options)

    def rate(self) -> float:
        return float(self.get_lr())


class Mixin:
    def hello(self) -> str:
        return type(self).__name__


class Mixed(Mixin, Halved):
    """Two steps from AdamW."""


class Lion(paddle.optimizer.Optimizer):  # type: ignore[misc]
    """Of one's own: steps by the sign of a mean that forgets, https://arxiv.org/abs/2302.06675, and counts its steps."""

    def __init__(self, learning_rate: float, beta1: float = 0.9, beta2: float = 0.99, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        self._default_dict = {"beta1": beta1, "beta2": beta2}
        self._beta1, self._beta2 = beta1, beta2

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        for parameter in parameters:
            if parameter.name not in self._already_create_accumulator:
                self._add_accumulator("_mean", parameter)
                self._add_accumulator("count", parameter, shape=[1], fill_value=0.0)
                self._already_create_accumulator.add(parameter.name)

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        parameter, gradient = param_and_grad
        mean = self._get_accumulator("_mean", parameter)
        count = self._get_accumulator("count", parameter)
        direction = paddle.sign(self._beta1 * mean + (1 - self._beta1) * gradient)
        paddle.assign(parameter - self.get_lr() / (1 + 0.1 * count) * direction, parameter)
        paddle.assign(self._beta2 * mean + (1 - self._beta2) * gradient, mean)
        paddle.assign(count + 1, count)


class Normed(paddle.optimizer.SGD):  # type: ignore[misc]
    """Divides by the norm of the gradient, so that pieces would go wrong."""

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> Any:
        parameter, gradient = param_and_grad
        return super()._append_optimize_op(block, (parameter, gradient / gradient.norm()))


class Renamed(paddle.optimizer.Momentum):  # type: ignore[misc]
    _velocity_acc_str = "speed"


class LikeLamb(paddle.optimizer.Lamb):  # type: ignore[misc]
    pass


class BelowLion(Lion):
    def __init__(self, learning_rate: float, **options: Any) -> None:
        super().__init__(learning_rate, **options)


def net() -> nn.Layer:
    paddle.seed(3)
    return nn.Sequential(nn.Linear(3, 75), nn.GELU(), nn.Linear(75, 2))


def train(model: nn.Layer, optimizer: Any, first: int, last: int, sharded: bool = True) -> None:
    place = this_rank()
    rows = ROWS // place.world_size if sharded else ROWS
    start = rows * place.rank if sharded else 0
    for step in range(first, last):
        x = np.random.RandomState(step).standard_normal([ROWS, 3]).astype("float32")[start : start + rows]
        model(paddle.to_tensor(x)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()


OPTIMIZERS: dict[str, Callable[[nn.Layer], Any]] = {
    "subclass": lambda m: Halved(0.02, parameters=m.parameters(), epsilon=1e-4),
    "subclass of a subclass": lambda m: Mixed(0.02, parameters=m.parameters(), epsilon=1e-4),
    "registered": lambda m: Lion(0.01, parameters=m.parameters(), name="mine"),
    "below a registered one": lambda m: BelowLion(0.01, parameters=m.parameters()),
}


def register() -> None:
    assert register_optimizer(Lion, elementwise=["mean"], scalar=["count"]) is Lion


def compare_and_save(name: str, path: str) -> dict[str, np.ndarray]:
    """Parity with the plain run in this process; returns this rank's state three steps after the save."""
    register()
    plain = net()
    train(plain, right := OPTIMIZERS[name](plain), 0, 3, sharded=False)
    model = net()
    optimizer = OPTIMIZERS[name](model)
    ckpt.fully_shard(model, optimizer=optimizer)
    train(model, optimizer, 0, 3)
    wanted = dict(plain.named_parameters())
    runtime = runtime_of(model)
    assert runtime is not None
    for one in runtime.shards:
        part = wanted[one.slot.name].numpy().reshape(-1)[one.range.start : one.range.stop]
        np.testing.assert_allclose(one.local.numpy(), part, rtol=1e-4, atol=1e-5)
    held = [WholeParameter(Slot((key,), tuple(p.shape), 0), p) for key, p in plain.named_parameters()]
    assert differences(describe_hyperparameters(right, held), describe_hyperparameters(optimizer, runtime.shards)) == []
    ckpt.save(path, model=model, optimizer=optimizer)
    train(model, optimizer, 3, 6)
    return state(model, optimizer)


def state(model: nn.Layer, optimizer: Any) -> dict[str, np.ndarray]:
    weights = {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(optimizer)}
    return {key: weight.local_tensor.numpy().copy() for key, weight in weights.items()}


def resume(name: str, path: str) -> dict[str, np.ndarray]:
    register()
    model = net()
    optimizer = OPTIMIZERS[name](model)
    ckpt.fully_shard(model, optimizer=optimizer)
    train(model, optimizer, 50, 52)
    ckpt.load(path, model=model, optimizer=optimizer)
    train(model, optimizer, 3, 6)
    return state(model, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_and_resumes(name: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    uninterrupted = ranks(2).run(compare_and_save, name, path)
    for resumed, right in zip(ranks(2).run(resume, name, path), uninterrupted, strict=True):
        assert resumed.keys() == right.keys()
        for key, values in right.items():
            np.testing.assert_array_equal(resumed[key], values, err_msg=key)
    states = {key.rpartition(".")[2] for key in uninterrupted[0] if key.endswith("_0")}
    assert states == ({"mean_0", "count_0"} if "registered" in name else {"moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"})
    ranks(3).run(resume, name, path)


def refusal(cls: type, **attributes: Any) -> str:
    model = net()
    optimizer = cls(0.1, parameters=model.parameters())
    vars(optimizer).update(attributes)
    with pytest.raises(errors.UnsupportedOptimizerError) as caught:
        ckpt.fully_shard(model, optimizer=optimizer)
    assert all(parameter._is_initialized() for parameter in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Normed, "Normed can't step a sharded model: it has its own _append_optimize_op, so its update may be another than SGD's"),
        (Renamed, "Renamed can't step a sharded model: it has its own _velocity_acc_str"),
        (LikeLamb, "LikeLamb can't step a sharded model; supported are Adam"),
        (Lion, "Lion can't step a sharded model; supported are Adam"),
    ],
)
def test_what_is_not_known_is_refused(cls: type, words: str, fresh_ranks: Ranks) -> None:
    message = fresh_ranks(1).run(refusal, cls)[0]
    assert words in message
    assert "register_optimizer" in message


def another_update(self: Any, *_: Any) -> None:
    """Nothing."""


def changed_object() -> str:
    return refusal(paddle.optimizer.SGD, _append_optimize_op=another_update)


def test_an_object_with_an_update_of_its_own_is_refused(single: RankPool) -> None:
    assert "this object has its own _append_optimize_op" in single.run(changed_object)[0]


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no optimizer": (nn.Linear, {}, "is not a subclass of paddle.optimizer.Optimizer"),
    "no class": (3, {}, "3 is not a subclass"),
    "known": (paddle.optimizer.AdamW, {}, "AdamW is known already"),
    "refused": (paddle.optimizer.Lamb, {}, "Lamb is known, and can't be registered: its trust ratio"),
    "updates as a refused one": (LikeLamb, {}, "LikeLamb updates as Lamb does: its trust ratio"),
    "no update": (type("Empty", (paddle.optimizer.Optimizer,), {}), {}, "updates as Optimizer does: it is the base"),
    "twice": (Normed, {"elementwise": ["a"], "scalar": ["a"]}, "name each accumulator once, without leading underscores, not 'a'"),
    "underscore": (Normed, {"stacked": ["_a"]}, "without leading underscores, not '_a'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_registrations(case: str) -> None:
    cls, states, words = BAD[case]
    with pytest.raises(errors.UnsupportedOptimizerError, match="register_optimizer: ") as caught:
        register_optimizer(cls, **states)
    assert words in str(caught.value)


def test_a_class_is_registered_once() -> None:
    class Mine(paddle.optimizer.SGD):  # type: ignore[misc]
        def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
            """Nothing."""

    optimizer = Mine(0.1, parameters=net().parameters())
    register_optimizer(Mine)
    register_optimizer(Mine)
    assert entry_of(optimizer).states == {}
    with pytest.raises(errors.UnsupportedOptimizerError, match="registered with other states already"):
        register_optimizer(Mine, scalar=["count"])

    class Below(Mine):
        def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
            """Something else."""

    with pytest.raises(errors.UnsupportedOptimizerError, match="update may be another than Mine's"):
        entry_of(Below(0.1, parameters=net().parameters()))


class Wrong(Lion):
    """Registered with less than it keeps, or with another kind."""

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        super()._create_accumulators(block, parameters)


def registered_wrongly(states: dict[str, Any], path: str) -> str:
    register_optimizer(Wrong, **states)
    model = net()
    optimizer = Wrong(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    with pytest.raises(errors.CheckpointError) as caught:
        train_and_save(model, optimizer, path)
    return str(caught.value)


def train_and_save(model: nn.Layer, optimizer: Any, path: str) -> None:
    train(model, optimizer, 0, 1)
    ckpt.save(path, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ({"elementwise": ["mean"]}, "keeps a state 'count' that is not in the table"),
        ({"elementwise": ["mean", "count"]}, "has shape [1], and is one value an element"),
        ({"scalar": ["mean", "count"]}, "and is one value a parameter"),
    ],
)
def test_states_that_are_not_as_registered_are_found(states: dict[str, Any], words: str, tmp_path: Path, fresh_ranks: Ranks) -> None:
    assert words in fresh_ranks(1).run(registered_wrongly, states, str(tmp_path / "checkpoint"))[0]
