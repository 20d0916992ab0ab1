"""Checkpoints as stock Paddle's own optimizers describe them, of a model with known values, and what runs on the ranks to load them.

The descriptions come from Paddle's own ``sharded_state_dict`` methods. Those of its sharding optimizers, whose classes need GPUs, are
called on objects that have just the attributes that they read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from harness import this_rank
from harness.models import Block
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import DygraphShardingOptimizerV2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu

FEATURES = 4
SCALARS = {"beta1_pow_acc": 0.81, "beta2_pow_acc": 0.998}
MOMENTS = ("moment1", "moment2")
Weights = dict[str, Any]


class TransformerLayer(Block):
    """Paddle's own runtime cuts into units by this class name."""


class Blocks(nn.Layer):
    """What Paddle's own runtime can train."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width, bias_attr=False)
        self.blocks = nn.LayerList([TransformerLayer(width) for _ in range(2)])
        self.head = nn.Linear(width, 1)
        self.register_buffer("scale", paddle.full([2], 0.5))

    def get_input_embeddings(self) -> nn.Layer:
        return self.embed

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Awkward(Blocks):
    """Besides, a tied and a frozen parameter, one of one element, and one of four dimensions."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.gain = self.create_parameter([1])
        self.convolution = nn.Conv2D(3, 5, 3)
        self.frozen = nn.Linear(3, 7)
        for parameter in self.frozen.parameters():
            parameter.stop_gradient = True
        self.again = nn.Linear(FEATURES, 5, bias_attr=False)
        if tied:
            self.again.weight = self.embed.weight

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        images = paddle.matmul(x, paddle.ones([FEATURES, 75])).reshape([-1, 3, 5, 5])
        return super().forward(x) * self.gain + self.convolution(images).sum() + self.frozen(x[:, :3]).sum() + self.again(x).sum()


MODELS: dict[str, Callable[[], nn.Layer]] = {"blocks": Blocks, "awkward": Awkward, "untied": lambda: Awkward(tied=False)}


def value_of(key: str, shape: Iterable[int]) -> np.ndarray:
    """The values under a key, the same in every process; each is a bfloat16 too."""
    state = key.rpartition(".")[2].removesuffix("_0")
    if state in SCALARS:
        return np.full(tuple(shape), SCALARS[state], np.float32)
    values = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(tuple(shape)).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def assign(tensor: paddle.Tensor, values: np.ndarray) -> None:
    with paddle.no_grad():
        paddle.assign(paddle.to_tensor(values).astype(tensor.dtype), tensor)


def named(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """Parameters by the first of their names in sorted order."""
    names: dict[int, str] = {}
    tensors: dict[str, paddle.Tensor] = {}
    for name, tensor in sorted(model.state_dict().items()):
        names.setdefault(id(tensor), name)
        tensors[names[id(tensor)]] = tensor
    return tensors


def made(model: str, masters: bool = False) -> nn.Layer:
    """A model; of bfloat16 where its optimizer is to keep master weights."""
    one = MODELS[model]()
    if masters:
        with paddle.no_grad():
            for parameter in one.parameters():
                paddle.assign(parameter.astype("bfloat16"), parameter)
    return one


def filled(model: str, masters: bool = False) -> nn.Layer:
    """A model with the known values."""
    one = made(model, masters)
    for name, tensor in named(one).items():
        assign(tensor, value_of(name, tensor.shape))
    return one


def trained(model: nn.Layer) -> list[tuple[str, paddle.Tensor]]:
    """Names and parameters that have states."""
    return [(name, tensor) for name, tensor in named(model).items() if not tensor.stop_gradient]


def expected(model: str, masters: bool = False) -> dict[str, np.ndarray]:
    """Every key with its values, as bits where they are bfloat16."""
    one = made(model)
    buffers = {id(buffer) for buffer in one.buffers()}
    first = {id(tensor): name for name, tensor in named(one).items()}
    values = {name: value_of(first[id(tensor)], tensor.shape) for name, tensor in one.state_dict().items()}
    for name, tensor in one.state_dict().items():
        if masters and id(tensor) not in buffers:
            values[name] = (values[name].view(np.uint32) >> 16).astype(np.uint16)
    for name, tensor in trained(one):
        states = [*MOMENTS, *(["w"] if masters else [])]
        values.update({f"{name}.{state}_0": value_of(f"{name}.{state}_0", tensor.shape) for state in states})
        values.update({f"{name}.{state}_0": value_of(f"{name}.{state}_0", [1]) for state in SCALARS})
    return values


def _whole_states(model: nn.Layer, names: Iterable[str] | None = None) -> dict[str, Any]:
    """What ``state_dict()`` of an AdamW over some of the parameters returns: keys of Paddle's own names."""
    states: dict[str, Any] = {"LR_Scheduler": {}}
    for name, parameter in trained(model):
        if names is None or name in names:
            for state in (*MOMENTS, *SCALARS):
                key = f"{name}.{state}_0"
                states[f"{parameter.name}_{state}_0"] = paddle.to_tensor(value_of(key, [1] if state in SCALARS else parameter.shape))
    return states


def _plain(model: nn.Layer, rank: int, world_size: int) -> Weights:
    """``AdamW`` itself: whole states, on every rank."""
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    model(paddle.ones([2, FEATURES])).sum().backward()
    optimizer.step()
    weights = model.sharded_state_dict()
    states = optimizer.sharded_state_dict(weights)
    for name, tensor in named(model).items():
        assign(tensor, value_of(name, tensor.shape))
    for key, weight in states.items():
        weight.local_tensor.set_value(value_of(key, weight.local_shape))
    return {**weights, **states}


def _sharding_v1(model: nn.Layer, rank: int, world_size: int) -> Weights:
    """``DygraphShardingOptimizer``, which asks the AdamW within: the whole states of a parameter, on the rank that owns it."""
    owned = [name for name, _ in trained(model)][rank::world_size]
    weights = model.sharded_state_dict()
    inner = SimpleNamespace(state_dict=lambda: _whole_states(model, owned))
    return {**weights, **paddle.optimizer.AdamW.sharded_state_dict(inner, weights)}


def _stage2(model: nn.Layer, rank: int, world_size: int) -> Weights:
    """``GroupShardedOptimizerStage2``: the same, in its own words."""
    owned = [name for name, _ in trained(model)][rank::world_size]
    weights = model.sharded_state_dict()
    optimizer = SimpleNamespace(state_dict=lambda: _whole_states(model, owned))
    return {**weights, **GroupShardedOptimizerStage2.sharded_state_dict(optimizer, weights)}


def _stage3(model: nn.Layer, rank: int, world_size: int) -> Weights:
    """``GroupShardedStage3``: every large parameter's states cut flat, padded at the end; a rank may have nothing but padding."""
    states = _whole_states(model)
    parameters = []
    for _, parameter in trained(model):
        is_cut = parameter.size > 8
        parameters.append(SimpleNamespace(name=parameter.name, **({"fw_storage": None} if is_cut else {})))
        if not is_cut:
            continue
        for state in (*MOMENTS, *SCALARS):
            whole = states.pop(f"{parameter.name}_{state}_0")
            if state in MOMENTS:
                whole = _padded(whole.numpy(), world_size * 8)
                piece = len(whole) // world_size
                whole = paddle.to_tensor(whole[rank * piece : (rank + 1) * piece])
            states[f"slice@{parameter.name}_{state}_0"] = whole
    weights = model.sharded_state_dict()
    stage3 = SimpleNamespace(_ori_parameter_list=parameters, _rank=rank, _optim=SimpleNamespace(state_dict=lambda: states))
    return {**weights, **GroupShardedStage3._sharded_state_dict(stage3, weights)}


def _sharding_v2(model: nn.Layer, rank: int, world_size: int, alignment: int = 8) -> Weights:
    """``DygraphShardingOptimizerV2``: parameters end to end in one buffer, cut flat wherever a rank's part ends; master weights too."""
    states: dict[str, Any] = {"LR_Scheduler": {}, "master_weights": {}}
    views: dict[str, Any] = {}
    index = 0
    sizes = {name: -(-parameter.size // alignment) * alignment for name, parameter in trained(model)}
    part = -(-sum(sizes.values()) // world_size)
    for name, parameter in trained(model):
        begin, end = max(index, rank * part), min(index + sizes[name], (rank + 1) * part)
        views[parameter.name] = SimpleNamespace(_param=parameter, _index=index, _param_begin=begin, _param_end=end)
        if begin < end:
            for state in (*MOMENTS, "w"):
                piece = paddle.to_tensor(_padded(value_of(f"{name}.{state}_0", parameter.shape), alignment)[begin - index : end - index])
                if state == "w":
                    states["master_weights"][parameter.name] = piece
                else:
                    states[f"{parameter.name}_{state}_0"] = piece
            states.update({f"{parameter.name}_{state}_0": paddle.to_tensor(value_of(f"{name}.{state}_0", [1])) for state in SCALARS})
        index += sizes[name]
    optimizer = SimpleNamespace(state_dict=lambda: states, _comm_buffer_list=[SimpleNamespace(_sharding_param_grad_view=views)])
    weights = model.sharded_state_dict()
    return {**weights, **DygraphShardingOptimizerV2.sharded_state_dict(optimizer, weights)}


def _padded(whole: np.ndarray, multiple: int) -> np.ndarray:
    flat = whole.reshape(-1)
    return np.concatenate([flat, np.full(-flat.size % multiple, np.nan, np.float32)])


FORMS: dict[str, Callable[[nn.Layer, int, int], Weights]] = {
    "plain": _plain,
    "sharding v1": _sharding_v1,
    "sharding v2": _sharding_v2,
    "stage 2": _stage2,
    "stage 3": _stage3,
}


def save_form(form: str, model: str, path: str, safetensors: bool, masters: bool = False) -> None:
    """Let stock Paddle save a model and an optimizer of this form."""
    place = this_rank()
    weights = FORMS[form](filled(model, masters), place.rank, place.world_size)
    if safetensors:  # Its Paddle writer crashes on tensors without elements.
        weights = {key: weight for key, weight in weights.items() if weight.local_tensor.size}
    if not masters:
        weights = {key: weight for key, weight in weights.items() if not key.endswith(".w_0")}
    dist.save_state_dict(weights, path, safetensors=safetensors)


def save_model(model: str, path: str) -> None:
    """Let stock Paddle save a model without an optimizer."""
    dist.save_state_dict(filled(model).sharded_state_dict(), path)


@dataclass
class Loaded:
    """What a rank holds after a load (key -> shape, flat range or None, values), and the load's report."""

    state: dict[str, tuple[tuple[int, ...], tuple[int, int] | None, np.ndarray]]
    report: Any


def load_into(runtime: str, model: str, path: str, masters: bool = False) -> Loaded:
    """Load into a model with other weights and a fresh optimizer."""
    with RUNTIMES[runtime](model, masters) as (one, optimizer, weights_of):
        report = ckpt.load(path, model=one, optimizer=optimizer)
        return Loaded(_contents(weights_of()), report)


def load_parts(path: str) -> tuple[Loaded, Loaded]:
    """Load the model alone, then the optimizer alone."""
    with _ours("awkward", False) as (one, optimizer, weights_of):
        model_only = ckpt.load(path, model=one)
        states = {**ckpt.sharded_state_dict(one)}
        loaded = Loaded(_contents(states), model_only)
        optimizer_only = ckpt.load(path, optimizer=optimizer)
        return loaded, Loaded(_contents(weights_of()), optimizer_only)


def refused(model: str, optimizer: str, path: str) -> tuple[str, bool]:
    """Try to load into our runtime: what is raised, and whether nothing changed."""
    one = MODELS[model]()
    stepper = getattr(paddle.optimizer, optimizer)(0.01, parameters=one.parameters())
    ckpt.fully_shard(one, optimizer=stepper)
    before = _contents(ckpt.sharded_state_dict(one))
    try:
        ckpt.load(path, model=one, optimizer=stepper)
    except ckpt.CheckpointError as error:
        after = _contents(ckpt.sharded_state_dict(one))
        unchanged = all(np.array_equal(before[key][2], after[key][2]) for key in before)
        return f"{type(error).__name__}: {error}", unchanged and not any(stepper._accumulators.values())
    return "loaded", False


def load_nested(path: str) -> Loaded:
    """Let stock Paddle save nested dicts, and load what became of the names, reading everything first."""
    dist.save_state_dict({"run": {"model": _plain(filled("awkward"), 0, 1)}}, path)
    with _unsharded("awkward", False) as (one, optimizer, weights_of):
        report = ckpt.load(path, model=one, optimizer=optimizer, key_map={"": "run.model."}, verify_first=True)
        return Loaded(_contents(weights_of()), report)


def save_some_states(path: str) -> None:
    """Let stock Paddle save, without the states of two parameters."""
    weights = _plain(filled("awkward"), 0, 1)
    dropped = ("gain.", "head.weight.")
    dist.save_state_dict({key: one for key, one in weights.items() if not key.startswith(dropped) or key in ("gain", "head.weight")}, path)


def gradients_after_load(path: str) -> tuple[list[str], Any]:
    """Load, and tell which parameters would be stepped, though their gradients are zero; and the report."""
    with _unsharded("awkward", False) as (one, optimizer, _):
        report = ckpt.load(path, model=one, optimizer=optimizer)
        return [name for name, parameter in named(one).items() if parameter.grad is not None], report


def train_and_save(path: str) -> list[float]:
    """Train a plain model, let stock Paddle save it in the middle, and return the losses of the steps after that."""
    one = made("blocks")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=one.parameters())
    _train(one, optimizer, 0, 3)
    weights = one.sharded_state_dict()
    dist.save_state_dict({**weights, **optimizer.sharded_state_dict(weights)}, path)
    return _train(one, optimizer, 3, 6)


def go_on(runtime: str, path: str) -> list[float]:
    """Load, and train on."""
    with RUNTIMES[runtime]("blocks", False) as (one, optimizer, _):
        ckpt.load(path, model=one, optimizer=optimizer)
        return _train(one, optimizer, 3, 6)


def _train(model: nn.Layer, optimizer: Any, first: int, last: int) -> list[float]:
    place = this_rank()
    losses = []
    for step in range(first, last):
        rows = np.random.RandomState(step).randn(8, FEATURES).astype("float32")[place.rank :: place.world_size]
        loss = (model(paddle.to_tensor(rows)) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses


def _contents(weights: Weights) -> dict[str, tuple[tuple[int, ...], tuple[int, int] | None, np.ndarray]]:
    state = {}
    for key, weight in weights.items():
        flat = (weight.flattened_range.start, weight.flattened_range.stop) if weight.is_flattened else None
        state[key] = (tuple(weight.global_shape), flat, weight.local_tensor.numpy().reshape(-1).copy())
    return state


@contextmanager
def _ours(model: str, masters: bool) -> Iterator[tuple[nn.Layer, Any, Callable[[], Weights]]]:
    one = made(model, masters)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=one.parameters(), name="own", multi_precision=masters)
    ckpt.fully_shard(one, optimizer=optimizer)
    yield one, optimizer, lambda: {**ckpt.sharded_state_dict(one), **ckpt.optimizer_sharded_state_dict(optimizer)}


@contextmanager
def _paddles(model: str, masters: bool) -> Iterator[tuple[nn.Layer, Any, Callable[[], Weights]]]:
    from paddle.distributed.fsdp import fully_shard

    with paddle_runtime_on_cpu():
        mesh = dist.ProcessMesh(list(range(this_rank().world_size)), dim_names=["dp"])
        dist.auto_parallel.set_mesh(mesh)
        one = made(model, masters)
        fully_shard(one, mesh=mesh)
        optimizer = paddle.optimizer.AdamW(0.01, parameters=one.parameters(), multi_precision=masters)
        yield one, optimizer, lambda: {**ckpt.sharded_state_dict(one), **ckpt.optimizer_sharded_state_dict(optimizer)}


@contextmanager
def _unsharded(model: str, masters: bool) -> Iterator[tuple[nn.Layer, Any, Callable[[], Weights]]]:
    one = made(model, masters)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=one.parameters(), multi_precision=masters)

    def weights_of() -> Weights:
        weights = one.sharded_state_dict()
        return {**weights, **optimizer.sharded_state_dict(weights)}

    yield one, optimizer, weights_of


RUNTIMES: dict[str, Callable[[str, bool], Any]] = {"ours": _ours, "Paddle's": _paddles, "unsharded": _unsharded}


def assert_holds(loaded: Iterable[Loaded], right: dict[str, np.ndarray]) -> None:
    """Every rank's pieces are the right values, bit for bit, and together they are all of them."""
    seen = {key: np.zeros(values.size, bool) for key, values in right.items()}
    for one in loaded:
        for key, (shape, flat, values) in one.state.items():
            start, stop = flat or (0, math.prod(shape))
            assert shape == right[key].shape, key
            np.testing.assert_array_equal(values, right[key].reshape(-1)[start:stop], err_msg=key)
            seen[key][start:stop] = True
    assert not [key for key, found in seen.items() if not found.all()]
