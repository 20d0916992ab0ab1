"""Models and trainings of which Paddle's own runtime makes something else than an unsharded run does; and what tells that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from adapter_cases import cut
from fused_cases import FEATURES, GLOBAL_BATCH, Blocks, WithoutEmbeddings, _share
from harness import this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt

Batches = Callable[[int], tuple[paddle.Tensor, paddle.Tensor]]
Stepper = Callable[[nn.Layer], Any]


def sgd(model: nn.Layer) -> Any:
    """Shows a wrong scale of a gradient, as Adam doesn't."""
    return paddle.optimizer.SGD(0.003, parameters=model.parameters())


def momentum(model: nn.Layer) -> Any:
    """Goes on moving weights whose gradient is zero."""
    return paddle.optimizer.Momentum(0.003, parameters=model.parameters(), weight_decay=0.1)


class Skipping(Blocks):
    """Skips blocks."""

    skipped: tuple[int, ...] = ()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return self.head(x)


class PartlyUnused(Blocks):
    """The buffer of the head has parameters that no step uses."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.unused = nn.Linear(3, 3)


class UnusedInBlock(Blocks):
    """Paddle's runtime waits for ever in the first backward."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.blocks[1].unused = nn.Linear(3, 3)


def whole_batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    batch = paddle.to_tensor(np.random.RandomState(step).randn(GLOBAL_BATCH, FEATURES).astype("float32"))
    return batch, batch.sum(-1, keepdim=True)


def shared_batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    batch, target = whole_batch(step)
    return _share(batch), _share(target)


def local_batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """This rank's rows, as no distributed tensor."""
    place = this_rank()
    rows = GLOBAL_BATCH // place.world_size
    batch, target = whole_batch(step)
    return batch[place.rank * rows :][:rows], target[place.rank * rows :][:rows]


def backward(model: nn.Layer, batches: Batches, step: int, scale: float = 1.0) -> float:
    batch, target = batches(step)
    loss = (model(batch) - target).square().mean() * scale
    loss.backward()
    return float(np.asarray(loss.numpy()))


def update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.clear_grad()


def plainly(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    losses = []
    for step in range(5):
        losses.append(backward(model, batches, step))
        update(optimizer)
    return losses


def skipping(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    """The second block is not used in three steps, and goes on moving meanwhile."""
    losses = []
    for step in range(7):
        model.skipped = (1,) if step in (1, 2, 3) else ()
        losses.append(backward(model, batches, step))
        update(optimizer)
    return losses


def accumulating(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    losses = []
    for step in range(4):
        losses.append(sum(backward(model, batches, 10 * step + part, 0.5) for part in range(2)))
        update(optimizer)
    return losses


def both_backwards_after_both_forwards(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    losses = []
    for step in range(4):
        parts = []
        for part in range(2):
            batch, target = batches(10 * step + part)
            parts.append((model(batch) - target).square().mean() * 0.5)
        for loss in parts:
            loss.backward()
        update(optimizer)
        losses.append(sum(float(np.asarray(loss.numpy())) for loss in parts))
    return losses


def clearing(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    """A backward that is thrown away, and three steps."""
    losses = []
    for step, clear in enumerate((optimizer.clear_grad, optimizer.clear_gradients, model.clear_gradients)):
        backward(model, batches, 77)
        clear()
        losses.append(backward(model, batches, step))
        update(optimizer)
    return losses


def one_block() -> nn.Layer:
    return Blocks(blocks=1)


def frozen_first() -> nn.Layer:
    model = Blocks(blocks=1)
    model.embed.weight.stop_gradient = True
    return model


SILENT: dict[str, tuple[Callable[[], nn.Layer], Stepper, Callable[..., list[float]]]] = {
    "a layer that steps skip": (Skipping, momentum, skipping),
    "accumulation": (one_block, sgd, accumulating),
    "accumulation, backwards after forwards": (one_block, sgd, both_backwards_after_both_forwards),
    "unused parameters": (PartlyUnused, sgd, plainly),
    "unused parameters, accumulation": (PartlyUnused, sgd, accumulating),
    "clearing without a step": (Blocks, sgd, clearing),
}
"""Models and trainings that Paddle's runtime gets wrong without an error."""

ENDLESS = {
    "unused parameters of a block": (UnusedInBlock, sgd, plainly),
    "a buffer before and after the blocks": (WithoutEmbeddings, sgd, plainly),
    "a buffer before and after the blocks, accumulation": (WithoutEmbeddings, sgd, accumulating),
}
"""Those in which it waits for ever."""


RIGHT = {"frozen before what is trained": (frozen_first, sgd, plainly)}
"""Those that it gets right by itself."""

EVERY = {**SILENT, **ENDLESS, **RIGHT}


def unsharded(case: str) -> list[float]:
    make, stepper, training = EVERY[case]
    paddle.seed(1)
    model = make()
    return training(model, stepper(model), whole_batch)


def sharded(case: str, repair: bool) -> list[float]:
    make, stepper, training = EVERY[case]
    paddle.seed(1)
    with cut(model := make()):
        optimizer = stepper(model)
        if not repair:
            return training(model, optimizer, shared_batch)
        with ckpt.repair_paddle_runtime(model, optimizer):
            return training(model, optimizer, shared_batch)


def pieces(model: nn.Layer) -> dict[str, np.ndarray]:
    return {name: one.local_tensor.numpy().copy() for name, one in ckpt.sharded_state_dict(model).items()}


def differ(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return any((values != other[name]).any() for name, values in one.items())


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        return [str(one.message) for one in caught]
