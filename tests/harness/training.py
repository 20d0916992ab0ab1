"""A training loop, and what it left, for several tests. The harness itself does not import it, nor Paddle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

import paddle_fsdp_ckpt as ckpt

from .pieces import StatePiece
from .rank import this_rank


def train_on_tokens(
    loss_of: Callable[[paddle.Tensor], paddle.Tensor],
    optimizer: Any,
    steps: range,
    *,
    vocabulary: int,
    shape: tuple[int, int],
    alone: bool = False,
) -> list[float]:
    """Do what :func:`train_on_rows` does, on random tokens.

    Args:
        loss_of: see there; this and what isn't here.
        optimizer: see there.
        steps: see there.
        vocabulary: how many tokens there are.
        shape: of a global batch: rows, and their length.
        alone: see there.
    """
    return train_on_rows(loss_of, optimizer, steps, lambda step: np.random.RandomState(step).randint(0, vocabulary, shape), alone=alone)


def train_on_rows(
    loss_of: Callable[[paddle.Tensor], paddle.Tensor],
    optimizer: Any,
    steps: range,
    batch_of: Callable[[int], np.ndarray],
    *,
    alone: bool = False,
) -> list[float]:
    """Train on this rank's rows of each step's batch, or ``alone`` on all, and return the losses over all rows.

    Args:
        loss_of: the mean loss over rows.
        optimizer: of the parameters that it uses.
        steps: their numbers.
        batch_of: returns a step's global batch, whose rows the number of ranks divides.
        alone: whether this process trains by itself.
    """
    rank, ranks = (0, 1) if alone else (this_rank().rank, this_rank().world_size)
    losses = []
    for step in steps:
        every = batch_of(step)
        rows = len(every) // ranks
        loss = loss_of(paddle.to_tensor(every[rank * rows :][:rows]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        value = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(value)
        losses.append(value.item() / ranks)
    return losses


def held(model: nn.Layer, optimizer: Any) -> dict[str, StatePiece]:
    """Copy what this rank holds of a sharded model and of its optimizer; bfloat16 as its bits."""
    pieces = {}
    for key, weight in {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(optimizer)}.items():
        flat = (weight.flattened_range.start, weight.flattened_range.stop) if weight.is_flattened else None
        values = weight.local_tensor.numpy().copy()
        pieces[key] = StatePiece(tuple(weight.global_shape), tuple(weight.global_offset), tuple(weight.local_shape), flat, values)
    return pieces
