"""State dicts of a sharded model and its optimizer, for ``paddle.distributed.save_state_dict`` and ``load_state_dict``.

The values are views of the live tensors: nothing is copied or moved, and what is loaded into them is loaded into the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .errors import ShardingError
from .fsdp import ParameterShard, named_buffers, named_parameters, runtime_of
from .optim import OptimizerState, StateKind, SteppedParameter, WholeParameter, init_optimizer_state, optimizer_states
from .subjects import Subjects, check_tensors

__all__ = ["init_optimizer_state", "optimizer_sharded_state_dict", "sharded_state_dict"]


def sharded_state_dict(model: nn.Layer) -> dict[str, ShardedWeight]:
    """Return this rank's part of a model's parameters and persistable buffers, by structured name.

    Args:
        model: sharded by ``fully_shard``; or a plain model, whose tensors are then given whole.

    Returns:
        For each parameter of which this rank keeps a piece, and each of its names: a 1-D view with ``is_flattened=True``, and
        the piece as ``flattened_range`` of the flattened parameter; in a world of one rank, a view of the whole shape.
        Buffers, such as BatchNorm's running mean, are replicated.

    Raises:
        ShardingError: the model is a part of a sharded one, holds one, or is distributed by somebody else.
    """
    check_tensors(model)
    weights: dict[str, ShardedWeight] = {}
    runtime = runtime_of(model)
    if runtime is None:
        for named in named_parameters(model):
            weights.update({name: _replicated(name, named.parameter) for name in named.names})
    else:
        for shard in runtime.shards:
            if shard.range.numel:
                weights.update({name: _elementwise(name, shard, shard.local) for name in shard.slot.names})
    weights.update({name: _replicated(name, buffer) for name, buffer in named_buffers(model)})
    return weights


def optimizer_sharded_state_dict(optimizer: Any) -> dict[str, ShardedWeight]:
    """Return this rank's part of an optimizer's states, by ``<structured name>.<state>_0``, master weights by ``<structured name>.w_0``.

    An optimizer that has no state yet gets it first, as by :func:`init_optimizer_state`; parameters that never had a gradient
    in one that has stepped have no state, and no key.

    Args:
        optimizer: bound to a sharded model.

    Returns:
        Elementwise states as parameters are in :func:`sharded_state_dict`; scalars replicated, with their exact shape.

    Raises:
        ShardingError: the optimizer is not bound.
        UnsupportedOptimizerError: it has a state that its class is not known to have.
    """
    _ensure_state(optimizer)
    return existing_states(optimizer)


def existing_states(optimizer: Any, parameters: Sequence[SteppedParameter] | None = None) -> dict[str, ShardedWeight]:
    """Return what :func:`optimizer_sharded_state_dict` returns, of the states that there are."""
    return {state.key: _weight(state) for state in optimizer_states(optimizer, parameters)}


def weights_to_store(subjects: Subjects, rank: int) -> dict[str, ShardedWeight]:
    """Return what this rank's file holds of a model and its optimizers: every value in the file of just one rank.

    Only states that there are; none is created. Buffers, and what is plain, are stored by rank 0; a scalar state by the rank
    that keeps the parameter's first element.
    """
    weights: dict[str, ShardedWeight] = {}
    is_plain = subjects.runtime is None
    if subjects.model is not None:
        weights.update(sharded_state_dict(subjects.model))
        if rank > 0:
            replicated = set(weights) if is_plain else {name for name, _ in named_buffers(subjects.model)}
            weights = {key: weight for key, weight in weights.items() if key not in replicated}
    for stepper in subjects.steppers:
        if rank == 0 or not is_plain:
            for state in optimizer_states(stepper.optimizer, stepper.parameters):
                if state.kind is StateKind.ELEMENTWISE or state.shard.range.start == 0:
                    if state.key in weights:
                        raise ShardingError(f"'{state.key}' is both a tensor of the model and a state of the optimizer; rename the tensor")
                    weights[state.key] = _weight(state)
    return weights


def _ensure_state(optimizer: Any) -> None:
    if not any(optimizer._accumulators.values()) and not optimizer._master_weights:
        init_optimizer_state(optimizer)


def _weight(state: OptimizerState) -> ShardedWeight:
    if state.kind is StateKind.ELEMENTWISE and not isinstance(state.shard, WholeParameter):
        assert isinstance(state.shard, ParameterShard)
        return _elementwise(state.key, state.shard, state.tensor)
    return _replicated(state.key, state.tensor)


def _elementwise(key: str, shard: ParameterShard, piece: paddle.Tensor) -> ShardedWeight:
    # A view of its own: stock load_state_dict reshapes what it is given, in place.
    view = piece._slice(0, piece.shape[0])
    shape, offset = shard.slot.shape, (0,) * len(shard.slot.shape)
    if shard.buffer.layout.world_size == 1:
        view.get_tensor()._set_dims(list(shape))
        return ShardedWeight(key, view, shape, shape, offset)
    return ShardedWeight(key, view, shape, shape, offset, True, slice(shard.range.start, shard.range.stop))


def _replicated(key: str, tensor: paddle.Tensor) -> ShardedWeight:
    shape = tuple(tensor.shape)
    return ShardedWeight(key, tensor, shape, shape, (0,) * len(shape))
