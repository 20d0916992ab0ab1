"""What runs on the ranks to undo ``fully_shard`` and train on as plain models."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from gather_cases import OPTIMIZERS, Net, Rows, sharded, values_of
from harness import this_rank
from paddle import nn
from paddle.base.framework import EagerParamBase

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import runtime_of


def attributes_of(model: nn.Layer) -> dict[str, Any]:
    """What hangs on each layer: names of its attributes, the types of its dicts, and how many hooks."""
    return {
        name: (
            sorted(layer.__dict__),
            type(layer._parameters),
            list(layer._parameters),
            type(layer._sub_layers),
            len(layer._forward_pre_hooks),
            len(layer._forward_post_hooks),
        )
        for name, layer in model.named_sublayers(include_self=True)
    }


def leaves_nothing_behind() -> None:
    plain = Net()
    right = values_of(plain)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=plain.parameters())
    before, optimizer_before = attributes_of(plain), sorted(optimizer.__dict__)
    ckpt.fully_shard(plain, optimizer=optimizer)
    assert ckpt.unshard(plain) is plain
    assert attributes_of(plain) == before
    assert sorted(optimizer.__dict__) == optimizer_before
    assert runtime_of(plain) is None
    for name, tensor in plain.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), right[name], err_msg=name)
        if isinstance(tensor, EagerParamBase):
            assert type(tensor) is EagerParamBase
            assert tensor.grad is None
    copied = copy.deepcopy(plain)
    assert copied.out.weight is copied.embed.weight
    with pytest.raises(ckpt.ShardingError, match="there is nothing to undo"):
        ckpt.unshard(plain)


def step(model: nn.Layer, optimizer: Any, number: int) -> None:
    model(number).backward()
    optimizer.step()
    optimizer.clear_grad()


def trains_on(name: str, kind: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two steps sharded and two plain, or four of one kind; then two more sharded again. Returns weights, and states by key."""
    model = Rows()
    for number, parameter in enumerate(model.parameters()):
        parameter.set_value(np.arange(parameter.size, dtype="float32").reshape(parameter.shape) * 0.01 + number)
    optimizer = OPTIMIZERS[name](model.parameters())
    names = {parameter.name: structured for structured, parameter in model.named_parameters()}
    if kind == "unsharded":
        ckpt.fully_shard(model, optimizer=optimizer)
    for number in range(2):
        step(model, optimizer, number)
    if kind == "unsharded":
        ckpt.unshard(model)
    for number in range(2, 4):
        step(model, optimizer, number)
    states = {
        f"{names[owner]}.{accumulator}": tensor.numpy()
        for accumulator, tensors in optimizer._accumulators.items()
        for owner, tensor in tensors.items()
    }
    return {name: parameter.numpy() for name, parameter in model.named_parameters()}, states


def shards_again() -> None:
    model, right, _ = sharded()
    ckpt.unshard(model)
    optimizer = paddle.optimizer.SGD(0.0, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    tokens = paddle.arange(10).reshape([2, 5])
    model(tokens).sum().backward()
    gradient = model.head.weight.grad
    optimizer.step()
    found = ckpt.full_state_dict(model, to_rank=None, include=["head.*", "embed.*"])
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.numpy(), right[name])
    assert gradient is None or np.isfinite(gradient.numpy()).all()


def refusals() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=[*one.parameters(), *other.parameters()])
    ckpt.fully_shard(one, optimizer=None)
    ckpt.fully_shard(other, optimizer=None)
    ckpt.bind_optimizer(optimizer)
    with pytest.raises(ckpt.ShardingError, match="several sharded models"):
        ckpt.unshard(one)
    with ckpt.local_parameters(other), pytest.raises(ckpt.ShardingError):
        ckpt.unshard(other)
    assert runtime_of(one) is not None
    assert runtime_of(other) is not None


def frees_the_shards() -> list[int]:
    """Bytes that live before sharding, after it, and after undoing it."""

    def held() -> int:
        gc.collect()
        return int(paddle.device.core.host_memory_stat_current_value("Allocated", 0))

    start = held()
    model = nn.Linear(256, 256, bias_attr=False)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    model(paddle.ones([1, 256])).sum().backward()
    optimizer.step()
    optimizer.clear_grad(set_to_zero=False)
    cut = held() - start
    ckpt.unshard(model)
    whole = held() - start
    del model, optimizer
    return [cut, whole, held() - start]


def precision_set_meanwhile() -> None:
    """``amp.decorate`` of an optimizer alone sets this: master weights appear, or go; the other states stay."""
    for masters in (False, True):
        model = nn.Linear(6, 5)
        model.to(dtype="bfloat16")
        optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), multi_precision=masters)
        ckpt.fully_shard(model, optimizer=optimizer)
        ckpt.init_optimizer_state(optimizer)
        optimizer._multi_precision = not masters
        ckpt.unshard(model)
        assert set(optimizer._master_weights) == (set() if masters else {parameter.name for parameter in model.parameters()})
        for parameter in [] if masters else model.parameters():
            master = optimizer._master_weights[parameter.name]
            np.testing.assert_array_equal(master.numpy(), parameter.astype("float32").numpy())
            assert master.name in optimizer._accumulators["moment1"]


Case = Callable[[], None]
CASES: dict[str, Case] = {
    "nothing behind": leaves_nothing_behind,
    "again": shards_again,
    "precision set meanwhile": precision_set_meanwhile,
    "refusals": refusals,
}


def run_case(name: str) -> int:
    """Run one of the cases, and return the rank."""
    CASES[name]()
    return this_rank().rank
