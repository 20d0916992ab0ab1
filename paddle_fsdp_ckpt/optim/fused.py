"""The registry over Paddle's fused buffers: an accumulator serves all parameters of a buffer, and each has a piece of it.

For models that Paddle's own ``paddle.distributed.fsdp.fully_shard`` cut. Paddle files an accumulator under the name of the fused buffer
that owns it, or of that one's master weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import MismatchError, UnsupportedOptimizerError, listing
from ..fsdp.paddle_contexts import check_not_cut_before
from ..fsdp.paddle_runtime import PaddleShard, paddle_runtime
from ..fsdp.sharded_weights import replicated
from ..optimizer_states import MASTER_WEIGHT_KEY
from .catalog import StateKind, check_states_known, entry_of, state_name
from .fused_checks import check_fused, check_gradients, fused_entry_of
from .fused_others import check_others, is_repaired
from .fused_repair import warn_of_harms
from .fused_tensors import FusedTensor, fused_tensors, held_names, owner_of
from .registry import OptimizerState, check_state_values

_ELEMENTWISE = StateKind.ELEMENTWISE


def check_process(optimizers: Sequence[Any]) -> None:
    """Check the process in which these optimizers step a model that Paddle's own ``fully_shard`` cut, and warn of its harms.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same, or something else in the process makes the training wrong.
    """
    runtimes = [check_fused(one) for one in optimizers]
    check_others(runtimes[0], optimizers)
    warn_of_harms(runtimes[0])


def optimizer_sharded_state_dict(optimizer: Any) -> dict[str, ShardedWeight]:
    """Return this rank's part of the states of an optimizer that steps fused buffers; states that don't exist yet are made first.

    The same keys and descriptions as our own runtime gives, see :func:`paddle_fsdp_ckpt.optimizer_sharded_state_dict`.

    Raises:
        ShardingError: its parameters are not those of the model that Paddle's own ``fully_shard`` cut, or their last gradients were lost.
        UnsupportedOptimizerError: it can't step fused buffers right, or has a state that is not known.
    """
    init_optimizer_state(optimizer)
    return {state.key: weight_of(state) for state in fused_states(optimizer)}


def init_optimizer_state(optimizer: Any) -> None:
    """Create the states of an optimizer for all trainable fused buffers, as its first step would; those that are there stay.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
    """
    runtime = check_fused(optimizer)
    block = paddle.static.default_main_program().global_block()
    with paddle.no_grad():
        optimizer._create_accumulators(block, [one.live for one in fused_tensors(optimizer, runtime)])


def fused_states(optimizer: Any) -> list[OptimizerState]:
    """Return the states that there are, of the parameters of which this rank keeps a piece.

    An elementwise state's tensor is a 1-D view of the fused accumulator; a scalar's is the one that all parameters of a buffer share.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
    """
    runtime = check_fused(optimizer)
    if not is_repaired(runtime):  # else they are complete at the next step
        check_gradients(runtime)
    return [state for state, _ in _states_and_owners(optimizer)]


def _states_and_owners(optimizer: Any) -> Iterator[tuple[OptimizerState, paddle.Tensor]]:
    """Yield each state with the live tensor that holds it, and those of the other parameters of its buffer."""
    runtime = check_fused(optimizer)
    kinds = fused_entry_of(optimizer).states
    fused = fused_tensors(optimizer, runtime)
    owned = {owner_of(optimizer, one): one for one in fused}
    shards: dict[str, list[PaddleShard]] = defaultdict(list)
    for shard in runtime.shards:
        shards[shard.buffer.layout.name].append(shard)
    check_states_known(optimizer)
    for accumulator, tensors in optimizer._accumulators.items():
        state = state_name(optimizer, accumulator)
        for owner, tensor in tensors.items():
            yield from _pieces(shards[owned[owner].buffer.layout.name], owned[owner], f"{state}_0", kinds[state], tensor)
    for one in fused:
        master = optimizer._master_weights.get(one.live.name)
        if master is not None:
            yield from _pieces(shards[one.buffer.layout.name], one, MASTER_WEIGHT_KEY, _ELEMENTWISE, master)


def weight_of(state: OptimizerState) -> ShardedWeight:
    """Describe a state of :func:`fused_states` for ``paddle.distributed.save_state_dict`` and ``load_state_dict``."""
    assert isinstance(state.shard, PaddleShard)
    if state.kind is StateKind.SCALAR:
        return replicated(state.key, state.tensor)
    return state.shard.weight(state.key, state.tensor)


def states_written(optimizer: Any) -> None:
    """Complete what was loaded into the views of an optimizer's states: padding, which no key has, follows the loaded values.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
        MismatchError: parameters of one buffer were loaded with different values of what the buffer has once. The optimizer has the
            loaded states then, and can't go on from them.
    """
    repeated = _repeated(optimizer)
    fused: dict[int, list[tuple[str, paddle.Tensor]]] = defaultdict(list)
    owners: dict[int, paddle.Tensor] = {}
    for state, owner in _states_and_owners(optimizer):
        if state.suffix in repeated:
            fused[id(owner)].append((state.key, state.tensor))
            owners[id(owner)] = owner
    for pieces in fused.values():
        _check_one_value([(key, piece._slice(0, 1), piece) for key, piece in pieces], _PARTLY_LOADED)
    with paddle.no_grad():
        for one, pieces in fused.items():
            owners[one].fill_(pieces[0][1]._slice(0, 1).item())


@dataclass(frozen=True, eq=False)
class FusedLoad:
    """What to load an optimizer's states into: views for what is elementwise, and for scalars a copy of each parameter's own.

    A buffer has one tensor for a scalar of all its parameters, and what is loaded may hold different values for them.

    Attributes:
        optimizer: the optimizer.
        weights: where each key's values go.
        copies: the scalars again, and one element of what is repeated, to be read first for :meth:`check`.
    """

    optimizer: Any
    weights: dict[str, ShardedWeight]
    copies: dict[str, ShardedWeight]
    _scalars: Sequence[tuple[OptimizerState, paddle.Tensor]]
    _owners: dict[str, int]

    def check(self) -> None:
        """Judge what was read into the copies.

        Raises:
            MismatchError: parameters of one buffer have different values of what the buffer has once. Nothing was changed.
        """
        read: dict[int, list[tuple[str, paddle.Tensor, paddle.Tensor]]] = defaultdict(list)
        for key, weight in self.copies.items():
            read[self._owners[key]].append((key, weight.local_tensor, weight.local_tensor))
        for values in read.values():
            _check_one_value(values, "Nothing was changed")

    def finish(self) -> None:
        """Put the loaded scalars into the optimizer, and complete the rest by :func:`states_written`.

        Raises:
            MismatchError: as :func:`states_written`.
        """
        loaded: dict[int, list[tuple[OptimizerState, paddle.Tensor]]] = defaultdict(list)
        for state, copy in self._scalars:
            loaded[id(state.tensor)].append((state, copy))
        for pairs in loaded.values():
            _check_one_value([(state.key, copy, copy) for state, copy in pairs], _PARTLY_LOADED)
        with paddle.no_grad():
            for pairs in loaded.values():
                state, copy = pairs[0]
                paddle.assign(copy, state.tensor)
        states_written(self.optimizer)


_PARTLY_LOADED = "The optimizer holds a part of the checkpoint now"


def _check_one_value(loaded: Sequence[tuple[str, paddle.Tensor, paddle.Tensor]], consequence: str) -> None:
    """Raise unless all values of all last members are the first middle one, bit for bit."""
    key, first, _ = loaded[0]
    differing = [f"{other} and {key}" for other, _, values in loaded if bool((values != first).any().item())]
    if differing:
        raise MismatchError(
            "a fused buffer of Paddle's has one value for all its parameters, and the checkpoint has different ones: "
            f"{listing(differing)}; the parameters did not step equally often. {consequence}: load another one, or shard the model with "
            "paddle_fsdp_ckpt.fully_shard and load this one"
        )


def begin_load(optimizer: Any, stored: Collection[str] | None = None) -> FusedLoad:
    """Create the states that there are not yet, and return what to load them into; call ``finish()`` after that.

    Args:
        optimizer: the optimizer.
        stored: the names of the parameters for which there are states to load; fused updates of others have none afterwards.
            By default all.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
        MismatchError: there are states for some parameters of a fused update, and not for others.
    """
    init_optimizer_state(optimizer)
    if stored is not None:
        _drop_absent(optimizer, stored)
    repeated = _repeated(optimizer)
    weights: dict[str, ShardedWeight] = {}
    copies: dict[str, ShardedWeight] = {}
    scalars: list[tuple[OptimizerState, paddle.Tensor]] = []
    owners: dict[str, int] = {}
    for state, owner in _states_and_owners(optimizer):
        key = state.key
        if state.kind is StateKind.SCALAR:
            copy = state.tensor.clone()
            scalars.append((state, copy))
            weights[key] = copies[key] = replicated(key, copy)
            owners[key] = id(owner)
            continue
        weights[key] = weight_of(state)
        if state.suffix in repeated:
            shape, first = state.shard.slot.shape, state.shard.range.start
            one = state.tensor._slice(0, 1).clone()
            copies[key] = ShardedWeight(key, one, shape, shape, (0,) * len(shape), True, slice(first, first + 1))
            owners[key] = id(owner)
    return FusedLoad(optimizer, weights, copies, scalars, owners)


def _repeated(optimizer: Any) -> list[str]:
    """Return the suffixes of numbers of which Paddle keeps a copy an element, unfused too, so that their keys are elementwise.

    A fused buffer has one value in all its copies, and RAdam reads the first, which may be padding.
    """
    return [f"{state}_0" for state in entry_of(optimizer).repeated]


def _drop_absent(optimizer: Any, stored: Collection[str]) -> None:
    """Let fused updates have no states, none of whose parameters is in ``stored``."""
    runtime = check_fused(optimizer)
    for one in fused_tensors(optimizer, runtime):
        names = one.slot_names(runtime.rank)
        absent = [name for name in names if name not in stored]
        if len(absent) < len(names) and absent:
            raise MismatchError(
                f"there are states to load for some parameters of Paddle's fused buffer '{one.buffer.layout.name}' and none for "
                f"{listing(absent)}, which had no gradient yet, or are to start afresh; the buffer steps all of them alike. Nothing was "
                "changed: shard the model with paddle_fsdp_ckpt.fully_shard, or load the model only, with optimizer=None"
            )
        if absent or not names:  # padding alone starts afresh
            owner = owner_of(optimizer, one)
            for tensors in optimizer._accumulators.values():
                tensors.pop(owner, None)
            optimizer._master_weights.pop(one.live.name, None)
            optimizer._already_create_accumulator.discard(one.live.name)


def held_shards(optimizer: Any) -> list[PaddleShard]:
    """Return the parameters in fused buffers that an optimizer holds, in its order.

    Raises:
        ShardingError: as :func:`check_fused`.
        UnsupportedOptimizerError: the same.
    """
    shards = {shard.parameter.name: shard for shard in check_fused(optimizer).shards}
    return [shards[cut] for cut in held_names(optimizer, shards).values()]


def steps_fused_buffers(optimizer: Any) -> bool:
    """Tell whether an optimizer holds parameters of the model that Paddle's own ``fully_shard`` cut in this process.

    Raises:
        ShardingError: that model is cut in a way that can't be read, or the optimizer's was cut before it.
    """
    runtime = paddle_runtime()
    groups = optimizer._param_groups or []
    held = [one for group in groups for one in (group["params"] if isinstance(group, dict) else [group])]
    cut = set() if runtime is None else {shard.parameter.name for shard in runtime.shards}
    if any(one.name in cut or f"{one.name}.dist" in cut for one in held):
        return True
    check_not_cut_before(f"the parameters of this {type(optimizer).__name__}", held)
    return False


def _pieces(
    shards: Sequence[PaddleShard], fused: FusedTensor, suffix: str, kind: StateKind, tensor: paddle.Tensor
) -> Iterator[tuple[OptimizerState, paddle.Tensor]]:
    shape = list(tensor.shape)
    if shape not in ([[], [1]] if kind is StateKind.SCALAR else [[fused.within.numel]]):
        raise UnsupportedOptimizerError(
            f"state '{suffix}' of '{fused.live.name}' has shape {shape}, and is {kind.value}; it can't be saved right"
        )
    check_state_values(suffix, str(fused.live.name), tensor, in_parts=True)
    for shard in shards:
        place = shard.in_shard.intersect(fused.within)
        if place.numel:
            place = place.shift(-fused.within.start)
            piece = tensor if kind is StateKind.SCALAR else tensor._slice(place.start, place.stop)
            yield OptimizerState(shard, suffix, kind, piece), tensor
