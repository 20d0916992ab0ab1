"""The registry: for one optimizer, which live tensor holds which state of which parameter.

It reads the optimizer's own tables, ``_accumulators`` and ``_master_weights``, never the names of variables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle

from ..errors import ShardingError, UnsupportedOptimizerError
from ..fsdp import ParameterShard
from .binding import binding_of, optimizer_shards, parameter_groups
from .catalog import StateKind, entry_of, state_name

MASTER_WEIGHT_KEY = "w_0"
"""What follows a parameter's name in the key of its master weight."""


@dataclass(frozen=True)
class OptimizerState:
    """One state of one parameter, of which this rank keeps a piece.

    Attributes:
        shard: the parameter.
        suffix: what follows the parameter's name in the state's key: ``moment1_0``, or ``w_0`` for the master weight.
        kind: one value an element, or one a parameter.
        tensor: the live tensor. Elementwise: 1-D, this rank's piece. Scalar: as the optimizer made it, shape [] or [1].
    """

    shard: ParameterShard
    suffix: str
    kind: StateKind
    tensor: paddle.Tensor

    @property
    def key(self) -> str:
        """The state dict key."""
        return f"{self.shard.slot.name}.{self.suffix}"


def state_suffixes(optimizer: Any) -> list[str]:
    """Return what may follow a parameter's name in the keys of this optimizer's states."""
    return [f"{state}_0" for state in entry_of(optimizer).states] + [MASTER_WEIGHT_KEY]


def optimizer_states(optimizer: Any) -> list[OptimizerState]:
    """Return the states that a bound optimizer has of the parameters of which this rank keeps a piece.

    Raises:
        ShardingError: the optimizer is not bound.
        UnsupportedOptimizerError: it has a state that its class's table entry doesn't name, or one of an unexpected shape.
    """
    _check_bound(optimizer)
    kinds = entry_of(optimizer).states
    shards = [shard for shard in optimizer_shards(optimizer) if shard.range.numel]
    masters = optimizer._master_weights
    names = {shard.index: _state_owner(optimizer, shard) for shard in shards}
    states: list[OptimizerState] = []
    for accumulator, tensors in optimizer._accumulators.items():
        state = state_name(optimizer, accumulator)
        if tensors and state not in kinds:
            raise UnsupportedOptimizerError(f"{type(optimizer).__name__} keeps a state '{state}' that is not in the table of its states")
        for shard in shards:
            tensor = tensors.get(names[shard.index])
            if tensor is not None:
                states.append(OptimizerState(shard, f"{state}_0", kinds[state], tensor))
    states += [
        OptimizerState(shard, MASTER_WEIGHT_KEY, StateKind.ELEMENTWISE, masters[shard.parameter.name])
        for shard in shards
        if shard.parameter.name in masters
    ]
    for one in states:
        _check_shape(one)
    return states


def init_optimizer_state(optimizer: Any) -> None:
    """Create the states of a bound optimizer, as its first step would, without a step: no value moves, no counter advances.

    Parameters that have states keep them; frozen ones get none.

    Raises:
        ShardingError: the optimizer is not bound.
    """
    _check_bound(optimizer)
    create_states(optimizer, {id(shard) for shard in optimizer_shards(optimizer) if not shard.parameter.stop_gradient})


def create_states(optimizer: Any, wanted: Collection[int]) -> None:
    """Create the states of those parameters (ids of shards) that have none and of which this rank keeps a piece."""
    binding = binding_of(optimizer)
    assert binding is not None
    block = paddle.static.default_main_program().global_block()
    for group in parameter_groups(optimizer):
        chosen = [p for p in group["params"] if id(p._shard) in wanted and p._shard.range.numel]
        if not chosen:
            continue
        with paddle.no_grad(), binding.showing_local([parameter._shard for parameter in chosen]):
            grouped = optimizer._param_groups and isinstance(optimizer._param_groups[0], dict)
            optimizer._create_accumulators(block, {**group, "params": chosen} if grouped else chosen)


def drop_states(optimizer: Any, unwanted: Collection[int]) -> None:
    """Forget all states of these parameters (ids of shards); the next step starts them afresh."""
    for shard in optimizer_shards(optimizer):
        if id(shard) in unwanted:
            owner = _state_owner(optimizer, shard)
            for tensors in optimizer._accumulators.values():
                tensors.pop(owner, None)
            optimizer._master_weights.pop(shard.parameter.name, None)
            optimizer._already_create_accumulator.discard(shard.parameter.name)


@contextmanager
def states_restored_on_error(optimizer: Any) -> Iterator[None]:
    """Give the optimizer back the states that it had, where the block raises."""
    accumulators = {name: dict(tensors) for name, tensors in optimizer._accumulators.items()}
    masters = dict(optimizer._master_weights)
    created = set(optimizer._already_create_accumulator)
    names = list(optimizer._opti_name_list)
    try:
        yield
    except BaseException:
        optimizer._accumulators = defaultdict(dict, accumulators)
        optimizer._master_weights = masters
        optimizer._already_create_accumulator = created
        optimizer._opti_name_list = names
        raise


def _state_owner(optimizer: Any, shard: ParameterShard) -> str:
    """Return the name under which the parameter's states are filed: its master weight's where there is one."""
    name: str = shard.parameter.name
    master = optimizer._master_weights.get(name)
    return name if master is None else str(master.name)


def _check_bound(optimizer: Any) -> None:
    if binding_of(optimizer) is None:
        raise ShardingError(
            f"{type(optimizer).__name__} is not bound to a sharded model; call fully_shard(model, optimizer=opt) or bind_optimizer(opt) first"
        )


def _check_shape(state: OptimizerState) -> None:
    shape = list(state.tensor.shape)
    right = [state.shard.range.numel] if state.kind is StateKind.ELEMENTWISE else shape in ([], [1]) and shape
    if shape != right:
        raise UnsupportedOptimizerError(
            f"state '{state.suffix}' of '{state.shard.slot.name}' has shape {shape}, and is {state.kind.value}; it can't be saved right"
        )
