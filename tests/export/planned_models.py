"""Models made of names and shapes alone, with the layers that the names tell of, sharded on real ranks."""

from __future__ import annotations

import tracemalloc
from typing import Any

import paddle
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.layout import FlatBuffer
from paddle_fsdp_ckpt.optim import StateKind, optimizer_states

Units = list[tuple[str, list[tuple[list[str], list[int], str]]]]


class Block(nn.Layer):
    """What computes by itself is a block where it is one of several."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x


def _child(layer: nn.Layer, name: str, following: str) -> nn.Layer:
    if name not in layer._sub_layers:
        layer.add_sublayer(name, nn.LayerList() if following.isdigit() else Block() if name.isdigit() else nn.Layer())
    return layer._sub_layers[name]


def build(units: Units) -> nn.Layer:
    model = nn.Layer()
    for _, parameters in units:
        for names, shape, dtype in parameters:
            made: Any = None
            for name in names:
                layer, (*path, last) = model, name.split(".")
                for part, following in zip(path, [*path[1:], ""], strict=True):
                    layer = _child(layer, part, following)
                if made is None:
                    made = layer.create_parameter(shape, dtype=dtype, default_initializer=nn.initializer.Constant(1.0))
                layer.add_parameter(last, made)
    return model


def shard_and_save(path: str, units: Units, optimizer: str, options: dict[str, Any]) -> tuple[list[FlatBuffer], dict[str, int], list[str]]:
    """Return the flat buffers, what this rank keeps in bytes, and the units' names."""
    model = build(units)
    stepper = getattr(paddle.optimizer, optimizer)(parameters=model.parameters(), learning_rate=0.1, **options)
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    runtime = runtime_of(model)
    assert runtime is not None
    parameters, _ = runtime.memory_bytes()
    for buffer in runtime.buffers:
        buffer.gradient_shard()
    kept = {"parameters": parameters, "gradients": runtime.memory_bytes()[0] - parameters, "states": 0, "master_weights": 0}
    for state in optimizer_states(stepper):
        if state.kind is not StateKind.SCALAR or state.shard.range.start == 0:
            kind = "master_weights" if state.suffix == "w_0" else "states"
            kept[kind] += int(state.tensor.size) * int(state.tensor.element_size())
    ckpt.save(path, model=model, optimizer=stepper)
    return [buffer.layout for buffer in runtime.buffers], kept, [unit.name for unit in runtime.units]


def peaks(path: str, units: Units) -> tuple[int, int]:
    """Return the most memory that Python's objects had in a second save, and in a second load."""
    model = build(units)
    stepper = paddle.optimizer.AdamW(parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    found = []
    for call in (
        lambda: ckpt.save(path, model=model, optimizer=stepper, overwrite=True),
        lambda: ckpt.load(path, model=model, optimizer=stepper),
    ):
        call()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found.append(peak - before)
    return found[0], found[1]
