"""``fully_shard``: what a training loop calls once, before it trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import paddle.distributed as dist
from paddle import nn

from .errors import ShardingError, listing
from .fsdp import GradientReduction, Joined, check_model, shard_model, walk
from .optim import bind_optimizer, check_holds_alike, check_optimizer, optimizer_list, parameter_groups

_BIND_LATER: Any = object()


def fully_shard(
    model: nn.Layer,
    *,
    optimizer: Any = _BIND_LATER,
    group: dist.communication.group.Group | None = None,
    replicate_group: dist.communication.group.Group | None = None,
    unit_layers: Sequence[type[nn.Layer] | str] | None = None,
    gradient_reduction: GradientReduction = "mean",
    prefetch: int = 0,
) -> nn.Layer:
    """Shard a model in place over the ranks of a group, so that each keeps one slice of every parameter, gradient and state.

    All ranks must call it, with the same model. The first rank's values of parameters and buffers go to all. During a
    unit's forward and backward its parameters are whole; otherwise they have their whole shape and no data.

    Afterwards every rank must run the same units in the same order, forward and backward: a layer that the data of one rank
    skips must be in one unit with its neighbours, as an expert is in its block's. Buffers and BatchNorm's running statistics
    are not sharded: each rank has its own, and the statistics are averaged over the ranks at each step.

    Different Parameter objects that are the same memory exactly (place, shape, strides, dtype), as after ``one._share_buffer_to(other)``,
    are made one parameter: the layers get the first of the objects, and a warning names them. It is stepped once, with the sum of the
    gradients of all its uses. Optimizers made before hold it once too. What shares memory in any other way is refused.

    Args:
        model: parameters of dtype float32, float64, float16 or bfloat16. Those made under ``paddle.LazyGuard`` get their initial values
            here, flat buffer by flat buffer, so that no rank ever holds the whole model, but its shards and twice a flat buffer.
        optimizer: the optimizer (or a list of them) that steps this model; left out, call ``bind_optimizer`` before the
            first backward; None means that you step the model yourself, see ``local_parameters``.
        group: the ranks to shard over; by default fleet's sharding group, else all ranks. Without an initialised process group, one rank.
        replicate_group: the ranks that keep the same shards as this one, itself among them, for hybrid sharding (HSDP): gradients are
            reduced over both groups, and the weights are gathered over ``group`` alone. By default, with fleet's sharding group, fleet's
            data parallel group.
        unit_layers: classes, or class names, of the layers that are gathered and released together; by default the
            repeated blocks found in the model. Every other layer with parameters of its own is a unit by itself.
        gradient_reduction: gradients are the ``"mean"`` (or the ``"sum"``) over the ranks of each rank's gradient.
        prefetch: how many units to fetch ahead while one computes, and of how many more the gradients are reduced meanwhile; each is that
            many whole units of memory. For backends that communicate beside the computation, which gloo doesn't; not tried on others.

    Returns:
        ``model``.

    Raises:
        ShardingError: the model is sharded already, has no parameters, has parameters that can't be sharded, or differs between ranks;
            parameters that are the same memory have different settings; or the groups don't fit together.
        UnsupportedOptimizerError: the optimizer can't step a sharded model.
        RankFailedError: another rank raised one of these. Nothing was changed on any rank.
    """
    optimizers = optimizer_list(None if optimizer is _BIND_LATER else optimizer)

    def check(about_to_shard: Collection[int], to_join: Sequence[Joined]) -> list[str]:
        for one in optimizers:
            check_optimizer(one, about_to_shard)
            check_holds_alike(one, to_join)
            if not any(id(parameter) in about_to_shard for group in parameter_groups(one) for parameter in group["params"]):
                raise ShardingError(f"{type(one).__name__}: it holds no parameter of this model; give the optimizer that steps it")
        return [type(one).__name__ for one in optimizers]

    runtime = shard_model(
        model,
        group=group,
        replicate_group=replicate_group,
        unit_layers=unit_layers,
        gradient_reduction=gradient_reduction,
        prefetch=prefetch,
        check=check,
    )
    runtime.steps_by_hand = optimizer is None
    for one in optimizers:
        bind_optimizer(one)
    return model


def drop_submodules(model: nn.Layer, names: Iterable[str]) -> None:
    """Take layers out of a model before it is sharded, so that nothing of them is trained, gathered or saved; a value head, for example.

    The names of all other layers and parameters stay. What the model's forward does without them is its own affair.

    Args:
        model: not sharded.
        names: structured names of layers, such as ``"visual.encoder"``; a layer that hangs in several places goes from these only.

    Raises:
        ShardingError: the model is sharded, or has no layer of one of the names. Nothing was changed.
    """
    check_model(model)
    wanted = list(dict.fromkeys([names] if isinstance(names, str) else names))
    layers = dict(walk(model))
    unknown = [name for name in wanted if not name or name not in layers]
    if unknown:
        raise ShardingError(
            f"drop_submodules: the model has no layers {listing(map(repr, unknown))}; it has {listing(name for name in layers if name)}"
        )
    for name in wanted:
        parent, _, own = name.rpartition(".")
        layers[parent]._sub_layers.pop(own, None)
