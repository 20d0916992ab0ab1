"""Models with LoRA layers of known values, saved by real ranks: whole, without their base, and the base alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle
from made_models import build, set_masters
from paddle import nn

import paddle_fsdp_ckpt as ckpt

Arrays = dict[str, np.ndarray]


def adapters_for(keys: Collection[str], arrays: Mapping[str, np.ndarray], ranks: Mapping[str, int]) -> Arrays:
    """LoRA matrices for the weights under these keys, of rank 2 where ``ranks`` doesn't say otherwise."""
    random = np.random.RandomState(5)
    found: Arrays = {}
    for key in keys:
        layer, (fan_in, fan_out) = key.removesuffix(".weight"), arrays[key].shape
        rank = ranks.get(layer, 2)
        found[f"{layer}.lora_A"] = random.standard_normal((fan_in, rank)).astype(np.float32)
        found[f"{layer}.lora_B"] = random.standard_normal((rank, fan_out)).astype(np.float32)
    return found


def merged(arrays: Mapping[str, np.ndarray], adapters: Mapping[str, np.ndarray], scalings: Mapping[str, float]) -> Arrays:
    """The base with the adapters added, in float64 and rounded once."""
    found = dict(arrays)
    for layer, scaling in scalings.items():
        a, b = (adapters[f"{layer}.lora_{one}"].astype(np.float64) for one in "AB")
        found[f"{layer}.weight"] = (arrays[f"{layer}.weight"].astype(np.float64) + a * scaling @ b).astype(np.float32)
    return found


def _layer(model: nn.Layer, name: str) -> Any:
    for part in name.split("."):
        model = model._sub_layers[part]
    return model


def save_lora(
    root: str, arrays: Arrays, adapters: Arrays, scalings: Mapping[str, float], trains: Collection[str] = (), dtype: str = "float32"
) -> None:
    """Save ``full``, which holds all; ``adapters``, what trains only; and ``base``, the rest by itself. ``trains`` are more that train."""
    model = build({**arrays, **adapters}, dtype, {})
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = ".lora_" not in name and name not in trains
    for name, scaling in scalings.items():
        _layer(model, name).scaling = scaling
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.save(f"{root}/full", model=model, optimizer=optimizer, step=7)
    ckpt.save(f"{root}/adapters", model=model, optimizer=optimizer, step=7, trainable_only=True)
    wrapper = nn.Layer()
    wrapper.model = build({**arrays, **adapters}, dtype, {})
    for name, parameter in wrapper.named_parameters():
        parameter.stop_gradient = ".lora_" not in name
    for name, scaling in scalings.items():
        _layer(wrapper.model, name).scaling = scaling
    ckpt.fully_shard(wrapper, optimizer=None)
    ckpt.save(f"{root}/wrapped", model=wrapper, trainable_only=True)
    ckpt.save(f"{root}/wrapped full", model=wrapper)
    base = build({name: array * 2 if name in trains else array for name, array in arrays.items()}, dtype, {})
    ckpt.fully_shard(base, optimizer=None)
    ckpt.save(f"{root}/base", model=base)
    other = build({name: array if "norm" in name else array + 1 for name, array in arrays.items()}, dtype, {})
    ckpt.fully_shard(other, optimizer=None)
    ckpt.save(f"{root}/other", model=other)


def save_plainly(path: str, arrays: Arrays) -> None:
    model = build(arrays, "float32", {})
    ckpt.fully_shard(model, optimizer=None)
    ckpt.save(path, model=model)


def save_trained_head(root: str) -> None:
    """Save what trains of a model with a LoRA layer and a head that trains too: ``wrapped`` in another, and ``several``, as ``actor``."""
    weight = "model.layers.0.self_attn.o_proj.weight"
    arrays = {weight: np.ones((6, 6), np.float32), "lm_head.weight": np.ones((4, 6), np.float32)}
    for name, wrapper in (("wrapped", nn.Layer()), ("several", None)):
        model = build(arrays | adapters_for([weight], arrays, {}), "float32", {})
        _layer(model, weight.removesuffix(".weight")).scaling = 2.0
        for key, parameter in model.named_parameters():
            parameter.stop_gradient = key == weight
        if wrapper is not None:
            wrapper.model = model
        outer = wrapper or model
        optimizer = paddle.optimizer.SGD(0.1, parameters=outer.parameters())
        ckpt.fully_shard(outer, optimizer=optimizer)
        ckpt.save(f"{root}/{name}", model={"actor": model} if wrapper is None else outer, optimizer=optimizer, trainable_only=True)


def save_what_trained(
    path: str, arrays: Arrays, trains: Collection[str], scalings: Mapping[str, float], dtype: str, tied: Mapping[str, str]
) -> None:
    """Save what trains of a model of these arrays, LoRA matrices among them; master weights, where there are any, are the arrays."""
    model = build(arrays, dtype, tied)
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = ".lora_" not in name and name not in trains
    for name, scaling in scalings.items():
        _layer(model, name).scaling = scaling
    trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    optimizer = paddle.optimizer.AdamW(parameters=trained, multi_precision=True)
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.init_optimizer_state(optimizer)
    set_masters(optimizer, arrays, tied)
    ckpt.save(path, model=model, optimizer=optimizer, trainable_only=True)


def save_layers(path: str, layers: Mapping[str, float], others: Collection[str]) -> None:
    """Save what trains of a model with these LoRA layers, each of its scaling, and other layers."""
    arrays = {f"{name}.weight": np.ones((4, 4), np.float32) for name in (*layers, *others)}
    model = build(arrays | adapters_for([f"{name}.weight" for name in layers], arrays, {}), "float32", {})
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = ".lora_" not in name
    for name, scaling in layers.items():
        _layer(model, name).scaling = scaling
    ckpt.fully_shard(model, optimizer=None)
    ckpt.save(path, model=model, trainable_only=True)
