"""The registry: for one optimizer, which live tensor holds which state of which parameter.

It reads the optimizer's own tables, ``_accumulators`` and ``_master_weights``, never the names of variables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paddle

from ..errors import MismatchError, ShardingError, UnsupportedOptimizerError, listing
from ..fsdp import ParameterShard, ShardedParameter, TensorFacts, few_at_a_time, why_without_values
from ..optimizer_states import MASTER_WEIGHT_KEY
from .binding import binding_of, optimizer_shards
from .catalog import StateKind, check_states_known, entry_of, state_name
from .parameters import SteppedParameter, WholeParameter, parameter_groups

_ONE_VALUE = [1]
"""The shape that Paddle gives most scalars."""

_GROUP_SETTINGS = ("_beta1", "_beta2", "_epsilon", "_lazy_mode", "_weight_decay", "initial_accumulator_value")
"""What Paddle sets anew on the optimizer itself for each param group that it works on."""


@dataclass(frozen=True)
class OptimizerState:
    """One state of one parameter, of which this rank keeps a piece.

    Attributes:
        shard: the parameter.
        suffix: what follows the parameter's name in the state's key: ``moment1_0``, or ``w_0`` for the master weight.
        kind: one value an element, several, or one a parameter.
        tensor: the live tensor. Elementwise: 1-D, this rank's piece; of the whole shape for a parameter of a plain model.
            Scalar: as the optimizer made it, shape [] or [1]. Stacked: as elementwise, with one dimension before it.
    """

    shard: SteppedParameter
    suffix: str
    kind: StateKind
    tensor: paddle.Tensor

    @property
    def key(self) -> str:
        """The state dict key."""
        return f"{self.shard.slot.name}.{self.suffix}"


@dataclass(frozen=True, eq=False)
class StateColumn:
    """One state of all parameters that have it and of which this rank keeps a piece; see :class:`OptimizerState`.

    Attributes:
        suffix: what follows a parameter's name in the state's key.
        kind: one value an element, several, or one a parameter.
        shards: the parameters.
        tensors: the live tensor of each.
        facts: what these are.
    """

    suffix: str
    kind: StateKind
    shards: list[SteppedParameter] = field(default_factory=list)
    tensors: list[paddle.Tensor] = field(default_factory=list)
    facts: TensorFacts = field(default_factory=TensorFacts)

    def add(self, few: Sequence[SteppedParameter], tensors: Sequence[paddle.Tensor | None], of_pieces: Sequence[list[int]]) -> None:
        """Add those of a few parameters that have a tensor, and it; ``of_pieces`` is what :func:`_shapes_of_pieces` says of them all."""
        there = [tensor for tensor in tensors if tensor is not None]
        self.shards.extend([shard for shard, tensor in zip(few, tensors, strict=True) if tensor is not None])
        self.tensors.extend(there)
        self.facts.add(there, [_ONE_VALUE] * len(there) if self.kind is StateKind.SCALAR else of_pieces)


def optimizer_states(optimizer: Any, parameters: Sequence[SteppedParameter] | None = None) -> list[OptimizerState]:
    """Return the states that an optimizer has of the parameters of which this rank keeps a piece.

    Args:
        optimizer: bound to a sharded model, or that of a plain model.
        parameters: all that it holds; by default those of a bound optimizer.

    Raises:
        ShardingError: the optimizer is not bound.
        UnsupportedOptimizerError: it has a state that its class's table entry doesn't name, or one of an unexpected shape, or whose values
            don't lie in memory as they must.
    """
    if parameters is None:
        check_bound(optimizer)
        parameters = optimizer_shards(optimizer)
    return [
        OptimizerState(shard, column.suffix, column.kind, tensor)
        for column in state_columns(optimizer, parameters)
        for shard, tensor in zip(column.shards, column.tensors, strict=True)
    ]


def state_columns(optimizer: Any, parameters: Sequence[SteppedParameter]) -> list[StateColumn]:
    """Return what :func:`optimizer_states` does, those with the same suffix together: accumulators first, as Paddle files them.

    Raises:
        UnsupportedOptimizerError: see there.
    """
    kinds = entry_of(optimizer).states
    check_states_known(optimizer)
    shards = [shard for shard in parameters if shard.range.numel]
    masters = optimizer._master_weights
    known = [(state_name(optimizer, accumulator), tensors) for accumulator, tensors in optimizer._accumulators.items()]
    tables = [(StateColumn(f"{state}_0", kinds[state]), tensors) for state, tensors in known if state in kinds]
    of_masters = StateColumn(MASTER_WEIGHT_KEY, StateKind.ELEMENTWISE)
    of_pieces: list[list[int]] = []
    for few in few_at_a_time(shards):
        of_few = _shapes_of_pieces(few)
        of_pieces += of_few
        names = [shard.parameter.name for shard in few]
        its_masters = list(map(masters.get, names))
        owners = list(map(_state_owner, names, its_masters))
        for column, tensors in tables:
            column.add(few, list(map(tensors.get, owners)), of_few)
        of_masters.add(few, its_masters, of_few)
    columns = [column for column in (*(column for column, _ in tables), of_masters) if column.tensors]
    for column in columns:
        if not column.facts.are_plain:
            for shard, tensor in zip(column.shards, column.tensors, strict=True):
                check_state_values(column.suffix, shard.slot.name, tensor, in_parts=not isinstance(shard, WholeParameter))
        _check_shapes(column, of_pieces if len(column.shards) == len(shards) else _shapes_of_pieces(column.shards))
    return columns


def init_optimizer_state(optimizer: Any) -> None:
    """Create the states of a bound optimizer, as its first step would, without a step: no value moves, no counter advances.

    Parameters that have states keep them; frozen ones get none.

    Raises:
        ShardingError: the optimizer is not bound.
    """
    check_bound(optimizer)
    create_states(optimizer, [shard for shard in optimizer_shards(optimizer) if not shard.parameter.stop_gradient])


def replace_states(optimizer: Any, parameters: Sequence[SteppedParameter], wanted: Collection[str]) -> None:
    """Let an optimizer have states of just the wanted ones of its parameters, which are named alike on all ranks.

    Raises:
        MismatchError: it would go on with states that it is to have no more. Nothing was changed.
    """
    unwanted = [one for one in parameters if one.slot.name not in wanted]
    _check_may_drop(optimizer, unwanted)
    drop_states(optimizer, unwanted)
    # What set_state_dict left aside is replaced too; Paddle would look there for each state that it creates, and fail where it isn't.
    optimizer._accumulators_holder = {}
    binding = binding_of(optimizer)
    if binding is not None:
        binding.has_states = False
    create_states(optimizer, [one for one in parameters if one.slot.name in wanted])


def create_states(optimizer: Any, wanted: Sequence[SteppedParameter]) -> None:
    """Create the states of those parameters, the same on all ranks, that have none and of which this rank keeps a piece."""
    binding = binding_of(optimizer)
    if binding is not None and wanted:
        binding.has_states = True
    block = paddle.static.default_main_program().global_block()
    # Paddle passes these over too, one by one.
    created = optimizer._already_create_accumulator
    ids = {id(one.parameter) for one in wanted if one.range.numel and one.parameter.name not in created}
    for group in parameter_groups(optimizer):
        chosen = [parameter for parameter in group["params"] if id(parameter) in ids]
        if not chosen:
            continue
        with paddle.no_grad(), _showing_local([parameter._shard for parameter in chosen if isinstance(parameter, ShardedParameter)]):
            grouped = optimizer._param_groups and isinstance(optimizer._param_groups[0], dict)
            optimizer._create_accumulators(block, {**group, "params": chosen} if grouped else chosen)


def _check_may_drop(optimizer: Any, unwanted: Sequence[SteppedParameter]) -> None:
    """Raise where an optimizer has states of these in lists of its own too, which it has from its first step on."""
    if not (getattr(optimizer, "_use_multi_tensor", False) and any(map(any, optimizer._param_dict.values()))):
        return
    listed = {id(parameter) for groups in optimizer._param_dict.values() for group in groups for parameter in group}
    names = [one.slot.name for one in unwanted if id(one.parameter) in listed]
    if names:
        raise MismatchError(
            f"the states of {len(names)} parameters are to start afresh, and {type(optimizer).__name__} with use_multi_tensor=True has "
            f"stepped and would go on with those that it has: {listing(names)}; load into a new one, or leave use_multi_tensor out"
        )


def drop_states(optimizer: Any, unwanted: Iterable[SteppedParameter]) -> None:
    """Forget all states of these parameters; the next step starts them afresh."""
    for shard in unwanted:
        name = shard.parameter.name
        owner = _state_owner(name, optimizer._master_weights.get(name))
        for tensors in optimizer._accumulators.values():
            tensors.pop(owner, None)
        optimizer._master_weights.pop(name, None)
        optimizer._already_create_accumulator.discard(name)


def keeps_states(optimizer: Any) -> bool:
    """Tell whether this rank keeps states of any parameter in an optimizer."""
    return any(optimizer._accumulators.values()) or bool(optimizer._master_weights)


def note_states(optimizer: Any, there: bool) -> None:
    """Let a bound optimizer know whether some rank keeps states in it."""
    binding = binding_of(optimizer)
    if binding is not None:
        binding.has_states = there


@contextmanager
def states_restored_on_error(optimizer: Any) -> Iterator[None]:
    """Give the optimizer back the states that it had, where the block raises."""
    accumulators = {name: dict(tensors) for name, tensors in optimizer._accumulators.items()}
    masters = dict(optimizer._master_weights)
    created = set(optimizer._already_create_accumulator)
    aside = optimizer._accumulators_holder
    names = list(optimizer._opti_name_list)
    settings = {name: optimizer.__dict__[name] for name in _GROUP_SETTINGS if name in optimizer.__dict__}
    binding = binding_of(optimizer)
    has_states = binding is not None and binding.has_states
    try:
        yield
    except BaseException:
        if binding is not None:
            binding.has_states = has_states
        optimizer._accumulators = defaultdict(dict, accumulators)
        optimizer._master_weights = masters
        optimizer._already_create_accumulator = created
        optimizer._accumulators_holder = aside
        optimizer._opti_name_list = names
        optimizer.__dict__.update(settings)
        raise


@contextmanager
def _showing_local(shards: Sequence[ParameterShard]) -> Iterator[None]:
    """Let parameters be this rank's pieces inside the block, which must not write to them.

    Ranks may do this for different parameters: nothing that was gathered is let go of, and no gradient reduced.
    """
    for unit in {shard.unit.index: shard.unit for shard in shards}.values():
        unit.park()
    # The user may have them shown already, in a block of local_parameters.
    hidden = [shard for shard in shards if not shard.parameter._is_initialized()]
    for shard in hidden:
        shard.show_local()
    try:
        yield
    finally:
        for shard in hidden:
            shard.hide_local()


def _state_owner(name: str, master: paddle.Tensor | None) -> str:
    """Return the name under which the states of a parameter of this name are filed: its master weight's where there is one."""
    return name if master is None else str(master.name)


def check_bound(optimizer: Any) -> None:
    """Raise where an optimizer is not bound.

    Raises:
        ShardingError: it says how to bind it.
    """
    if binding_of(optimizer) is None:
        raise ShardingError(
            f"{type(optimizer).__name__} is not bound to a sharded model; call fully_shard(model, optimizer=opt) or "
            "bind_optimizer(opt) first"
        )


def _shapes_of_pieces(shards: Sequence[SteppedParameter]) -> list[list[int]]:
    """Return the shape that something elementwise has of each parameter."""
    return [list(shard.slot.shape) if isinstance(shard, WholeParameter) else [shard.range.numel] for shard in shards]


def check_state_values(suffix: str, name: str, tensor: paddle.Tensor, *, in_parts: bool) -> None:
    """Raise where a state of what is called ``name`` has no values, or they don't lie as parts of them are taken where that is done.

    Raises:
        UnsupportedOptimizerError: it names the state.
    """
    why = why_without_values(tensor)
    if why is None and in_parts and not tensor.is_contiguous():
        why = "its values don't lie one behind the other; put a contiguous copy in its place (contiguous())"
    if why is not None:
        raise UnsupportedOptimizerError(f"state '{suffix}' of '{name}' can't be saved or loaded: {why}")


def _check_shapes(column: StateColumn, expected: Sequence[list[int]]) -> None:
    """Raise where a state is not of the shape that its kind has; ``expected`` is that of elementwise ones."""
    suffix, kind, shapes = column.suffix, column.kind, column.facts.shapes
    if shapes == expected if kind is StateKind.ELEMENTWISE else shapes.count(_ONE_VALUE) == len(shapes) and kind is StateKind.SCALAR:
        return
    for shard, shape, one in zip(column.shards, shapes, expected, strict=True):
        if kind is StateKind.SCALAR:
            fits = shape == [1] or shape == []
        else:
            layers = shape[:1] if kind is StateKind.STACKED else []
            fits = shape == [*layers, *one]
        if not fits:
            raise UnsupportedOptimizerError(
                f"state '{suffix}' of '{shard.slot.name}' has shape {list(shape)}, and is {kind.value}; it can't be saved right"
            )
