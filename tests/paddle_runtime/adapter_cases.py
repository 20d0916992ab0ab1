"""What runs on the ranks to look at the adapter for Paddle's own runtime: layouts, low precision, stock files, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from fused_cases import EVERY, Blocks, Held, all_weights, cut_by_paddle, held, plain_model, train
from harness import this_rank
from paddle import nn
from paddle.distributed.auto_parallel import fully_shard_fusion
from paddle.distributed.fsdp import fully_shard

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.errors import CheckpointError
from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu
from paddle_fsdp_ckpt.fsdp.paddle_runtime import paddle_runtime, paddle_runtime_of, sharded_state_dict
from paddle_fsdp_ckpt.host_memory import bytes_of
from paddle_fsdp_ckpt.optim import split_weight_decay
from paddle_fsdp_ckpt.optim.fused import begin_load, init_optimizer_state, optimizer_sharded_state_dict


@contextmanager
def cut(model: nn.Layer) -> Iterator[None]:
    with paddle_runtime_on_cpu():
        mesh = dist.ProcessMesh(list(range(this_rank().world_size)), dim_names=["dp"])
        dist.auto_parallel.set_mesh(mesh)
        fully_shard(model, mesh=mesh)
        yield


def error_of(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def pieces_are_views() -> list[str]:
    """Every rank's pieces against the weights before cutting; then write through them and see it in the next forward."""
    paddle.seed(1)
    model = Blocks()
    before = {name: parameter.numpy().reshape(-1) for name, parameter in model.named_parameters()}
    with cut(model):
        weights = sharded_state_dict(model)
        runtime = paddle_runtime_of(model)
        assert runtime is not None and paddle_runtime() is not None
        assert paddle_runtime_of(Blocks()) is None
        for name, values in before.items():
            if name in weights:
                flat = weights[name].flattened_range
                np.testing.assert_array_equal(weights[name].local_tensor.numpy(), values[flat])
                assert weights[name].local_shape == weights[name].global_shape == tuple(dict(model.named_parameters())[name].shape)
        addresses = [(one.data_ptr(), one.data_ptr() + 4 * one.size) for one in (buffer.live for buffer in runtime.buffers)]
        for shard in runtime.shards:
            if shard.range.numel:
                assert any(start <= shard.local.data_ptr() < stop for start, stop in addresses)
        assert [buffer.layout.shard(runtime.rank).numel for buffer in runtime.buffers] == [buffer.live.size for buffer in runtime.buffers]
        inputs = paddle.ones([2, 4])
        for name, weight in weights.items():
            weight.local_tensor.fill_(2.0 if name == "head.bias" else 0.0)
        runtime.values_written()
        assert float(model(inputs).numpy().reshape(-1)[0]) == 2.0
        return [name for shard in runtime.shards if not shard.range.numel for name in shard.slot.names]


def low_precision(optimizer: str, masters: bool, path: str) -> tuple[dict[str, str], dict[str, str]]:
    """States, and master weights, of bfloat16 buffers, filled and saved, and loaded into others. The CPU wheel can't train them.

    Returns the dtypes of the states, and those of an unfused optimizer's.
    """

    def fill(model: nn.Layer, stepper: Any) -> dict[str, bytes]:
        for number, (key, weight) in enumerate(all_weights(model, stepper).items()):
            is_shared = not weight.is_flattened or key.rpartition(".")[2] in REPEATED
            values = paddle.full(weight.local_tensor.shape, 0.37 if is_shared else 0.37 * number, "float32")
            paddle.assign(values.astype(weight.local_tensor.dtype), weight.local_tensor)
        return contents(model, stepper)

    def contents(model: nn.Layer, stepper: Any) -> dict[str, bytes]:
        return {key: bytes(bytes_of(weight.local_tensor)) for key, weight in all_weights(model, stepper).items()}

    with cut_by_paddle(optimizer, seed=1, dtype="bfloat16", blocks=1) as (model, stepper):
        stepper._multi_precision = masters
        saved = fill(model, stepper)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        dtypes = {}
        for key, weight in optimizer_sharded_state_dict(stepper).items():
            name, _, suffix = key.rpartition(".")
            assert weight.global_shape == (shapes[name] if weight.is_flattened else (1,)), key
            dtypes[suffix] = str(weight.local_tensor.dtype)
        ckpt.save(path, model=model, optimizer=stepper)
    with cut_by_paddle(optimizer, seed=2, dtype="bfloat16", blocks=1) as (model, stepper):
        stepper._multi_precision = masters
        ckpt.load(path, model=model, optimizer=stepper)
        assert contents(model, stepper) == saved
    return dtypes, unfused_dtypes(optimizer, masters)


REPEATED = {"momentum_decay_pow_0", "beta2_pow_0", "mu_product_0", "beta1_pow_0", "rho_0"}
"""Of these a buffer has one value."""


def unfused_dtypes(optimizer: str, masters: bool) -> dict[str, str]:
    model = plain_model(dtype="bfloat16", blocks=1)
    stepper = EVERY[optimizer](model)
    stepper._multi_precision = masters
    with paddle.no_grad():
        stepper._create_accumulators(paddle.static.default_main_program().global_block(), model.parameters())
    dtypes = {f"{name.removeprefix('opt_').lstrip('_')}_0": tensors for name, tensors in stepper._accumulators.items() if tensors}
    return {name: str(next(iter(tensors.values())).dtype) for name, tensors in dtypes.items()} | (
        {"w_0": "paddle.float32"} if stepper._master_weights else {}
    )


def stock_saves(path: str) -> Held:
    with cut_by_paddle("adamw named") as (model, optimizer):
        train(model, optimizer, 0, 2)
        dist.save_state_dict(all_weights(model, optimizer), path, safetensors=True)
        return held(model, optimizer, train(model, optimizer, 2, 4))


def stock_loads(path: str) -> Held:
    original = paddle.Tensor.cuda  # on the CPU wheel, resharding calls it on everything
    with cut_by_paddle("adamw named", seed=99) as (model, optimizer):
        paddle.Tensor.cuda = lambda tensor, *_: tensor.clone()
        try:
            dist.load_state_dict(all_weights(model, optimizer), path, safetensors=True)
        finally:
            paddle.Tensor.cuda = original
        runtime = paddle_runtime_of(model)
        assert runtime is not None
        runtime.values_written()
        return held(model, optimizer, train(model, optimizer, 2, 4))


def scalars_that_differ() -> str:
    with cut_by_paddle("adamw") as (_, optimizer):
        loading = begin_load(optimizer)
        key = [key for key in loading.weights if key.startswith("blocks.0.") and key.endswith(".beta1_pow_acc_0")][-1]
        paddle.assign(paddle.full([1], 0.123), loading.weights[key].local_tensor)
        return error_of(loading.finish)


def whats_left_of_the_cpu_context() -> None:
    before = (fully_shard_fusion.get_current_device_type, dist.reduce_scatter, paddle.Tensor._local_value)
    with cut(Blocks()):
        assert fully_shard_fusion.get_fsdp_context() is not None
        assert error_of(paddle_runtime_on_cpu().__enter__).startswith("ShardingError: a model is cut")
    assert fully_shard_fusion.get_fsdp_context() is None
    assert before == (fully_shard_fusion.get_current_device_type, dist.reduce_scatter, paddle.Tensor._local_value)
    # And other optimizers step their own parameters again.
    layer = nn.Linear(2, 2)
    weight = layer.weight.numpy().copy()
    optimizer = paddle.optimizer.SGD(1.0, parameters=layer.parameters())
    layer(paddle.ones([1, 2])).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(layer.weight.numpy(), weight - 1)


class WithStatistics(Blocks):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.statistics = nn.BatchNorm1D(10)


def refused_models() -> dict[str, str]:
    said = {}
    model: nn.Layer = Blocks(blocks=1)
    said["not cut"] = error_of(sharded_state_dict, model)
    with cut(model):
        group = fully_shard_fusion.get_fsdp_context().buffer_manager.buffer_groups[1]
        model.added = nn.Linear(2, 2)
        said["added"] = error_of(sharded_state_dict, model)
        del model.added
        good, fused = group.params_buffer.param_offsets, group.params_buffer
        fused.param_offsets = dict.fromkeys(good, 0)
        said["overlap"] = error_of(sharded_state_dict, model)
        del fused.param_offsets
        said["attribute"] = error_of(sharded_state_dict, model)
        fused.param_offsets = good
        context = fully_shard_fusion.get_fsdp_context()
        context.mesh = dist.ProcessMesh([list(range(this_rank().world_size))], dim_names=["pp", "dp"])
        said["mesh"] = error_of(sharded_state_dict, model)
    model = WithStatistics()
    with cut(model):
        said["statistics"] = error_of(sharded_state_dict, model)
    return said


class WithDeepTensor(Blocks):
    """Three ranks cut the tensor where stock Paddle restores it wrongly, see ``stock_loads_exactly``."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.deep = self.create_parameter([5, 9, 7])


def warned_of_cuts() -> list[str]:
    model = WithDeepTensor()
    with cut(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded_state_dict(model)
        return [str(one.message) for one in caught]


def with_lr_ratio(optimizer: Any) -> Any:
    optimizer._lr_ratio = lambda _: 0.5  # its argument is refused on CPU by Paddle itself
    return optimizer


def refused_optimizers() -> dict[str, str]:
    """Each optimizer or setting that this runtime gets wrong, and what asking for its state says."""
    adamw, sgd, norm = paddle.optimizer.AdamW, paddle.optimizer.SGD, nn.ClipGradByNorm(1.0)
    attributes = {
        "rate": paddle.ParamAttr(learning_rate=0.5),
        "regularizer": paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(0.1)),
        "need_clip": paddle.ParamAttr(need_clip=False),
    }
    said = {}
    model = Blocks(blocks=1)
    sooner = adamw(0.01, parameters=model.parameters())
    model(paddle.ones([2, 4])).sum().backward()
    sooner.step()
    with cut(model):
        every = model.parameters()
        makers: dict[str, Callable[[], Any]] = {
            "groups": lambda: adamw(0.01, parameters=[{"params": every[:3]}, {"params": every[3:], "weight_decay": 0.0}]),
            "by norm": lambda: sgd(0.01, parameters=every, grad_clip=norm),
            "lr_ratio": lambda: with_lr_ratio(adamw(0.01, parameters=every)),
            "multi tensor": lambda: paddle.optimizer.Momentum(0.01, parameters=every, use_multi_tensor=True),
            "lamb": lambda: paddle.optimizer.Lamb(0.01, parameters=every),
            "lbfgs": lambda: paddle.optimizer.LBFGS(0.01, parameters=every),
            "foreign": lambda: sgd(0.01, parameters=[*every, *nn.Linear(2, 2).parameters()]),
            "other": lambda: sgd(0.01, parameters=nn.Linear(2, 2).parameters()),
            "some": lambda: sgd(0.01, parameters=every[1:]),
            "stepped": lambda: sooner,
            "decay": lambda: adamw(0.01, parameters=every, apply_decay_param_fun=lambda name: "norm" not in name),
            "no decay": lambda: adamw(0.01, parameters=every, apply_decay_param_fun=lambda name: name in {one.name for one in every}),
            "all decay": lambda: adamw(0.01, parameters=every, apply_decay_param_fun=lambda _: True),
        }
        for name, make in makers.items():
            said[name] = error_of(optimizer_sharded_state_dict, make())
        late = makers["no decay"]()
        split_weight_decay(model, late)
        init_optimizer_state(late)
        said["decay, split"] = error_of(split_weight_decay, model, late)
        late = makers["decay"]()
        late._create_accumulators(paddle.static.default_main_program().global_block(), [paddle_runtime().buffers[0].live])  # type: ignore[union-attr]
        said["decay, late"] = error_of(split_weight_decay, model, late)
        said["decay, other model"] = error_of(split_weight_decay, Blocks(), makers["decay"]())
    said["nothing cut"] = error_of(init_optimizer_state, sgd(0.01, parameters=Blocks().parameters()))
    for name, attribute in attributes.items():
        model = Blocks(blocks=1)
        model.head = nn.Linear(10, 1, weight_attr=attribute)
        with cut(model):
            said[name] = error_of(init_optimizer_state, sgd(0.01, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0)))
            said[f"{name}, no clip"] = error_of(init_optimizer_state, sgd(0.01, parameters=model.parameters()))
    return said
