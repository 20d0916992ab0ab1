"""What an optimizer must be, hold and ask for to step a sharded model right; the rest is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import paddle

from ..errors import ShardingError, UnsupportedOptimizerError, listing
from ..fsdp import ShardedParameter, is_elementwise_regularizer
from .catalog import check_own_methods
from .clipping import check_clip
from .parameters import parameter_groups

_WRAPS = ("_inner_opt", "_optim", "inner_optimizer", "inner_opt")
"""Where Paddle's optimizers around another one keep it."""


def check_is_optimizer(optimizer: Any) -> None:
    """Raise where something is no optimizer of Paddle's, or one around another.

    ``fleet.distributed_optimizer`` and its kin reduce gradients, cut states or read ``main_grad`` by themselves, on top of what is done for
    a sharded model.

    Raises:
        UnsupportedOptimizerError: it says what to give instead.
    """
    inner = optimizer
    while (wrapped := next((vars(inner)[key] for key in _WRAPS if key in getattr(inner, "__dict__", {})), None)) is not None:
        inner = wrapped
    if inner is not optimizer:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} wraps {type(inner).__name__}, and would reduce, cut, scale or average by itself what "
            f"fully_shard has cut; make {type(inner).__name__} alone, without fleet.distributed_optimizer, group_sharded_parallel and the "
            "like, and give that one and step it"
        )
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        raise UnsupportedOptimizerError(f"{type(optimizer).__name__} is not an optimizer of paddle.optimizer")


def check_parameters(optimizer: Any, about_to_shard: Collection[int] = ()) -> None:
    """Raise where an optimizer's parameters are not those of a sharded model (or in ``about_to_shard``, by id).

    Raises:
        ShardingError: naming the parameters.
        UnsupportedOptimizerError: two of them share a name, or one has a regularizer that can't be right on pieces.
    """
    parameters = [parameter for group in parameter_groups(optimizer) for parameter in group["params"]]
    others = [p for p in parameters if not isinstance(p, ShardedParameter)]
    foreign = [p.name for p in others if not (hasattr(p, "_stays_whole") or id(p) in about_to_shard)]
    if not parameters:
        raise ShardingError(f"{type(optimizer).__name__}: it holds no parameters; give it model.parameters()")
    if foreign:
        raise ShardingError(
            f"{type(optimizer).__name__}: {len(foreign)} of its {len(parameters)} parameters are not in a sharded model: "
            f"{listing(foreign)}; shard their model first, and give parameters outside it an optimizer of their own"
        )
    said = [(parameter.name, parameter.__dict__.get("regularizer")) for parameter in parameters]
    names = [name for name, _ in said]
    twice = sorted(name for name, count in Counter(names).items() if count > 1) if len(set(names)) < len(names) else []
    if twice:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}: it holds several parameters of one Paddle name, so Paddle would share their states: "
            f"{listing(twice)}; give each its own ParamAttr(name=...), or build the layers under different unique_name guards"
        )
    strange = [name for name, regularizer in said if regularizer is not None and not is_elementwise_regularizer(regularizer)]
    if strange:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}: parameters have a regularizer that is neither L1Decay nor L2Decay, and would see pieces of them: "
            f"{listing(strange)}"
        )


def check_regularizers(optimizer: Any) -> None:
    """Raise where an optimizer regularizes by something that can't be right on pieces of parameters.

    Raises:
        UnsupportedOptimizerError: naming its class.
    """
    used = [getattr(optimizer, "regularization", None), *(group.get("weight_decay") for group in parameter_groups(optimizer))]
    strange = [type(one).__name__ for one in used if not is_elementwise_regularizer(one)]
    if strange:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}: weight_decay is {listing(strange)}, neither a number nor L1Decay or L2Decay of "
            "paddle.regularizer, and would see pieces of parameters"
        )


def check_can_step(optimizer: Any, about_to_shard: Collection[int]) -> None:
    """Raise where an optimizer of a known class can't step pieces of its parameters right.

    Args:
        optimizer: not bound.
        about_to_shard: ids of parameters that are not sharded and will be.

    Raises:
        ShardingError: it holds other parameters that are not sharded, or none.
        UnsupportedOptimizerError: its methods, its clip, its settings or its parameters' can't be made right, or it has stepped already.
    """
    check_own_methods(optimizer)
    check_parameters(optimizer, about_to_shard)
    for clip in (optimizer._grad_clip, *(group.get("grad_clip") for group in parameter_groups(optimizer))):
        check_clip(clip)
    if getattr(optimizer, "_use_multi_tensor", False):
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}: use_multi_tensor=True needs a gradient of every parameter on every rank, and a rank "
            "keeps only some; leave it out"
        )
    check_regularizers(optimizer)
    dtypes = {str(parameter.dtype) for group in parameter_groups(optimizer) for parameter in group["params"]}
    if isinstance(optimizer, paddle.optimizer.Rprop) and len(dtypes) > 1:
        raise UnsupportedOptimizerError(
            "Rprop: it keeps its etas and learning_rate_range in the dtype of the first parameter that it steps, and ranks may step "
            f"different ones first; its parameters are {', '.join(sorted(dtypes))}: make one Rprop for each dtype"
        )
    if any(optimizer._accumulators.values()) or optimizer._master_weights or optimizer._accumulators_holder:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}: it has state already, for parameters as they were before they were sharded; bind it before its "
            "first step and without set_state_dict, then load its state, as save writes it of a plain model and its optimizer"
        )
