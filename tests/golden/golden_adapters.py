"""Adapters of known values whose checkpoint, without its base, is kept for ever; ``make.py`` made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

import paddle_fsdp_ckpt as ckpt

STEP = 3
PATH = Path(__file__).resolve().parent / "adapters_v1"


class LoRALinear(nn.Linear):
    """A frozen layer in bfloat16 or float32, and its adapters."""

    scaling = 2.5

    def __init__(self, fan_in: int, fan_out: int, dtype: str) -> None:
        super().__init__(fan_in, fan_out)
        self.to(dtype=dtype)
        self.weight.stop_gradient = self.bias.stop_gradient = True
        self.lora_A = self.create_parameter([fan_in, 2], dtype="float32")
        self.lora_B = self.create_parameter([2, fan_out], dtype="float32")


def values_of(name: str, shape: list[int]) -> np.ndarray:
    return np.sin(np.arange(int(np.prod(shape))) + len(name)).astype("float32").reshape(shape)


def make(adapters: float = 1.0, base: float = 1.0) -> tuple[nn.Layer, Any]:
    """Make the model with all values multiplied by these factors."""
    model = nn.Sequential(LoRALinear(4, 5, "bfloat16"), LoRALinear(5, 3, "float32"))
    for name, parameter in model.named_parameters():
        values = values_of(name, parameter.shape) * (adapters if "lora_" in name else base)
        parameter.set_value(paddle.to_tensor(values).astype(parameter.dtype))
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


def save(path: str) -> None:
    model, optimizer = make()
    ckpt.init_optimizer_state(optimizer)
    ckpt.save(path, model=model, optimizer=optimizer, step=STEP, trainable_only=True)


def load(path: str) -> tuple[Any, dict[str, np.ndarray], str]:
    """Load onto the same base, and onto another; return the report, the adapters, and what is said of the other base."""
    model, optimizer = make(adapters=-1.0)
    report = ckpt.load(path, model=model, optimizer=optimizer)
    found = {name: tensor.numpy() for name, tensor in ckpt.full_state_dict(model, trainable_only=True, to_rank=None).items()}
    other, other_optimizer = make(base=-1.0)
    try:
        ckpt.load(path, model=other, optimizer=other_optimizer)
    except ckpt.MismatchError as error:
        return report, found, str(error)
    return report, found, ""
