"""How a model and its optimizers are kept: plain on every rank, cut by our runtime, or by Paddle's own.

What differs between these for state dicts, ``save`` and ``load`` is here, and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .division import written_range
from .errors import ShardingError, listing
from .fsdp import (
    Communicator,
    KnownSums,
    PaddleRuntime,
    ParameterShard,
    Runtime,
    default_ranks,
    elementwise,
    named_buffers,
    named_parameters,
    paddle_group,
    paddle_runtime,
    paddle_runtime_of,
    replicated,
    runtime_of,
)
from .layout import FlatBuffer, Range
from .optim import (
    OptimizerState,
    StateKind,
    SteppedParameter,
    binding_of,
    check_bound,
    create_states,
    drop_states,
    entry_of,
    fused,
    init_optimizer_state,
    let_masters_follow,
    optimizer_shards,
    optimizer_states,
    parameter_groups,
    whole_parameters,
)


class StateLoad(Protocol):
    """What to load an optimizer's states into, and what to do about it before and after."""

    @property
    def weights(self) -> Mapping[str, ShardedWeight]:
        """Where each key's values go."""
        ...

    @property
    def copies(self) -> Mapping[str, ShardedWeight]:
        """A few values that must be read before anything changes, into copies, for :meth:`check`."""
        ...

    def check(self) -> None:
        """Judge the copies.

        Raises:
            MismatchError: the optimizer can't have these values.
        """
        ...

    def finish(self) -> None:
        """Complete what was loaded.

        Raises:
            MismatchError: the optimizer can't have these values, and holds a part of them.
        """
        ...


@dataclass(frozen=True, eq=False)
class FlatShard:
    """This rank's shard of one flat buffer.

    Attributes:
        layout: the whole buffer.
        tensor: the live shard, 1-D.
        trainable: whether optimizers step a slot's parameter, one a slot.
        counting: what counts how often this rank's piece of a slot was, or may have been, written to, one a slot; None where nothing does.
    """

    layout: FlatBuffer
    tensor: paddle.Tensor
    trainable: tuple[bool, ...]
    counting: tuple[ParameterShard, ...] | None = None

    @property
    def changes(self) -> tuple[int, ...] | None:
        """How often it was by now."""
        return None if self.counting is None else tuple(one.changes for one in self.counting)


@dataclass(frozen=True, eq=False)
class LiveTables:
    """All that decides what a rank stores of a model and its optimizers.

    Attributes:
        names: what stands in the tables of model and optimizers, in their order; two such lists can be compared.
        tensors: the live tensors of which this rank stores some, or parts, in an order that the names decide.
    """

    names: list[object]
    tensors: list[paddle.Tensor]


class Sharding(ABC):
    """How a model, and the optimizers that step it, are kept by the ranks."""

    is_plain = False
    """Whether every rank has all of everything."""

    masters_follow_singly = True
    """Whether the master weights of some parameters can follow these, and others stay."""

    @property
    def gradients_pending(self) -> bool:
        """Whether a backward went before whose gradients no step has used; false where nobody knows."""
        return False

    @abstractmethod
    def model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return this rank's part of a model's parameters and persistable buffers, as views."""

    def whole_keys(self, model: nn.Layer) -> set[str]:
        """Return the keys of what every rank has all of: the buffers, and where nothing is cut the parameters."""
        return {name for name, _ in named_buffers(model)}

    @abstractmethod
    def held_by(self, optimizers: Sequence[Any], model: nn.Layer | None) -> list[Sequence[SteppedParameter]]:
        """Return the parameters of each optimizer, in the order of its param groups.

        Raises:
            ShardingError: an optimizer of something else.
            UnsupportedOptimizerError: one whose states are not known.
        """

    @abstractmethod
    def has_gradient(self, parameter: SteppedParameter) -> bool:
        """Tell whether a step now would count the parameter as one with a gradient."""

    @abstractmethod
    def reset_gradient(self, parameter: SteppedParameter, present: bool) -> None:
        """Let there be a gradient of zeros, or none, whatever there was; Paddle's runtime always has one."""

    @abstractmethod
    def values_written(
        self, model: nn.Layer | None, optimizers: Sequence[Any], stepped: Sequence[SteppedParameter], kept: Collection[str] = ()
    ) -> None:
        """Let go of all that is out of date, and let master weights follow, after values were loaded. All ranks must call it.

        Args:
            model: whose parameters were loaded, or None.
            optimizers: whose states were loaded.
            stepped: their parameters.
            kept: names of parameters of the model that were not loaded; their master weights stay.
        """

    @property
    def communicator(self) -> Communicator:
        """The ranks over which it is cut; this one alone where it is not."""
        return Communicator(None)

    def flat_shards(self) -> list[FlatShard]:
        """Return this rank's shard of each flat buffer, in the same order on every rank; none where nothing is cut."""
        return []

    @property
    def known_sums(self) -> KnownSums | None:
        """What is remembered of checksums of the parameters; None where nobody counts their changes."""
        return None

    @property
    def kept(self) -> dict[type, Any] | None:
        """What is kept with the model, see :class:`~.fsdp.Runtime`; None where there is no place for it."""
        return None

    def live_tables(self, optimizers: Sequence[Any], buffers: Sequence[tuple[str, paddle.Tensor]]) -> LiveTables | None:
        """Return what decides what this rank stores; None where that isn't known as a whole.

        Args:
            optimizers: of the model.
            buffers: the model's, by name.

        Raises:
            ShardingError: the model was written to in a way that would be lost.
        """
        return None

    def written_model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return what this rank writes of :meth:`model_weights`, but for what all ranks have whole; elsewhere nobody keeps the same."""
        return self.model_weights(model)

    def written_state(self, state: OptimizerState) -> ShardedWeight | None:
        """Return what this rank writes of one of :meth:`states`: a scalar where it keeps the parameter's first element."""
        return self.weight_of(state) if state.kind is not StateKind.SCALAR or state.shard.range.start == 0 else None

    @abstractmethod
    def warn_of_cuts(self) -> None:
        """Warn where stock Paddle would load what is cut here wrongly."""

    def states(self, optimizer: Any, parameters: Sequence[SteppedParameter]) -> list[OptimizerState]:
        """Return the states that there are, of the parameters of which this rank keeps a piece."""
        return optimizer_states(optimizer, parameters)

    def weight_of(self, state: OptimizerState) -> ShardedWeight:
        """Describe one of :meth:`states`."""
        return _stacked(state) if state.kind is StateKind.STACKED else replicated(state.key, state.tensor)

    def begin_load(self, optimizer: Any, parameters: Sequence[SteppedParameter], stored: Collection[str]) -> StateLoad:
        """Let an optimizer have states for just the parameters named in ``stored``, and return what to load them into."""
        drop_states(optimizer, [one for one in parameters if one.slot.name not in stored])
        create_states(optimizer, [one for one in parameters if one.slot.name in stored])
        return _LoadIntoViews({state.key: self.weight_of(state) for state in self.states(optimizer, parameters)})


@dataclass(frozen=True)
class _LoadIntoViews:
    """States that are loaded where they live, with nothing to do besides."""

    weights: dict[str, ShardedWeight]
    copies: dict[str, ShardedWeight] = field(default_factory=dict)

    def check(self) -> None:
        """Nothing to judge."""

    def finish(self) -> None:
        """Nothing to complete."""


class Plain(Sharding):
    """A model that nobody cut, the same on every rank."""

    is_plain = True

    def warn_of_cuts(self) -> None:
        """Nothing is cut."""

    def model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return everything, whole."""
        weights = {name: replicated(name, named.parameter) for named in named_parameters(model) for name in named.names}
        weights.update({name: replicated(name, buffer) for name, buffer in named_buffers(model)})
        return weights

    def whole_keys(self, model: nn.Layer) -> set[str]:
        """Return all."""
        return super().whole_keys(model) | {name for named in named_parameters(model) for name in named.names}

    def held_by(self, optimizers: Sequence[Any], model: nn.Layer | None) -> list[Sequence[SteppedParameter]]:
        """Return whole parameters of the model."""
        assert model is not None
        for one in optimizers:
            entry_of(one)
        return [_whole_parameters(one, model) for one in optimizers]

    def has_gradient(self, parameter: SteppedParameter) -> bool:
        """Tell whether Paddle has one."""
        return parameter.parameter.grad is not None

    def reset_gradient(self, parameter: SteppedParameter, present: bool) -> None:
        """Set Paddle's own."""
        if present and not parameter.parameter.stop_gradient:
            parameter.parameter.grad = paddle.zeros_like(parameter.parameter)
        else:
            parameter.parameter.clear_gradient(False)

    def values_written(
        self, model: nn.Layer | None, optimizers: Sequence[Any], stepped: Sequence[SteppedParameter], kept: Collection[str] = ()
    ) -> None:
        """Let a backward know that the weights of its forward are gone."""
        if model is not None:
            for parameter in model.parameters():
                parameter._bump_inplace_version()


@dataclass(frozen=True)
class CutByUs(Sharding):
    """A model that :func:`paddle_fsdp_ckpt.fully_shard` cut."""

    runtime: Runtime

    @property
    def gradients_pending(self) -> bool:
        """What the runtime says."""
        return self.runtime.gradients_pending

    @property
    def communicator(self) -> Communicator:
        """The runtime's own."""
        return self.runtime.communicator

    @property
    def known_sums(self) -> KnownSums:
        """The runtime's own."""
        return self.runtime.known_sums

    def flat_shards(self) -> list[FlatShard]:
        """Return the runtime's shards."""
        self.runtime.check_unwritten()
        return [
            FlatShard(
                one.layout,
                one.shard,
                tuple(not own.parameter.stop_gradient for own in one.shards),
                tuple(one.shards),
            )
            for one in self.runtime.buffers
        ]

    @property
    def kept(self) -> dict[type, Any]:
        """What the runtime keeps."""
        return self.runtime.kept

    def live_tables(self, optimizers: Sequence[Any], buffers: Sequence[tuple[str, paddle.Tensor]]) -> LiveTables:
        """Return the shards' pieces, which are where they are for good, buffers, and the optimizers' own tables."""
        self.runtime.check_unwritten()
        names: list[object] = [name for name, _ in buffers]
        tensors = [shard.local for shard in self.runtime.shards if shard.range.numel]
        tensors += [buffer for _, buffer in buffers]
        for one in optimizers:
            names.append((type(one), one._name))
            for name, table in (*one._accumulators.items(), ("master weights", one._master_weights)):
                names.append((name, list(table)))
                tensors += table.values()
        return LiveTables(names, tensors)

    def warn_of_cuts(self) -> None:
        """We cut where it loads right."""

    def model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return views of the shards, and whole buffers."""
        weights: dict[str, ShardedWeight] = {}
        self.runtime.check_unwritten()
        for shard in self.runtime.shards:
            if shard.range.numel:
                weights.update({name: shard.weight(name, shard.local) for name in shard.slot.names})
        weights.update({name: replicated(name, buffer) for name, buffer in named_buffers(model)})
        return weights

    def held_by(self, optimizers: Sequence[Any], model: nn.Layer | None) -> list[Sequence[SteppedParameter]]:
        """Return the shards of bound optimizers."""
        for one in optimizers:
            entry_of(one)
        for one in optimizers:
            check_bound(one)
        held = [optimizer_shards(one) for one in optimizers]
        foreign = [shard.slot.name for shards in held for shard in shards if shard.unit.runtime is not self.runtime]
        if foreign:
            whose = "of several sharded models, whose names may be the same" if model is None else "of another model than the one given"
            raise ShardingError(
                f"{len(foreign)} parameters of the optimizers are {whose}: {listing(foreign)}; to save and "
                'load, give all models that they step, as model={"actor": actor, "critic": critic}; for the rest, give each model its own '
                "optimizer"
            )
        return list(held)

    def weight_of(self, state: OptimizerState) -> ShardedWeight:
        """Describe this rank's piece, or a scalar."""
        if state.kind is StateKind.SCALAR:
            return replicated(state.key, state.tensor)
        if state.kind is StateKind.STACKED:
            return _stacked(state)
        assert isinstance(state.shard, ParameterShard)
        return state.shard.weight(state.key, state.tensor)

    def written_model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return this replica's part of this rank's pieces, and whole buffers."""
        weights = self.model_weights(model)
        for shard in self.runtime.shards if self.communicator.replica_count > 1 else ():
            wanted = self._written_range(shard)
            for name in shard.slot.names if shard.range.numel else ():
                if wanted.numel:
                    weights[name] = self._part(name, shard, shard.local, wanted)
                else:
                    del weights[name]
        return weights

    def written_state(self, state: OptimizerState) -> ShardedWeight | None:
        """Return this replica's part: of layers where there are several, as a piece's columns do not lie together."""
        assert isinstance(state.shard, ParameterShard)
        replica, count = self.communicator.replica, self.communicator.replica_count
        if count == 1:
            return super().written_state(state)
        if state.kind is StateKind.STACKED:
            layers = state.tensor.shape[0]
            wanted = Range(layers * replica // count, layers * (replica + 1) // count)
            return _stacked(state, wanted) if wanted.numel else None
        wanted = self._written_range(state.shard)
        if not wanted.numel or (state.kind is StateKind.SCALAR and wanted.start):
            return None
        return self.weight_of(state) if state.kind is StateKind.SCALAR else self._part(state.key, state.shard, state.tensor, wanted)

    def _written_range(self, shard: ParameterShard) -> Range:
        own = self.communicator
        return written_range(shard.buffer.layout, shard.slot, own.rank, own.replica, own.replica_count)

    def _part(self, key: str, shard: ParameterShard, piece: paddle.Tensor, wanted: Range) -> ShardedWeight:
        """Describe a part of what this rank keeps of something elementwise."""
        values = piece._slice(wanted.start - shard.range.start, wanted.stop - shard.range.start)
        return elementwise(key, values, shard.slot, wanted, self.communicator.overall_world_size)

    def has_gradient(self, parameter: SteppedParameter) -> bool:
        """Tell whether some rank has one."""
        assert isinstance(parameter, ParameterShard)
        return parameter.has_gradient or parameter.got_gradient

    def reset_gradient(self, parameter: SteppedParameter, present: bool) -> None:
        """Set it on every rank."""
        assert isinstance(parameter, ParameterShard)
        parameter.reset_gradient(present)

    def values_written(
        self, model: nn.Layer | None, optimizers: Sequence[Any], stepped: Sequence[SteppedParameter], kept: Collection[str] = ()
    ) -> None:
        """Release whole units, and tell the optimizers that were not loaded."""
        if model is None:
            return
        loaded, kept_names = {id(one) for one in stepped}, set(kept)
        for unit in self.runtime.units:
            unit.changed([shard for shard in unit.shards if not kept_names.intersection(shard.slot.names)])
        self.runtime.parameters_written(
            [shard for shard in self.runtime.shards if id(shard) not in loaded and not kept_names.intersection(shard.slot.names)]
        )


@dataclass(frozen=True)
class CutByPaddle(Sharding):
    """A model that Paddle's own ``paddle.distributed.fsdp.fully_shard`` cut."""

    runtime: PaddleRuntime
    masters_follow_singly = False

    @property
    def communicator(self) -> Communicator:
        """Over the group that Paddle cut it over."""
        return Communicator(self.runtime.group)

    def flat_shards(self) -> list[FlatShard]:
        """Return the shards of Paddle's fused buffers."""
        return [FlatShard(one.layout, one.live, (one.trainable,) * len(one.parameters)) for one in self.runtime.buffers]

    def model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return views of the fused buffers' shards, and whole buffers."""
        return self.runtime.model_weights()

    def warn_of_cuts(self) -> None:
        """Paddle cuts anywhere."""
        self.runtime.warn_of_cuts(stacklevel=4)

    def held_by(self, optimizers: Sequence[Any], model: nn.Layer | None) -> list[Sequence[SteppedParameter]]:
        """Return the parameters in fused buffers, where nothing else of the process makes their training wrong."""
        if optimizers:
            fused.check_process(optimizers)
        return [fused.held_shards(one) for one in optimizers]

    def states(self, optimizer: Any, parameters: Sequence[SteppedParameter]) -> list[OptimizerState]:
        """Return views of the fused accumulators."""
        return list(fused.fused_states(optimizer))

    def weight_of(self, state: OptimizerState) -> ShardedWeight:
        """Describe a view of a fused accumulator, or a scalar."""
        return fused.weight_of(state)

    def begin_load(self, optimizer: Any, parameters: Sequence[SteppedParameter], stored: Collection[str]) -> StateLoad:
        """Return views of the fused accumulators, and copies of what a buffer has once."""
        return fused.begin_load(optimizer, stored)

    def has_gradient(self, parameter: SteppedParameter) -> bool:
        """Fused gradients are never absent."""
        return not parameter.parameter.stop_gradient

    def reset_gradient(self, parameter: SteppedParameter, present: bool) -> None:
        """:meth:`values_written` has set all to zero."""

    def values_written(
        self, model: nn.Layer | None, optimizers: Sequence[Any], stepped: Sequence[SteppedParameter], kept: Collection[str] = ()
    ) -> None:
        """Let go of gathered buffers and gradients, and let the master weights of other optimizers follow."""
        if model is not None:
            let_masters_follow(self.runtime, optimizers)
        self.runtime.values_written()


def sharding_of(model: nn.Layer) -> Sharding:
    """Return how a model is kept.

    Raises:
        ShardingError: Paddle's own ``fully_shard`` cut it in a way that can't be read.
    """
    runtime = runtime_of(model)
    if runtime is not None:
        return CutByUs(runtime)
    by_paddle = paddle_runtime_of(model)
    return Plain() if by_paddle is None else CutByPaddle(by_paddle)


def sharding_of_optimizers(optimizers: Sequence[Any]) -> Sharding:
    """Return how what optimizers step is kept, where no model is given.

    Raises:
        ShardingError: an optimizer steps nothing that is cut, or Paddle's own ``fully_shard`` cut it in a way that can't be read.
        UnsupportedOptimizerError: an optimizer's states are not known.
    """
    if any(is_fused(one) for one in optimizers):
        by_paddle = paddle_runtime()
        assert by_paddle is not None
        return CutByPaddle(by_paddle)
    for one in optimizers:
        entry_of(one)
    for one in optimizers:
        check_bound(one)
    return CutByUs(optimizer_shards(optimizers[0])[0].unit.runtime)


def is_fused(optimizer: Any) -> bool:
    """Tell whether an optimizer steps a model that Paddle's own ``fully_shard`` cut.

    Raises:
        ShardingError: that model is cut in a way that can't be read.
    """
    return binding_of(optimizer) is None and fused.steps_fused_buffers(optimizer)


def ranks_of(model: object, optimizers: Sequence[object]) -> tuple[int, ...]:
    """Return the job's ranks that train these, by default all; none without a process group.

    Whatever they are: what is wrong with them must be said where the ranks meet.

    Raises:
        ShardingError: the processes of the job don't know of each other, or fleet was set up with another kind of parallelism.
    """
    if isinstance(model, Mapping):
        runtimes = [runtime_of(one) for _, one in sorted(model.items(), key=lambda pair: str(pair[0])) if isinstance(one, nn.Layer)]
        return next((one.communicator.ranks for one in runtimes if one is not None), None) or default_ranks()
    if isinstance(model, nn.Layer):
        runtime = runtime_of(model)
        if runtime is not None:
            return runtime.communicator.ranks
        group = paddle_group(model)
        return default_ranks() if group is None else tuple(group.ranks)
    steppers = [one for one in optimizers if isinstance(one, paddle.optimizer.Optimizer)] if model is None else []
    bound = [one for one in steppers if binding_of(one) is not None]
    if bound:
        return optimizer_shards(bound[0])[0].unit.runtime.communicator.ranks
    group = paddle_group() if steppers else None
    return default_ranks() if group is None else tuple(group.ranks)


def init_states(optimizer: Any) -> None:
    """Create the states of an optimizer over what is cut."""
    if is_fused(optimizer):
        fused.check_process([optimizer])
        fused.init_optimizer_state(optimizer)
    else:
        init_optimizer_state(optimizer)


def states_of(optimizer: Any) -> dict[str, ShardedWeight]:
    """Return the states of an optimizer over what is cut."""
    if is_fused(optimizer):
        fused.check_process([optimizer])
        return fused.optimizer_sharded_state_dict(optimizer)
    check_bound(optimizer)
    if not any(optimizer._accumulators.values()) and not optimizer._master_weights:
        init_optimizer_state(optimizer)
    sharding = CutByUs(optimizer_shards(optimizer)[0].unit.runtime)
    return {state.key: sharding.weight_of(state) for state in optimizer_states(optimizer)}


def _stacked(state: OptimizerState, wanted: Range | None = None) -> ShardedWeight:
    """Describe several values an element as the box of this rank's columns in [layers, elements of the flattened parameter].

    Args:
        state: the values.
        wanted: which layers of them; by default all.
    """
    layers, piece = state.tensor.shape[0], state.shard.range
    wanted = wanted or Range(0, layers)
    view = state.tensor._slice(wanted.start, wanted.stop)
    view.get_tensor()._set_dims([wanted.numel, piece.numel])
    return ShardedWeight(state.key, view, (wanted.numel, piece.numel), (layers, state.shard.slot.numel), (wanted.start, piece.start))


def _whole_parameters(optimizer: Any, model: nn.Layer) -> list[SteppedParameter]:
    if binding_of(optimizer) is not None:
        raise ShardingError(f"{type(optimizer).__name__} is bound to a sharded model, and the model given is another one, not sharded")
    known = whole_parameters(model)
    buffers = {id(buffer) for _, buffer in named_buffers(model)}
    every = [parameter for group in parameter_groups(optimizer) for parameter in group["params"]]
    held = [parameter for parameter in every if id(parameter) not in buffers]
    foreign = [parameter.name for parameter in held if id(parameter) not in known]
    if foreign or not held:
        raise ShardingError(
            f"{type(optimizer).__name__}: {len(foreign)} of its {len(held)} parameters are not of the model given: "
            f"{listing(foreign)}; give the "
            "model that it steps"
        )
    return [known[id(parameter)] for parameter in held]
