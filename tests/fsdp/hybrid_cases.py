"""What runs on ranks that train several replicas of a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from harness import hybrid_groups, separate_stores, this_rank
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.base import topology
from scenario_table import adamw, sgd
from training_models import Images, Net
from training_runs import Run, compare, language_loss
from training_scenarios import SCENARIOS

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import errors
from paddle_fsdp_ckpt.fsdp import runtime_of


def train(name: str, shards: int) -> None:
    compare(SCENARIOS[name], "float64", **hybrid_groups(shards))


def values(model: nn.Layer) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def sharded(model: nn.Layer, make: Callable[[nn.Layer], Any] = sgd) -> Any:
    optimizer = make(model)
    ckpt.fully_shard(model, optimizer=optimizer, **hybrid_groups(2))
    return optimizer


def whole_tensors() -> None:
    """Rank 0's weights go to all; whole tensors are gathered, handed out, and given back."""
    paddle.seed(this_rank().rank)
    model = Net(2, "matmul")
    first: list[Any] = [values(model) if this_rank().rank == 0 else None]
    dist.broadcast_object_list(first, 0)
    optimizer = sharded(model, adamw)
    for rank, found in ((None, ckpt.full_state_dict(model, to_rank=None)), (3, ckpt.full_state_dict(model, to_rank=3))):
        assert set(found) == (set(first[0]) if rank in (None, this_rank().rank) else set())
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor.numpy(), first[0][name], err_msg=name)
    language_loss(Run(True, hybrid_groups(2)), model, 0).backward()
    optimizer.step()
    optimizer.clear_grad()
    versions = ckpt.parameter_versions(model)
    new = {name: np.full_like(array, len(name)) for name, array in first[0].items()}
    given = {name: paddle.to_tensor(array) for name, array in new.items()} if this_rank().rank == 2 else None
    ckpt.load_full_state_dict(model, given, from_rank=2)
    assert all(number > versions[name] for name, number in ckpt.parameter_versions(model).items())
    ckpt.unshard(model)
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, new[name], err_msg=name)


def running_statistics() -> None:
    """BatchNorm's are the mean of those of all ranks' parts of the batch."""
    paddle.set_default_dtype("float64")
    model, parts = Images(norm=True), [Images(norm=True) for _ in range(4)]
    optimizer = sharded(model)
    found = ckpt.full_state_dict(model, to_rank=None)
    right = []
    for number, part in enumerate(parts):
        part.set_state_dict(found)
        place, rows = Run(True, hybrid_groups(2)), np.random.RandomState(0).standard_normal([12, 3, 5, 5])
        part(paddle.to_tensor(rows[number * 3 : number * 3 + 3]))
        right.append(part.norm._mean.numpy())
    model(place.images(0, 3, 5, 5)).square().mean().backward()
    optimizer.step()
    np.testing.assert_allclose(model.norm._mean.numpy(), np.mean(right, 0), rtol=1e-12)


def shard_with(**options: Any) -> str:
    model = Net(2)
    before = values(model)
    with pytest.raises(errors.ShardingError) as caught:
        ckpt.fully_shard(model, optimizer=None, **options)
    assert runtime_of(model) is None
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, before[name])
    return str(caught.value)


def groups_that_do_not_fit() -> dict[str, str]:
    right = hybrid_groups(2)
    return {
        "twice the same": shard_with(group=right["group"], replicate_group=right["group"]),
        "no group": shard_with(replicate_group=right["replicate_group"]),
        "shared": shard_with(group=dist.get_group(0), replicate_group=right["replicate_group"]),
    }


def one_rank_differs(what: str) -> str:
    """Return the error of a step that only the last rank of the last replica does otherwise."""
    differs = this_rank().rank == 3
    model = Net(2)
    optimizer = sharded(model)
    run = Run(True, hybrid_groups(2))
    if differs and what == "frozen":
        model.blocks[0].up.weight.stop_gradient = True
    if differs and what == "learning rate":
        optimizer.set_lr(0.1)
    if what == "set_value":
        model.norm.weight.set_value(paddle.full(model.norm.weight.shape, 0.5 + differs))
    language_loss(run, model, 0).backward()
    with pytest.raises(errors.ShardingError) as caught:
        optimizer.step()
    return str(caught.value)


def replicas_that_parted(path: str) -> list[str]:
    model = Net(2)
    optimizer = sharded(model, lambda m: paddle.optimizer.AdamW(parameters=m.parameters()))
    with ckpt.local_parameters(model), paddle.no_grad():
        model.norm.weight.fill_(float(this_rank().rank // 2))
    with pytest.raises(errors.RankFailedError) as caught:
        ckpt.save(path, model=model)
    assert not Path(path).exists()
    model.norm.weight.set_value(paddle.ones(model.norm.weight.shape))
    ckpt.save(path, model=model)
    ckpt.init_optimizer_state(optimizer)
    if this_rank().rank // 2:
        for moment in optimizer._accumulators["moment1"].values():
            moment.fill_(1.0)
    with pytest.raises(errors.RankFailedError) as caught_states:
        ckpt.save(f"{path}_2", model=model, optimizer=optimizer)
    return [str(caught.value), str(caught_states.value)]


def models_over_other_replicas(path: str) -> str:
    """Return the error of a save of one model over 2 x 2 ranks, and another over all 4."""
    models = {"a": Net(1), "b": Net(1)}
    ckpt.fully_shard(models["b"], optimizer=None, **hybrid_groups(2))
    ckpt.fully_shard(models["a"], optimizer=None)
    with pytest.raises(errors.ShardingError) as caught:
        ckpt.save(path, model=models)
    return str(caught.value)


def under_fleet() -> list[str]:
    """What ``fully_shard`` makes of a real fleet.init, without groups: it trains at parity, or says what it refuses."""
    messages = []
    kept = dict(vars(fleet.fleet)), topology._HYBRID_PARALLEL_GROUP
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "sharding_degree": 2, "mp_degree": 1, "pp_degree": 1}
    try:
        with separate_stores():  # without, fleet.init fails or hangs on gloo
            fleet.init(is_collective=True, strategy=strategy)
        hybrid = fleet.get_hybrid_communicate_group()
        for options in ({}, {"group": hybrid.get_sharding_parallel_group()}):
            model = Net(1)
            ckpt.fully_shard(model, optimizer=None, **options)
            runtime = runtime_of(model)
            assert runtime is not None
            communicator = runtime.communicator
            assert (communicator.world_size, communicator.replica_count, communicator.ranks) == (2, 2, (0, 1, 2, 3))
        compare(SCENARIOS["attention_blocks"], "float64")
        messages.append(shard_with(group=hybrid.get_data_parallel_group()))
        for kind in ("model", "pipe", "sep"):  # their groups take long to make, and nobody asks for them
            setattr(hybrid, f"get_{kind}_parallel_world_size", lambda: 2)
            messages.append(shard_with())
            delattr(hybrid, f"get_{kind}_parallel_world_size")
        hybrid.get_sharding_parallel_group = hybrid.get_model_parallel_group
        messages.append(shard_with())
    finally:
        vars(fleet.fleet).clear()
        vars(fleet.fleet).update(kept[0])
        topology._HYBRID_PARALLEL_GROUP = kept[1]
    return messages
