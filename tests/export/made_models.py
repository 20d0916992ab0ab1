"""Models of known values, saved by real ranks: layers with just the names that the arrays have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.demo.model import CausalLM, DecoderConfig


def build(arrays: Mapping[str, np.ndarray], dtype: str, tied: Mapping[str, str]) -> nn.Layer:
    """Return a layer whose ``state_dict`` has these names and values; those in ``tied`` are the parameter of another name."""
    made = nn.Layer()
    parameters: dict[str, Any] = {}
    for name in [*arrays, *tied]:
        layer = made
        *path, last = name.split(".")
        for part in path:
            if part not in layer._sub_layers:
                layer.add_sublayer(part, nn.Layer())
            layer = layer._sub_layers[part]
        if name in tied:
            parameters[name] = parameters[tied[name]]
        else:
            values = paddle.to_tensor(arrays[name])
            parameters[name] = layer.create_parameter(list(arrays[name].shape), dtype=dtype)
            parameters[name].set_value(values.astype(dtype))
        layer.add_parameter(last, parameters[name])
    return made


def save_model(
    path: str, arrays: Mapping[str, np.ndarray], dtype: str = "float32", tied: Mapping[str, str] | None = None, optimizer: bool = False
) -> None:
    """Save a sharded model; with an optimizer, whose master weights, where there are any, are the arrays as they were before the cast."""
    model = build(arrays, dtype, tied or {})
    if not optimizer:
        ckpt.fully_shard(model, optimizer=None)
        ckpt.save(path, model=model, step=3)
        return
    stepper = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    for key, weight in ckpt.optimizer_sharded_state_dict(stepper).items():
        owner, _, state = key.rpartition(".")
        if state == "w_0":
            flat = arrays[(tied or {}).get(owner, owner)].reshape(-1)
            here = flat[weight.flattened_range] if weight.is_flattened else flat.reshape(weight.local_shape)
            paddle.assign(paddle.to_tensor(here), output=weight.local_tensor)
    ckpt.save(path, model=model, optimizer=stepper, step=3)


def save_with_stock(path: str, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
    """Save with Paddle's own function, which doesn't note what is tied."""
    model = build(arrays, "float32", tied)
    ckpt.fully_shard(model, optimizer=None)
    paddle.distributed.save_state_dict(ckpt.sharded_state_dict(model), path)


def save_constant(path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Save large parameters, each full of its number."""
    model = build({name: np.zeros(1, np.float32) for name in shapes}, "float32", {})
    for number, (name, shape) in enumerate(shapes.items()):
        owner, last = name.rpartition(".")[::2]
        layer = model._sub_layers[owner]
        made = layer.create_parameter(list(shape), default_initializer=nn.initializer.Constant(float(number)))
        layer.add_parameter(last, made)
    ckpt.fully_shard(model, optimizer=None)
    ckpt.save(path, model=model)


def save_demo(path: str, experts: int, tied: bool) -> dict[str, np.ndarray]:
    """Save the demo's model, and return its values from before it was sharded."""
    paddle.seed(11)
    model = CausalLM(
        DecoderConfig(19, 16, 12, 2, 4, 2, 4, tie_word_embeddings=tied, num_experts=experts, num_experts_per_tok=min(experts, 2))
    )
    values = {name: parameter.numpy() for name, parameter in model.state_dict().items()}
    ckpt.fully_shard(model, optimizer=None)
    ckpt.save(path, model=model)
    return values
