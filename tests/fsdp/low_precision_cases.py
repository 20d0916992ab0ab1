"""Training in 16 bits on a CPU, whose wheel has few kernels for it: weights are cast for matmuls, and AdamW's step is emulated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from harness import this_rank
from overlap_cases import late_collectives
from paddle import nn
from paddle.amp.auto_cast import _set_multi_precision, amp_initialize
from paddle.base import core
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.errors import ShardingError
from paddle_fsdp_ckpt.fsdp import Runtime, runtime_of

ROWS = 12
STEPS = 4
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}


class Cast(nn.Layer):
    """A linear layer that computes in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([inputs, outputs])
        self.bias = self.create_parameter([outputs], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(x, self.weight.astype("float32"), self.bias.astype("float32"))


class Block(nn.Layer):
    """A float32 norm beside 16-bit matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = Cast(6, 31)
        self.down = Cast(31, 6)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Layer):
    """A head that is tied to the 16-bit embedding, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.blocks = nn.LayerList([Block(), Block()])

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens).astype("float32")
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight.astype("float32").T)


def decorated(dtype: str) -> tuple[nn.Layer, Any]:
    """A model and an optimizer as ``amp.decorate(level="O2")`` leaves them on a GPU. On a CPU it does nothing: its parts are called."""
    paddle.seed(11)
    model = Net()
    decayed = {p.name for n, p in model.named_parameters() if n.endswith("weight") and "norm" not in n}
    optimizer = paddle.optimizer.AdamW(
        0.01,
        epsilon=1e-4,
        parameters=model.parameters(),
        weight_decay=0.3,
        apply_decay_param_fun=lambda name: name in decayed,
        grad_clip=nn.ClipGradByGlobalNorm(0.2),
    )
    amp_initialize([model], dtype, [nn.LayerNorm])  # excluded_layers
    _set_multi_precision(optimizer, True)
    assert str(model.embed.weight.dtype) == f"paddle.{dtype}"
    assert model.blocks[0].norm.weight.dtype == paddle.float32
    return model, optimizer


@contextmanager
def adamw_on_cpu(seen: set[paddle.dtype]) -> Iterator[None]:
    """Let AdamW step 16-bit parameters as its GPU kernel does: the master weight in float32, and the parameter is that, rounded.

    Args:
        seen: gets the dtypes of the gradients beside 16-bit parameters.
    """
    module = sys.modules["paddle.optimizer.adamw"]
    kernels = module._C_ops  # type: ignore[attr-defined]

    def adamw_(param: Any, grad: Any, *rest: Any) -> Any:
        before, (master, found), settings, (_, *last) = rest[:6], rest[6:8], rest[8:16], rest[16:]
        if param.dtype == paddle.float32:
            return kernels.adamw_(param, grad, *rest)
        seen.add(grad.dtype)
        result = kernels.adamw_(master, grad.astype("float32"), *before, None, found, *settings, False, *last)
        paddle.assign(master.astype(param.dtype), param)
        return result

    module._C_ops = SimpleNamespace(adamw_=adamw_)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module._C_ops = kernels  # type: ignore[attr-defined]


def loss_of(model: nn.Layer, step: int, part: slice = slice(0, ROWS)) -> paddle.Tensor:
    tokens = paddle.to_tensor(np.random.RandomState(step).randint(0, 17, [ROWS, 5])[part])
    return F.cross_entropy(model(tokens).reshape([-1, 17]), tokens.reshape([-1]))


def my_part() -> slice:
    place = this_rank()
    return slice(ROWS // place.world_size * place.rank, ROWS // place.world_size * (place.rank + 1))


def bits(tensor: paddle.Tensor) -> bytes:
    """The bytes of a tensor of any dtype."""
    return np.ascontiguousarray(tensor.numpy()).tobytes()


# Training.


def right_step(model: nn.Layer, optimizer: Any, step: int) -> float:
    """One process, on the parts of all ranks: the mean loss.

    The gradients of the parts are averaged in float32, and fleet's ``MixPrecisionOptimizer`` steps them.
    """
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionOptimizer

    count = this_rank().world_size
    sums: dict[str, Any] = {}
    mean = 0.0
    for part in range(count):
        loss = loss_of(model, step, slice(ROWS // count * part, ROWS // count * (part + 1)))
        loss.backward()
        mean += loss.item() / count
        for parameter in model.parameters():
            gradient = parameter.grad.astype("float32").clone()
            sums[parameter.name] = sums[parameter.name] + gradient if part else gradient
            parameter.clear_gradient(False)
    for parameter in model.parameters():
        parameter.main_grad = sums[parameter.name] / count
    with adamw_on_cpu(set()):
        MixPrecisionOptimizer(optimizer).step()
    return mean


def start_alike(model: nn.Layer, optimizer: Any, others: nn.Layer, others_optimizer: Any) -> None:
    """Give a plain model and its optimizer the values of sharded ones, all but for what these haven't got yet.

    Else rounding to 16 bits now and then turns a difference in the last bit, as another order of a sum makes, into one of 256 times that.
    """
    weights, states = ckpt.full_state_dict(others, to_rank=None), ckpt.full_optimizer_state_dict(others_optimizer, to_rank=None)
    masters = optimizer._master_weights
    with paddle.no_grad():
        for name, parameter in model.named_parameters():
            paddle.assign(weights[name], parameter)
            if not states:
                continue
            master = masters.get(parameter.name)
            if master is not None:
                paddle.assign(states[f"{name}.w_0"], master)
            for state, tensors in optimizer._accumulators.items():
                paddle.assign(states[f"{name}.{state}_0"], tensors[parameter.name if master is None else master.name])


def train(model: nn.Layer, optimizer: Any, first: int, last: int) -> list[float]:
    """This rank's losses; each step's gradients of 16-bit parameters must be float32 all the way to AdamW's kernel."""
    losses = []
    seen: set[paddle.dtype] = set()
    with adamw_on_cpu(seen):
        for step in range(first, last):
            loss = loss_of(model, step, my_part())
            loss.backward()
            core.eager.set_master_grads(model.parameters())  # what amp.decorate's master_grad=True does at the end of a backward
            optimizer.step()
            optimizer.clear_grad()
            losses.append(loss.item())
    assert seen <= {paddle.float32}
    return losses


def trains_like_one_process(dtype: str, prefetch: int = 0) -> list[float]:
    """Each step from the same values. With ``prefetch``, collectives end as late as they may."""
    plain, plain_optimizer = decorated(dtype)
    model, optimizer = decorated(dtype)
    ckpt.fully_shard(model, optimizer=optimizer, prefetch=prefetch)
    runtime = runtime_of(model)
    assert runtime is not None
    _check_layout(runtime, dtype)
    differences, late = [], 0
    for step in range(STEPS):
        start_alike(plain, plain_optimizer, model, optimizer)
        wanted = right_step(plain, plain_optimizer, step)
        with late_collectives() as counts:
            (loss,) = train(model, optimizer, step, step + 1)
        differences.append(loss - wanted)
        late += counts[0]
        _check_shards(runtime, optimizer, dtype, plain, plain_optimizer)
    assert (late > 4 * STEPS) == bool(prefetch)
    _check_layout(runtime, dtype)
    return differences


def _check_shards(runtime: Runtime, optimizer: Any, dtype: str, plain: nn.Layer, plain_optimizer: Any) -> None:
    parameters = dict(plain.named_parameters())
    for one in runtime.shards:
        place, name = slice(one.range.start, one.range.stop), one.slot.name
        value, right = one.local.astype("float32").numpy(), parameters[name].astype("float32").numpy()
        np.testing.assert_allclose(value, right.reshape(-1)[place], rtol=2.0**-7, atol=1e-4, err_msg=name)
        if "norm" not in name and one.range.numel:
            master = optimizer._master_weights[one.parameter.name]
            assert master.dtype == paddle.float32
            right = plain_optimizer._master_weights[parameters[name].name].numpy()
            # The arithmetic is the same; only clipping sums in another order.
            np.testing.assert_allclose(master.numpy(), right.reshape(-1)[place], rtol=2e-6, atol=2e-7, err_msg=name)
            assert bits(master.astype(dtype)) == bits(one.local)


def master_weights_follow_what_is_written() -> None:
    """Inside ``local_parameters``: one parameter is written to before an exception, the others are only read."""
    model, optimizer = decorated("bfloat16")
    ckpt.fully_shard(model, optimizer=optimizer)
    train(model, optimizer, 0, 2)
    masters = optimizer._master_weights
    before = {name: bits(master) for name, master in masters.items()}
    with ckpt.local_parameters(model):
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert {name: bits(master) for name, master in masters.items()} == before
    written = next(parameter.name for parameter in model.parameters() if parameter.name in masters)
    with suppress(KeyError), paddle.no_grad(), ckpt.local_parameters(model):
        for parameter in model.parameters():
            if parameter.name == written:
                parameter.fill_(0.5)
        raise KeyError
    assert bool((masters[written] == 0.5).all())
    assert {name for name, master in masters.items() if bits(master) != before[name]} == {written}


def _check_layout(runtime: Runtime, dtype: str) -> None:
    """One unit a block, with a flat buffer for each dtype, and the bytes that follow."""
    kinds = [[buffer.layout.name for buffer in unit.buffers] for unit in runtime.units]
    blocks = [[f"blocks.{number}/{kind}" for kind in ("float32", dtype)] for number in (0, 1)]
    assert kinds == [[f"embed/{dtype}"], *blocks]
    assert runtime.memory_bytes() == (sum(one.layout.shard_numel * ITEM[one.layout.dtype] for one in runtime.buffers), 0)


# Exact values.


class Given(nn.Layer):
    """Parameters whose gradients are given."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.parts = nn.LayerList([nn.Layer() for _ in range(2)])
        for part, shape in zip(self.parts, ([7, 9], [1]), strict=True):
            part.weight = part.create_parameter(shape, default_initializer=nn.initializer.Constant(1.5))
        amp_initialize([self], dtype, None)

    def forward(self, gradients: list[np.ndarray]) -> paddle.Tensor:
        pairs = zip(self.parts, gradients, strict=True)
        return paddle.add_n([(part.weight.astype("float32") * paddle.to_tensor(gradient)).sum() for part, gradient in pairs])


def given_gradients(dtype: str, rank: int, backward: int) -> list[np.ndarray]:
    """Float32 arrays that the dtype holds exactly, of magnitudes that its own sums would lose; in float16, of sums that are too large."""
    values = np.random.RandomState(100 * rank + backward)
    found = []
    for shape in ([7, 9], [1]):
        array = np.round(values.standard_normal(shape) * 100) * np.exp2(values.randint(-6, 3, shape))
        array.reshape(-1)[0] = 256.0 if backward == 0 else 1.0
        if dtype == "float16":
            array.reshape(-1)[-1] = 40000.0
        found.append(paddle.to_tensor(array.astype("float32")).astype(dtype).astype("float32").numpy())
    return found


def means_are_exact(dtype: str, units: str, prefetch: int = 0) -> None:
    """The mean over the ranks, summed over three backwards, is numpy's in float32; then a step by hand in the parameters' own dtype."""
    count, rank = this_rank().world_size, this_rank().rank
    model = Given(dtype)
    ckpt.fully_shard(model, optimizer=None, unit_layers=[Given] if units == "one" else None, prefetch=prefetch)
    runtime = runtime_of(model)
    assert runtime is not None
    for backward in range(3):
        model(given_gradients(dtype, rank, backward)).backward()
        if units == "one" or backward == 1:
            assert [one.dtype for one in model.parameters()] == [getattr(paddle, dtype)] * 2
            runtime.reduce_pending_gradients()
    of_ranks = [[sum(parts) for parts in zip(*(given_gradients(dtype, r, b) for b in range(3)), strict=True)] for r in range(count)]
    right = [sum(parts, np.float32(0)) * np.float32(1 / count) for parts in zip(*of_ranks, strict=True)]
    for one, wanted in zip(runtime.shards, right, strict=True):
        gradient = one.parameter.grad
        if one.range.numel:
            assert gradient is not None
            assert gradient.dtype == paddle.float32
            piece = wanted.reshape(-1)[one.range.start : one.range.stop]
            # A third is rounded, once for each backward; all else is exact.
            np.testing.assert_allclose(gradient.numpy(), piece, rtol=0, atol=1e-4 if count == 3 else 0)
            with pytest.raises(ShardingError, match=r"this rank's piece, shape .* in float32"):
                one.parameter.grad = gradient.astype("float64")
            one.parameter.grad = gradient.astype(dtype)
            assert bits(one.parameter.grad.astype(dtype)) == bits(gradient.astype(dtype))
    assert runtime.memory_bytes()[0] == sum(one.layout.shard_numel * (2 + 4) for one in runtime.buffers)
    if dtype == "bfloat16":  # for the other the CPU wheel has no kernel
        optimizer = paddle.optimizer.SGD(2.0**-9, parameters=model.parameters())
        pieces = [one.parameter.grad for one in runtime.shards]
        with ckpt.local_parameters(model):
            optimizer.step()
        for one, gradient in zip(runtime.shards, pieces, strict=True):
            if one.range.numel and gradient is not None:
                stepped = 1.5 - 2.0**-9 * gradient.astype(dtype).astype("float32").numpy()
                np.testing.assert_allclose(one.local.astype("float32").numpy(), stepped, rtol=2.0**-7, atol=2.0**-8)


# Checkpoints.


def state_of(model: nn.Layer, optimizer: Any) -> dict[str, tuple[str, bytes]]:
    """The dtype and bytes of every weight, state and master weight, whole."""
    tensors = {**ckpt.full_state_dict(model, to_rank=None), **ckpt.full_optimizer_state_dict(optimizer, to_rank=None)}
    return {key: (str(tensor.dtype), bits(tensor)) for key, tensor in tensors.items()}


def save_and_go_on(dtype: str, path: str) -> tuple[dict[str, tuple[str, bytes]], list[float], dict[str, tuple[str, bytes]]]:
    """Train, save, train on: the state saved, the later losses, the state at the end."""
    model, optimizer = decorated(dtype)
    ckpt.fully_shard(model, optimizer=optimizer)
    train(model, optimizer, 0, 2)
    ckpt.save(path, model=model, optimizer=optimizer)
    saved = state_of(model, optimizer)
    return saved, train(model, optimizer, 2, STEPS), state_of(model, optimizer)


def resume(dtype: str, path: str) -> tuple[dict[str, tuple[str, bytes]], list[float], dict[str, tuple[str, bytes]]]:
    """Load into other weights and go on."""
    model, optimizer = decorated(dtype)
    for parameter in model.parameters():
        parameter.set_value(paddle.full(parameter.shape, 0.25, parameter.dtype))
    ckpt.fully_shard(model, optimizer=optimizer)
    assert ckpt.load(path, model=model, optimizer=optimizer).is_exact
    loaded = state_of(model, optimizer)
    return loaded, train(model, optimizer, 2, STEPS), state_of(model, optimizer)


# What is refused.


def _refusals(model: nn.Layer) -> dict[str, Callable[[], Any]]:
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    return {
        "decorate": lambda: amp_initialize([model], "bfloat16", None),
        "to": lambda: model.to(dtype="float32"),
        "a part": lambda: model.blocks[0].bfloat16(),
        "astype": lambda: model.astype("float32"),
        "MixPrecisionLayer": lambda: MixPrecisionLayer(model, "bfloat16"),
    }


def refused_afterwards() -> dict[str, str]:
    """What each says; the model trains on as if nothing was tried."""
    model, optimizer = decorated("bfloat16")
    ckpt.fully_shard(model, optimizer=optimizer)
    found = {}
    for name, call in _refusals(model).items():
        before = state_of(model, optimizer)
        with pytest.raises(ShardingError) as caught:
            call()
        found[name] = str(caught.value)
        assert state_of(model, optimizer) == before
        train(model, optimizer, 0, 1)
    return found


def refused_before() -> str:
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    model, _ = decorated("bfloat16")
    with pytest.raises(ShardingError) as caught:
        ckpt.fully_shard(MixPrecisionLayer(model, "bfloat16"), optimizer=None)
    return str(caught.value)
