"""What runs on the ranks to load what is intact of a damaged checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from harness import this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt

WIDE = (512, 1100)
"""Shape of a weight of several chunks."""

WIDER = (1024, 1100)
"""The same of 16-bit numbers."""


class Two(nn.Layer):
    def __init__(self, shape: tuple[int, int] = WIDE) -> None:
        super().__init__()
        self.first = nn.Linear(*shape, bias_attr=False)
        self.second = nn.Linear(*shape, bias_attr=False)


def build(seed: float) -> tuple[nn.Layer, Any]:
    model = Two()
    for number, parameter in enumerate(model.parameters()):
        parameter.set_value(np.arange(parameter.size, dtype="float32").reshape(WIDE) * 1e-3 + number + seed)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer, unit_layers=[Two])  # so that of 2 ranks each keeps one weight
    ckpt.init_optimizer_state(optimizer)
    for number, (_, weight) in enumerate(sorted(ckpt.optimizer_sharded_state_dict(optimizer).items())):
        paddle.assign(paddle.full(weight.local_tensor.shape, number + seed), weight.local_tensor)
    for parameter in model.parameters():
        parameter._shard.reset_gradient(True)
    return model, optimizer


def values_of(model: nn.Layer, optimizer: Any) -> dict[str, np.ndarray]:
    tensors = {**ckpt.full_state_dict(model, to_rank=None), **ckpt.full_optimizer_state_dict(optimizer, to_rank=None)}
    return {key: tensor.numpy() for key, tensor in tensors.items()}


def save(path: str) -> dict[str, np.ndarray]:
    model, optimizer = build(0.0)
    ckpt.save(path, model=model, optimizer=optimizer, step=5)
    return values_of(model, optimizer)


def load_badly(path: str, **options: Any) -> str:
    model, optimizer = build(100.0)
    before = values_of(model, optimizer)
    with pytest.raises(ckpt.CheckpointError) as caught:
        ckpt.load(path, model=model, optimizer=optimizer, verify_first=True, **options)
    after = values_of(model, optimizer)
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    return f"{type(caught.value).__name__}: {caught.value}"


def load_badly_unsalvaged(path: str) -> str:
    return load_badly(path)


def load_badly_salvaged(path: str, allow_missing: list[str]) -> str:
    return load_badly(path, salvage=True, allow_missing=allow_missing)


def build_low(seed: float, dtype: str) -> tuple[nn.Layer, Any]:
    model = Two(WIDER)
    for number, parameter in enumerate(model.parameters()):
        parameter.set_value(np.arange(parameter.size, dtype="float32").reshape(WIDER) * 1e-3 + number + seed)
    model.to(dtype=dtype)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), multi_precision=True)
    ckpt.fully_shard(model, optimizer=optimizer, unit_layers=[Two])
    ckpt.init_optimizer_state(optimizer)
    return model, optimizer


def save_low(path: str) -> np.ndarray:
    """Save bfloat16 weights, with master weights that have more digits, of which those of the first one are returned."""
    model, optimizer = build_low(0.0, "bfloat16")
    for key, weight in ckpt.optimizer_sharded_state_dict(optimizer).items():
        if key.endswith(".w_0"):
            paddle.assign(weight.local_tensor + 1e-5, weight.local_tensor)
    ckpt.save(path, model=model, optimizer=optimizer)
    return ckpt.full_optimizer_state_dict(optimizer, to_rank=None)["first.weight.w_0"].numpy()


def load_as_float32(path: str, allow_missing: list[str]) -> tuple[Any, dict[str, np.ndarray]]:
    model, optimizer = build_low(100.0, "float32")
    report = ckpt.load(path, model=model, optimizer=optimizer, salvage=True, cast=True, allow_missing=allow_missing)
    return report, values_of(model, optimizer)


def load_intact(path: str, allow_missing: list[str], parts: Any = None) -> tuple[Any, dict[str, np.ndarray]]:
    model, optimizer = build(100.0)
    report = ckpt.load(path, model=model, optimizer=optimizer, salvage=True, allow_missing=allow_missing, parts=parts)
    assert str(report.path) == path
    assert this_rank().world_size >= 1
    return report, values_of(model, optimizer)


def load_unchecked(path: str) -> tuple[Any, dict[str, np.ndarray]]:
    model, optimizer = build(100.0)
    report = ckpt.load(path, model=model, optimizer=optimizer, salvage=True, check_digests=False)
    return report, values_of(model, optimizer)
