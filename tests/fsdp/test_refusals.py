"""Bad input to ``fully_shard``: a clear error on every rank before anything changes, no hang, and the model trains on unsharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from harness import RankPool, this_rank
from paddle import nn
from training_models import Block, Net
from training_runs import Run, language_loss

from paddle_fsdp_ckpt import errors
from paddle_fsdp_ckpt.fsdp import ShardedParameter, runtime_of
from paddle_fsdp_ckpt.optim import bind_optimizer, binding_of
from paddle_fsdp_ckpt.training import fully_shard

Ranks = Callable[[int], RankPool]


@dataclass
class Call:
    """A call of ``fully_shard``."""

    model: Any
    options: dict[str, Any] = field(default_factory=dict)


def good() -> Call:
    model = Net(2)
    return Call(model, {"optimizer": paddle.optimizer.SGD(0.1, parameters=model.parameters())})


def no_parameters() -> Call:
    return Call(nn.Sequential(nn.ReLU(), nn.Dropout()))


def not_a_layer() -> Call:
    return Call([nn.Linear(2, 2)])


def sharded_already() -> Call:
    model = Net(2)
    fully_shard(model, optimizer=None, group=_alone())
    return Call(model)


def holds_a_sharded_layer() -> Call:
    model = Net(2)
    fully_shard(model.blocks, optimizer=None, group=_alone())
    return Call(model)


def integer_parameter() -> Call:
    model = Net(2)
    model.blocks[0].codes = paddle.base.framework.EagerParamBase(shape=[4], dtype=paddle.int8, name="codes")
    model.blocks[0].codes.stop_gradient = True
    return Call(model)


def complex_parameter() -> Call:
    model = Net(2)
    model.blocks[0].phase = paddle.base.framework.EagerParamBase(shape=[3], dtype=paddle.complex64, name="phase")
    return Call(model)


def buffer_that_trains() -> Call:
    model = Net(2)
    scale = paddle.ones([6])
    scale.stop_gradient = False
    model.blocks[1].register_buffer("scale", scale)
    return Call(model)


def shared_memory() -> Call:
    model = Net(2)
    whole, part = model.blocks[0].up.weight, model.blocks[1].norm.weight
    part.get_tensor()._share_data_with(whole.detach().flatten()._slice(6, 12).get_tensor())
    return Call(model)


def unit_layers_that_are_not_there() -> Call:
    return Call(Net(2), {"unit_layers": [Block, "LlamaDecoderLayer"]})


def unknown_reduction() -> Call:
    return Call(Net(2), {"gradient_reduction": "median"})


def optimizer_of_another_model() -> Call:
    return Call(Net(2), {"optimizer": paddle.optimizer.SGD(0.1, parameters=Net(1).parameters())})


def optimizer_over_more_than_the_model() -> Call:
    model = Net(2)
    return Call(model, {"optimizer": paddle.optimizer.SGD(0.1, parameters=[*model.parameters(), *nn.Linear(2, 2).parameters()])})


def optimizer_that_has_stepped() -> Call:
    model = Net(2)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    train(model, optimizer)
    return Call(model, {"optimizer": optimizer})


def optimizer_given_states() -> Call:
    model = Net(2)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    optimizer.set_state_dict({"linear_0.w_0_velocity_0": paddle.ones([1])})
    return Call(model, {"optimizer": optimizer})


def unsupported_optimizer() -> Call:
    model = Net(2)
    return Call(model, {"optimizer": paddle.optimizer.LBFGS(0.1, parameters=model.parameters())})


def multi_tensor_optimizer() -> Call:
    model = Net(2)
    return Call(model, {"optimizer": paddle.optimizer.Adam(0.1, parameters=model.parameters(), use_multi_tensor=True)})


def not_an_optimizer() -> Call:
    return Call(Net(2), {"optimizer": [3]})


def own_clip() -> Call:
    class Clip(nn.ClipGradByNorm):  # type: ignore[misc]
        pass

    model = Net(2)
    return Call(model, {"optimizer": paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=Clip(1.0))})


BAD = {
    no_parameters: ("ShardingError", "no parameters"),
    not_a_layer: ("ShardingError", "takes a paddle.nn.Layer, not list"),
    sharded_already: ("ShardingError", "already sharded by this package: embed.weight"),
    holds_a_sharded_layer: ("ShardingError", "already sharded by this package: blocks.0.norm.weight"),
    integer_parameter: ("ShardingError", "blocks.0.codes (int8)"),
    complex_parameter: ("ShardingError", "blocks.0.phase (complex64)"),
    buffer_that_trains: ("ShardingError", "buffers that train (stop_gradient=False), whose gradients nobody would reduce: blocks.1.scale"),
    shared_memory: ("ShardingError", "'blocks.0.up.weight' and 'blocks.1.norm.weight' are different objects that share memory"),
    unit_layers_that_are_not_there: ("ShardingError", "no layer of class LlamaDecoderLayer; it has Block, Embedding"),
    unknown_reduction: ("ShardingError", "'mean' or 'sum', not 'median'"),
    optimizer_of_another_model: ("ShardingError", "parameters are not in a sharded model"),
    optimizer_over_more_than_the_model: ("ShardingError", "2 of its 19 parameters are not in a sharded model"),
    optimizer_that_has_stepped: ("UnsupportedOptimizerError", "has state already"),
    optimizer_given_states: ("UnsupportedOptimizerError", "has state already"),
    unsupported_optimizer: ("UnsupportedOptimizerError", "LBFGS can't step a sharded model"),
    multi_tensor_optimizer: ("UnsupportedOptimizerError", "use_multi_tensor=True"),
    not_an_optimizer: ("UnsupportedOptimizerError", "int is not an optimizer"),
    own_clip: ("UnsupportedOptimizerError", "Clip can't clip"),
}


def _alone() -> Any:
    if not dist.is_initialized():
        return None
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def refused(name: str, on_rank: int | None) -> tuple[str, str]:
    """Make a bad call (on one rank only, the others a good one), look whether anything changed, and return the error."""
    bad = next(case for case in BAD if case.__name__ == name)
    call = bad()
    if on_rank not in (None, this_rank().rank):
        call = good()
    before = snapshot(call.model)
    with pytest.raises(errors.CheckpointError) as caught:
        fully_shard(call.model, **call.options)
    assert snapshot(call.model) == before
    optimizer = call.options.get("optimizer")
    if isinstance(optimizer, paddle.optimizer.Optimizer):
        assert binding_of(optimizer) is None
        if optimizer._parameter_list[0] is not None and not isinstance(optimizer, paddle.optimizer.LBFGS):
            train(call.model, None)
            optimizer.clear_grad()
    return type(caught.value).__name__, str(caught.value)


def snapshot(model: Any) -> Any:
    """Everything that sharding changes."""
    if not isinstance(model, nn.Layer):
        return None
    layers = [
        (layer, list(layer.__dict__), dict(layer._forward_pre_hooks), dict(layer._forward_post_hooks)) for layer in model.sublayers(True)
    ]
    parameters = [
        (name, type(p), None if isinstance(p, ShardedParameter) or not p._is_initialized() else p.numpy().tobytes())
        for name, p in model.named_parameters()
    ]
    return [(id(layer), *rest) for layer, *rest in layers], parameters


def train(model: nn.Layer, optimizer: Any, step: int = 0) -> float:
    loss = language_loss(Run(False), model, step)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.clear_grad()
    return float(loss.item())


@pytest.mark.parametrize("name", [case.__name__ for case in BAD])
def test_bad_input_is_refused(ranks: Ranks, name: str) -> None:
    kind, text = next(expected for case, expected in BAD.items() if case.__name__ == name)
    for world_size, on_rank in ((1, None), (2, None), (2, 1), (2, 0)):
        for rank, (got, message) in enumerate(ranks(world_size).run(refused, name, on_rank, timeout=20)):
            if on_rank in (None, rank):
                assert got == kind
                assert text in message
            else:
                assert got == "RankFailedError"
                assert f"rank {on_rank} refused" in message


def differing(what: str) -> str:
    rank, model = this_rank().rank, Net(2 if what != "blocks" else 2 + this_rank().rank)
    options: dict[str, Any] = {"optimizer": None}
    if rank == 1:
        if what == "shape":
            model.head = nn.Linear(6, 14)
        elif what == "dtype":
            model.head = model.head.to(dtype="float64")
        elif what == "trains":
            model.head.bias.stop_gradient = True
        elif what == "names":
            model.tail = model.head
            del model.head
        elif what == "order":
            norm = model.norm
            del model.norm
            model.norm = norm
        elif what == "buffers":
            model.register_buffer("steps", paddle.zeros([2]))
        elif what == "units":
            options["unit_layers"] = ["Linear"]
        elif what == "reduction":
            options["gradient_reduction"] = "sum"
        elif what == "optimizers":
            options["optimizer"] = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    before = snapshot(model)
    with pytest.raises(errors.ShardingError) as caught:
        fully_shard(model, **options)
    assert snapshot(model) == before
    return str(caught.value)


@pytest.mark.parametrize("what", ["blocks", "shape", "dtype", "trains", "names", "order", "buffers", "units", "reduction", "optimizers"])
def test_ranks_with_different_models_are_refused(ranks: Ranks, what: str) -> None:
    for message in ranks(2).run(differing, what, timeout=20):
        assert "the model differs between ranks" in message


def shard_under_fleet() -> str:
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    call = good()
    before = snapshot(call.model)
    with pytest.raises(errors.ShardingError) as caught:
        fully_shard(call.model, **call.options)
    assert snapshot(call.model) == before
    return str(caught.value)


def shard_over_fleets_sharding_group() -> int:
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    call = good()
    fully_shard(call.model, **call.options)
    runtime = runtime_of(call.model)
    assert runtime is not None
    assert runtime.communicator.group is fleet.fleet._hcg.get_sharding_parallel_group()
    return runtime.communicator.world_size


def shard_what_paddle_distributed() -> list[str]:
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    whole, part = Net(2), Net(2)
    dist.shard_layer(whole, mesh)
    part.blocks[0].up.weight = dist.shard_tensor(part.blocks[0].up.weight, mesh, [dist.Shard(0)])
    messages = []
    for model in (whole, part):
        with pytest.raises(errors.ShardingError) as caught:
            fully_shard(model)
        messages.append(str(caught.value))
    return messages


def test_fleet_with_data_parallelism_is_refused_and_paddles_own_distribution_too(fresh_ranks: Ranks) -> None:
    pool = fresh_ranks(2)
    for all_of_it, part in pool.run(shard_what_paddle_distributed, timeout=30):
        assert "already distributed by Paddle: embed.weight" in all_of_it
        assert "already distributed by Paddle: blocks.0.up.weight;" in part
    for message in pool.run(shard_under_fleet, timeout=30):
        assert "dp_degree=2" in message


def test_fleets_sharding_group_is_the_default(fresh_ranks: Ranks) -> None:
    assert fresh_ranks(2).run(shard_over_fleets_sharding_group, timeout=30) == [2, 2]


def shard_over_a_group_of_others() -> str:
    group = dist.new_group([0])
    if this_rank().rank == 0:
        return ""
    with pytest.raises(errors.ShardingError) as caught:
        fully_shard(Net(1), optimizer=None, group=group)
    return str(caught.value)


def test_a_group_without_this_rank_is_refused(ranks: Ranks) -> None:
    assert "not in the group of ranks [0]" in ranks(2).run(shard_over_a_group_of_others)[1]


def bind_badly() -> str:
    model = Net(2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with pytest.raises(errors.ShardingError) as caught:
        bind_optimizer(optimizer)
    before = [p.numpy() for p in model.parameters()]
    train(model, optimizer)
    assert any((np.asarray(p.numpy()) != b).any() for p, b in zip(model.parameters(), before, strict=True))
    return str(caught.value)


def test_binding_an_optimizer_over_no_sharded_model_is_refused(single: RankPool) -> None:
    assert "17 of its 17 parameters are not in a sharded model" in single.run(bind_badly)[0]


def step_with_ranks_that_differ(kind: str) -> str:
    paddle.seed(1)
    model = Net(2)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    fully_shard(model, optimizer=optimizer)
    loss = model(paddle.arange(4).reshape([1, 4])).sum()
    if this_rank().rank == 1:
        if kind == "learning rate":
            optimizer.set_lr(0.2)
        else:
            model.blocks[0].up.weight.stop_gradient = True
    loss.backward()
    with pytest.raises(errors.ShardingError) as caught:
        optimizer.step()
    assert not any(optimizer._accumulators.values())
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"), [("learning rate", "differ in the optimizer's learning rate"), ("frozen", "which parameters are frozen")]
)
def test_ranks_that_would_step_to_different_models_are_refused(ranks: Ranks, kind: str, words: str) -> None:
    for message in ranks(2).run(step_with_ranks_that_differ, kind):
        assert words in message
