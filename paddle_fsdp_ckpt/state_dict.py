"""State dicts of a sharded model and its optimizer, for ``paddle.distributed.save_state_dict`` and ``load_state_dict``.

The values are views of the live tensors: nothing is copied or moved, and what is loaded into them is loaded into the model.
"""

from __future__ import annotations

from typing import Any

from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .errors import ShardingError
from .optim import WholeParameter
from .shardings import init_states, sharding_of, states_of
from .subjects import Subjects, check_tensors

__all__ = ["init_optimizer_state", "optimizer_sharded_state_dict", "sharded_state_dict"]


def sharded_state_dict(model: nn.Layer) -> dict[str, ShardedWeight]:
    """Return this rank's part of a model's parameters and persistable buffers, by structured name.

    Args:
        model: sharded by ``fully_shard``, ours or Paddle's own; or a plain model, whose tensors are then given whole.

    Returns:
        For each parameter of which this rank keeps a piece, and each of its names: a 1-D view with ``is_flattened=True``, and
        the piece as ``flattened_range`` of the flattened parameter; in a world of one rank, a view of the whole shape.
        Buffers, such as BatchNorm's running mean, are replicated.

    Raises:
        ShardingError: the model is a part of a sharded one, holds one, or is distributed by somebody else; or weights were lost.
    """
    check_tensors(model)
    sharding = sharding_of(model)
    lost = sharding.lost_weights()
    if lost is not None:
        raise lost
    sharding.warn_of_cuts()
    if sharding.known_sums is not None:
        sharding.known_sums.are_trusted = False  # whoever has the views may write to them, at any time
    return sharding.model_weights(model)


def optimizer_sharded_state_dict(optimizer: Any) -> dict[str, ShardedWeight]:
    """Return this rank's part of an optimizer's states, by ``<structured name>.<state>_0``, master weights by ``<structured name>.w_0``.

    An optimizer that has no state yet gets it first, as by :func:`init_optimizer_state`; parameters that never had a gradient
    in one that has stepped have no state, and no key.

    Args:
        optimizer: bound to a sharded model; or one that steps a model that Paddle's own ``fully_shard`` cut.

    Returns:
        Elementwise states as parameters are in :func:`sharded_state_dict`; scalars replicated, with their exact shape; ASGD's ``y``
        as the box ``[:, a:b]`` of [batch_num, elements of the flattened parameter].

    Raises:
        ShardingError: the optimizer is not bound.
        UnsupportedOptimizerError: it has a state that its class is not known to have.
    """
    return states_of(optimizer)


def init_optimizer_state(optimizer: Any) -> None:
    """Create the states of an optimizer, as its first step would, without a step: no value moves, no counter advances.

    Parameters that have states keep them; frozen ones get none.

    Args:
        optimizer: as for :func:`optimizer_sharded_state_dict`.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
    """
    init_states(optimizer)


def weights_to_store(subjects: Subjects, rank: int) -> dict[str, ShardedWeight]:
    """Return what this rank's file holds of a model and its optimizers: every value in the file of just one rank.

    Only states that there are; none is created. Buffers, and what is plain, are stored by rank 0; a scalar state by the rank
    that stores the parameter's first element. Replicas divide what they all keep.
    """
    weights: dict[str, ShardedWeight] = {}
    sharding = subjects.sharding
    if subjects.model is not None:
        sharding.warn_of_cuts()
        weights.update(sharding.written_model_weights(subjects.model))
        if rank > 0:
            weights = {key: weight for key, weight in weights.items() if key not in subjects.whole_keys}
    for stepper in subjects.steppers:
        for state in sharding.states(stepper.optimizer, stepper.parameters):
            if rank > 0 and isinstance(state.shard, WholeParameter):
                continue
            weight = sharding.written_state(state)
            if weight is not None:
                if state.key in weights:
                    raise ShardingError(f"'{state.key}' is both a tensor of the model and a state of the optimizer; rename the tensor")
                weights[state.key] = weight
    return weights
