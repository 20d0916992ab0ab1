"""Gradients that are minus zero, and stay so; run on the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

import paddle_fsdp_ckpt as ckpt


class Two(nn.Layer):
    """The second layer trains, and no optimizer steps it or clears its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stepped(x) + self.other(x)


def _step(model: nn.Layer, optimizer: Any) -> list[bytes]:
    """The bits of this rank's gradients: those of the weight are minus zero."""
    (-model(paddle.zeros([1, 2])).sum()).backward()
    found = [np.asarray(one.grad.numpy()).tobytes() for one in model.stepped.parameters() if one.grad is not None]
    optimizer.step()
    optimizer.clear_grad()
    return found


def steps_around_a_load(path: str, sharded: bool) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """The gradients of the first step, of one after a save, and of one after a load into another model."""
    found = []
    for resumes in (False, True):
        paddle.seed(int(resumes))
        model = Two()
        optimizer = paddle.optimizer.Momentum(0.1, parameters=model.stepped.parameters())
        if sharded:
            ckpt.fully_shard(model, optimizer=optimizer, unit_layers=[Two])
        if resumes:
            ckpt.load(path, model=model, optimizer=optimizer)
        else:
            found.append(_step(model, optimizer))
            ckpt.save(path, model=model, optimizer=optimizer)
        found.append(_step(model, optimizer))
    first, went_on, resumed = found
    return first, went_on, resumed
