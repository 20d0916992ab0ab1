"""``unshard``: what undoes ``fully_shard``."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from .fsdp import runtime_of, unshard_model
from .gather_states import full_optimizer_state_dict
from .optim import (
    WholeParameter,
    bound_optimizers,
    create_states,
    drop_states,
    optimizer_shards,
    optimizer_states,
    parameter_groups,
    unbind_optimizer,
    whole_parameters,
)
from .optimizer_states import MASTER_WEIGHT_KEY


def unshard(model: nn.Layer) -> nn.Layer:
    """Undo ``fully_shard``: every rank has the whole model again, and the optimizers that were bound step it as plain ones.

    All ranks must call it. Weights and optimizer states are what they were, whole; hooks and replaced methods are gone; gradients are
    dropped. Each rank needs memory for the whole model and the states of all its parameters, and from now on trains by itself.

    Args:
        model: what was given to our ``fully_shard``.

    Returns:
        ``model``.

    Raises:
        ShardingError: it is not sharded by us, is in use, or one of its optimizers steps another sharded model too. Nothing was changed.
        UnsupportedOptimizerError: an optimizer has a state that its class is not known to have. Nothing was changed.
    """
    runtime = runtime_of(model)
    optimizers = [] if runtime is None else bound_optimizers(runtime)
    states = [full_optimizer_state_dict(optimizer, device=None, to_rank=None) for optimizer in optimizers]
    shards = [optimizer_shards(optimizer) for optimizer in optimizers]
    unshard_model(model)
    whole = whole_parameters(model)
    for optimizer, held, values in zip(optimizers, shards, states, strict=True):
        unbind_optimizer(optimizer)
        drop_states(optimizer, held)
        _give_states(optimizer, whole, values)
    return model


def _give_states(optimizer: Any, whole: dict[int, WholeParameter], values: dict[str, paddle.Tensor]) -> None:
    """Let a plain optimizer have these states, and no others."""
    every = [parameter for group in parameter_groups(optimizer) for parameter in group["params"]]
    held = [whole[id(parameter)] for parameter in every if id(parameter) in whole]
    stored = {key.rpartition(".")[0] for key in values}
    create_states(optimizer, [one for one in held if one.slot.name in stored])
    with paddle.no_grad():
        for state in optimizer_states(optimizer, held):
            # Where multi_precision was set meanwhile, master weights are new, and hold the weights already.
            if state.suffix != MASTER_WEIGHT_KEY or state.key in values:
                paddle.assign(values[state.key], state.tensor)
