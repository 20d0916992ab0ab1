"""The small training whose checkpoints are kept for ever, in each way that a model can be trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu

STEPS = 2
KINDS = ("ours", "paddle", "plain")
"""With our runtime, with Paddle's own, and a plain model, each on two ranks."""


@contextmanager
def make(kind: str) -> Iterator[tuple[nn.Layer, Any]]:
    """Make the model and its optimizer, always with the same weights."""
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))
    for number, parameter in enumerate(model.parameters()):
        values = np.sin(np.arange(parameter.size) + number).astype("float32").reshape(parameter.shape)
        parameter.set_value(values)
    if kind == "paddle":
        from paddle.distributed.fsdp import fully_shard

        with paddle_runtime_on_cpu():
            mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
            dist.auto_parallel.set_mesh(mesh)
            fully_shard(model, mesh=mesh)
            yield model, paddle.optimizer.Adam(0.1, parameters=model.parameters())
        return
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    if kind == "ours":
        ckpt.fully_shard(model, optimizer=optimizer)
    yield model, optimizer


def train(kind: str, model: nn.Layer, optimizer: Any) -> None:
    """Train on the same batch on every rank, so that the mean over ranks is what one process computes."""
    batch = paddle.to_tensor(np.cos(np.arange(24)).astype("float32").reshape(6, 4))
    if kind == "paddle":
        batch = dist.auto_parallel.api.dtensor_from_local(batch, dist.auto_parallel.get_mesh(), [dist.Shard(0)])
    for _ in range(STEPS):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()


def save(kind: str, path: str) -> None:
    with make(kind) as (model, optimizer):
        train(kind, model, optimizer)
        ckpt.save(path, model=model, optimizer=optimizer, step=STEPS, extra_state={"kind": kind, "loss": float("inf")})


def expected() -> dict[str, np.ndarray]:
    """Return what a checkpoint must hold: Paddle's own values after the training in one process, without this package."""
    with make("plain") as (model, optimizer):
        train("plain", model, optimizer)
        states = optimizer.state_dict()
        values = {}
        for name, parameter in model.named_parameters():
            values[name] = parameter.numpy()
            for state in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"):
                values[f"{name}.{state}"] = states[f"{parameter.name}_{state}"].numpy()
        return values


def load(path: str) -> tuple[int, Any, dict[str, Any]]:
    """Load into our runtime; return the step, the extra state, and what this rank then keeps of each parameter."""
    with make("ours") as (model, optimizer):
        report = ckpt.load(path, model=model, optimizer=optimizer)
        weights = {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(optimizer)}
        pieces = {
            key: (one.flattened_range if one.is_flattened else slice(0, int(one.local_tensor.size)), one.local_tensor.numpy().reshape(-1))
            for key, one in weights.items()
        }
        return report.step, report.extra_state, {key: (flat.start, flat.stop, values) for key, (flat, values) in pieces.items()}
