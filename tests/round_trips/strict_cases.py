"""Loads and saves that must be refused, and what runs on the ranks to show that nothing changed by them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from checkpoint_cases import OPTIMIZERS, VOCABULARY, Tied, held, train
from harness import this_rank
from paddle import nn
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.host_memory import bytes_of

Snapshot = dict[str, Any]


def copied(tensor: paddle.Tensor | None) -> bytes | None:
    return None if tensor is None else bytes(bytes_of(tensor))


def snapshot(model: nn.Layer, *optimizers: Any) -> Snapshot:
    """Everything that a save or a refused load must leave as it is, without any collective and without creating anything."""
    state = paddle.get_rng_state()
    found: Snapshot = {"rng": paddle.rand([4]).tolist(), "numpy": np.random.get_state()[1].tolist(), "random": random.getstate()}
    paddle.set_rng_state(state)
    runtime = runtime_of(model)
    for name, parameter in model.named_parameters():
        found[f"{name}.stop_gradient"] = parameter.stop_gradient
        found[f"{name}.shape"] = list(parameter.shape)
        if runtime is None:
            found[name] = copied(parameter)
            found[f"{name}.grad"] = copied(parameter.grad)
    for name, buffer in model.named_buffers():
        found[name] = copied(buffer)
    for shard in [] if runtime is None else runtime.shards:
        found[shard.slot.name] = copied(shard.local)
        found[f"{shard.slot.name}.flags"] = (shard.has_gradient, shard.got_gradient)
    for buffer in [] if runtime is None else runtime.buffers:
        found[f"{buffer.layout.name}.gradients"] = (copied(buffer._gradient_shard), copied(buffer._whole_gradient), len(buffer._zeros))
    for unit in [] if runtime is None else runtime.units:
        found[f"{unit.name}.unit"] = (unit.generation, unit.in_backward, unit.backward_calls)
    for number, optimizer in enumerate(optimizers):
        for accumulator, tensors in optimizer._accumulators.items():
            for owner, tensor in tensors.items():
                found[f"{number}/{accumulator}/{owner}"] = (copied(tensor), list(tensor.shape), tensor.name)
        for owner, tensor in optimizer._master_weights.items():
            found[f"{number}/master/{owner}"] = (copied(tensor), tensor.name)
        plain = {
            key: value
            for key, value in optimizer.__dict__.items()
            if isinstance(value, (int, float, str, set, list)) and "param" not in key
        }
        found[f"{number}/settings"] = repr(
            sorted((key, sorted(map(str, value)) if isinstance(value, (set, list)) else value) for key, value in plain.items())
        )
    return found


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if key not in before or key not in after or before[key] != after[key])


def backward(model: nn.Layer, step: int = 7, dtype: str | None = None) -> None:
    """Leave gradients, as in the middle of an accumulation."""
    tokens = paddle.to_tensor(np.random.RandomState(step).randint(0, VOCABULARY, [4, 5]))
    F.cross_entropy(model(tokens).reshape([-1, VOCABULARY]), tokens.reshape([-1])).backward()


class Wrapped(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self._layers = Tied()

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self._layers(tokens)


class More(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.extra(super().forward(tokens))


class Other(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.table(tokens)


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.out.weight = paddle.create_parameter(self.embed.weight.shape, "float32")


def double() -> nn.Layer:
    paddle.set_default_dtype("float64")
    return Tied()


def wide() -> nn.Layer:
    return Tied(width=11)


def short() -> nn.Layer:
    return Tied(blocks=1)


MODELS: dict[str, Callable[[], nn.Layer]] = {
    "base": Tied,
    "wrapped": Wrapped,
    "more": More,
    "other": Other,
    "untied": Untied,
    "double": double,
    "wide": wide,
    "short": short,
}


def make(model: str, optimizer: str | None = "adamw", seed: int = 1) -> tuple[nn.Layer, Any]:
    paddle.seed(seed)
    made = MODELS[model]()
    stepper = OPTIMIZERS[optimizer](made) if optimizer else None
    ckpt.fully_shard(made, optimizer=stepper)
    return made, stepper


def save_base(path: str, model: str = "base", optimizer: str | None = "adamw", steps: int = 2) -> None:
    made, stepper = make(model, optimizer)
    if stepper is not None:
        train(made, stepper, 0, steps)
    ckpt.save(path, model=made, optimizer=stepper, step=steps)


Refusal = tuple[str, str, list[str]]
"""Name of the exception, its message, and what it changed."""


def attempt(call: Callable[[], Any], model: nn.Layer, *optimizers: Any) -> Refusal:
    before = snapshot(model, *optimizers)
    try:
        call()
    except ckpt.CheckpointError as error:
        return type(error).__name__, str(error), changes(before, snapshot(model, *optimizers))
    raise AssertionError("nothing was raised")


def refused_load(paths: list[str], model: str, optimizer: str | None, fresh: bool, with_optimizer: bool = True) -> Refusal:
    """Load what doesn't fit, in the middle of an accumulation; then see that training, saving and a right load still work.

    Args:
        paths: of the checkpoint, on each rank.
        fresh: the optimizer has no states yet.
    """
    made, stepper = make(model, optimizer, seed=3)
    if not fresh and stepper is not None:
        train(made, stepper, 40, 42)
    backward(made)
    given = stepper if with_optimizer else None
    result = attempt(
        lambda: ckpt.load(paths[this_rank().rank % len(paths)], model=made, optimizer=given, timeout_seconds=30),
        made,
        *[stepper] * (stepper is not None),
    )
    if stepper is not None:
        stepper.clear_grad()
        train(made, stepper, 42, 43)
        right = held(made, stepper)
        path = Path(paths[0]).parent / f"right {model} {optimizer}"
        ckpt.save(path, model=made, optimizer=stepper, overwrite=True)
        train(made, stepper, 43, 44)
        ckpt.load(path, model=made, optimizer=stepper)
        now = held(made, stepper)
        assert now.keys() == right.keys()
        for key, piece in right.items():
            np.testing.assert_array_equal(now[key].values, piece.values, err_msg=key)
    return result


def forward_then_refused_load_then_backward(path: str) -> bool:
    """A refused load between a forward and its backward; the gradients are those of a run without it."""
    gradients = []
    for disturb in (False, True):
        made, stepper = make("more", seed=4)
        train(made, stepper, 0, 1)
        tokens = paddle.to_tensor(np.random.RandomState(1).randint(0, VOCABULARY, [4, 5]))
        loss = F.cross_entropy(made(tokens).reshape([-1, VOCABULARY]), tokens.reshape([-1]))
        if disturb:
            with suppress(ckpt.CheckpointError):
                ckpt.load(path, model=made, optimizer=stepper)
        loss.backward()
        gradients.append([copied(parameter.grad) for parameter in made.parameters()])
    return gradients[0] == gradients[1]
