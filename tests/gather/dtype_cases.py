"""What runs on the ranks to get whole tensors in another dtype, or on another device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_fsdp_ckpt as ckpt


def _made(sharded: bool) -> tuple[nn.Layer, Any]:
    paddle.seed(2)
    model = nn.Linear(6, 4)
    optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    return (ckpt.fully_shard(model, optimizer=optimizer) if sharded else model), optimizer


def stay_as_they_are(sharded: bool) -> None:
    """Tensors in the dtype that the weights have, however it is given, are copies: a step doesn't change them."""
    for dtype in (None, "float32", paddle.float32, np.float32):
        model, optimizer = _made(sharded)
        right, _ = _made(False)
        found = dict(ckpt.iter_full_parameters(model, dtype=dtype))
        model(paddle.ones([1, 6])).sum().backward()
        optimizer.step()
        for name, parameter in right.named_parameters():
            assert found[name].dtype == paddle.float32
            np.testing.assert_array_equal(found[name].numpy(), parameter.numpy(), err_msg=f"{name} as {dtype}")


def refused(sharded: bool) -> list[str]:
    """What is no dtype, or no device that the first rank has, is an error on all ranks of a sharded model."""
    model, optimizer = _made(sharded)
    calls: list[Callable[[], Any]] = [
        lambda: ckpt.iter_full_parameters(model, dtype="bf16", to_rank=0),
        lambda: ckpt.full_state_dict(model, dtype="single"),
        lambda: ckpt.full_state_dict(model, dtype="int8"),  # 300 would be 44
        lambda: ckpt.full_state_dict(model, to_rank="0"),  # type: ignore[arg-type]
        lambda: ckpt.full_state_dict(model, to_rank=0.5),  # type: ignore[arg-type]
        lambda: ckpt.full_state_dict(model, device="nowhere"),
        lambda: ckpt.full_optimizer_state_dict(optimizer, device="nowhere"),
    ]
    said = []
    for call in calls if sharded else calls[:6]:
        with pytest.raises(ckpt.CheckpointError) as caught:
            call()
        said.append(str(caught.value))
    return said


def too_large(sharded: bool) -> list[str]:
    """One element is too large for float16, and on one rank; what was infinite or NaN already is no error."""
    model, _ = _made(sharded)
    value = np.zeros([6, 4], "float32")
    value[0, :3] = np.inf, np.nan, 65504.0
    model.weight.set_value(value)
    found = ckpt.full_state_dict(model, dtype="float16", to_rank=None)["weight"].numpy()
    np.testing.assert_array_equal(found, value.astype("float16"))
    value[-1, -1] = 65520.0
    model.weight.set_value(value)
    assert dict(ckpt.iter_full_parameters(model, dtype="float16", include="bias")).keys() == {"bias"}
    assert ckpt.full_state_dict(model, dtype="bfloat16", to_rank=None)["weight"].dtype == paddle.bfloat16
    said = []
    for to_rank in (None, 0):
        with pytest.raises(ckpt.CheckpointError) as caught:
            ckpt.full_state_dict(model, dtype="float16", to_rank=to_rank)
        said.append(str(caught.value))
    return said
