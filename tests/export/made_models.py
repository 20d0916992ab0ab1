"""Models of known values, saved by real ranks: layers with just the names that the arrays have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fsdp import fully_shard

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import load_huggingface
from paddle_fsdp_ckpt.demo.model import CausalLM, DecoderConfig
from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu


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
    set_masters(stepper, arrays, tied or {})
    ckpt.save(path, model=model, optimizer=stepper, step=3)


def set_masters(optimizer: paddle.optimizer.Optimizer, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
    """Give an optimizer of a sharded model master weights of these values."""
    for key, weight in ckpt.optimizer_sharded_state_dict(optimizer).items():
        owner, _, state = key.rpartition(".")
        if state == "w_0":
            flat = arrays[tied.get(owner, owner)].reshape(-1)
            here = flat[weight.flattened_range] if weight.is_flattened else flat.reshape(weight.local_shape)
            paddle.assign(paddle.to_tensor(here), output=weight.local_tensor)


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


def save_buffers(path: str, buffers: Mapping[str, np.ndarray]) -> None:
    """Save a plain model of nothing but buffers, each of its array's dtype."""
    model = nn.Layer()
    for name, array in buffers.items():
        model.register_buffer(name, paddle.to_tensor(array))
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


def save_groups(
    path: str, arrays: Mapping[str, np.ndarray], groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]], settings: Mapping[str, Any]
) -> None:
    """Save with an AdamW of these param groups, and these settings of its own; ``settings["step"]`` is the step."""
    model = build(arrays, "float32", {})
    named = dict(model.named_parameters())
    of_groups = [{"params": [named[name] for name in names], **options} for names, options in groups]
    stepper = paddle.optimizer.AdamW(settings["learning_rate"], parameters=of_groups)
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    ckpt.save(path, model=model, optimizer=stepper, step=settings["step"], extra_state=settings["extra_state"])


def save_by_manager(root: str, arrays: Mapping[str, np.ndarray], average: float, extra: np.ndarray, loss: float, gamma: float) -> None:
    """Save step 3 with all that a manager keeps; each weight's average is full of a number."""
    model = build(arrays, "float32", {})
    schedule = paddle.optimizer.lr.ExponentialDecay(0.1, gamma)
    stepper = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    averages = ckpt.sharded_state_dict(model)
    for weight in averages.values():
        weight.local_tensor = paddle.full_like(weight.local_tensor, average)
    with ckpt.CheckpointManager(root) as checkpoints:
        kept = {"lr_scheduler": schedule, "sharded": averages, "metrics": {"loss": loss}, "rank_state": dist.get_rank()}
        checkpoints.save(3, model=model, optimizer=stepper, extra_state={"epoch": 1, "seen": extra}, **kept)


def load_into(path: str, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Load a checkpoint into a sharded model of other values, and return what it holds then."""
    model = build({name: np.full(shape, -7, np.float32) for name, shape in shapes.items()}, "float32", tied)
    ckpt.fully_shard(model, optimizer=None)
    ckpt.load(path, model=model)
    return {name: tensor.numpy() for name, tensor in ckpt.full_state_dict(model).items()}


def load_published(
    path: str, shapes: Mapping[str, tuple[int, ...]], dtype: str, tied: Mapping[str, str], options: Mapping[str, Any], sharded: bool
) -> dict[str, np.ndarray] | str:
    """Load a Hugging Face model into one of other values, and return what it holds then, or why it doesn't."""
    model = build({name: np.full(shape, -7, np.float32) for name, shape in shapes.items()}, dtype, tied)
    if sharded:
        ckpt.fully_shard(model, optimizer=None)
    try:
        load_huggingface(path, model=model, **options)
    except ckpt.CheckpointError as error:
        message = str(error)
        values = ckpt.full_state_dict(model) if sharded else model.state_dict()
        assert all((value.astype("float32").numpy() == -7).all() for value in values.values())
        return message
    values = ckpt.full_state_dict(model) if sharded else model.state_dict()
    return {name: tensor.numpy() for name, tensor in values.items()}


def masters_follow(path: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Load into a bfloat16 model with master weights, and say for each whether it is the parameter now."""
    model = build({name: np.full(shape, -7, np.float32) for name, shape in shapes.items()}, "bfloat16", {})
    stepper = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    load_huggingface(path, model=model, recipe="none", cast=True)
    mine = ckpt.sharded_state_dict(model)
    masters = {key: weight for key, weight in ckpt.optimizer_sharded_state_dict(stepper).items() if key.endswith(".w_0")}
    return {
        key: bool((weight.local_tensor.numpy() == mine[key.removesuffix(".w_0")].local_tensor.astype("float32").numpy()).all())
        for key, weight in masters.items()
    }


def load_where_paddle_cut(path: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Load into a model that Paddle's own ``fully_shard`` cut, and say how many elements this rank keeps; they must count from 0 on."""
    model = build({name: np.full(shape, -7, np.float32) for name, shape in shapes.items()}, "float32", {})
    with paddle_runtime_on_cpu():
        mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
        dist.auto_parallel.set_mesh(mesh)
        fully_shard(model, mesh=mesh)
        load_huggingface(path, model=model, recipe="none")
        weights = ckpt.sharded_state_dict(model)
        for name, weight in weights.items():
            right = np.arange(np.prod(shapes[name]), dtype=np.float32)
            np.testing.assert_array_equal(weight.local_tensor.numpy(), right[weight.flattened_range])
        return sum(int(weight.local_tensor.size) for weight in weights.values())


def save_states(path: str, arrays: Mapping[str, np.ndarray], optimizer: str, factors: Mapping[str, float]) -> None:
    """Save with an optimizer whose states have each element of their parameter times a factor."""
    model = build(arrays, "float32", {})
    stepper = getattr(paddle.optimizer, optimizer)(learning_rate=0.5, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    for key, weight in ckpt.optimizer_sharded_state_dict(stepper).items():
        owner, _, state = key.rpartition(".")
        factor = factors.get(state.removesuffix("_0"))
        if factor is not None:
            flat = arrays[owner].reshape(-1) * np.float32(factor)
            here = flat[weight.flattened_range] if weight.is_flattened else flat[slice_of(weight)]
            paddle.assign(paddle.to_tensor(here.reshape(weight.local_tensor.shape)), output=weight.local_tensor)
    ckpt.save(path, model=model, optimizer=stepper, step=3)


def save_tied_models(path: str, arrays: Mapping[str, np.ndarray], tied: str) -> None:
    """Save ``actor`` and ``critic`` with one parameter ``tied`` in both; the master weights are the arrays as before the cast."""
    models = {name: build(arrays, "bfloat16", {}) for name in ("actor", "critic")}
    *layers, last = tied.split(".")
    actor, critic = ({"": models[name], **dict(models[name].named_sublayers())}[".".join(layers)] for name in models)
    critic.add_parameter(last, actor._parameters[last])
    parameters = {id(one): one for model in models.values() for one in model.parameters()}
    stepper = paddle.optimizer.AdamW(parameters=list(parameters.values()), multi_precision=True)
    stepper._create_accumulators(paddle.static.default_main_program().global_block(), list(parameters.values()))
    names = {one.name: name for model in models.values() for name, one in model.named_parameters()}
    for name, master in stepper._master_weights.items():
        paddle.assign(paddle.to_tensor(arrays[names[name]]), output=master)
    ckpt.save(path, model=models, optimizer=stepper, step=3)


def save_several(path: str, models: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Save models of these arrays as one, under names."""
    ckpt.save(path, model={name: build(arrays, "float32", {}) for name, arrays in models.items()})


def slice_of(weight: Any) -> slice:
    """Which elements of the flattened parameter a whole, or stacked, state has here."""
    if tuple(weight.local_shape) == tuple(weight.global_shape):
        return slice(None)
    return slice(weight.global_offset[1], weight.global_offset[1] + weight.local_shape[1])
