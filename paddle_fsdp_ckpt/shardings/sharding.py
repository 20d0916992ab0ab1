"""What differs between the ways in which a model and its optimizers are kept, for state dicts, ``save`` and ``load``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import ShardingError
from ..fsdp import Communicator, KnownSums, ParameterShard, named_buffers, replicated
from ..layout import FlatBuffer, Range
from ..optim import OptimizerState, StateKind, SteppedParameter, optimizer_states, replace_states
from .live_places import LivePlaces


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

    tells_places = False
    """Whether :meth:`live_places` may tell where values are."""

    masters_follow_singly = True
    """Whether the master weights of some parameters can follow these, and others stay."""

    @property
    def gradients_pending(self) -> bool:
        """Whether there are gradients that a later step will use; false where nobody knows."""
        return False

    def dropped_gradients(self) -> list[str]:
        """Return the first names of the parameters whose gradient this rank dropped, as it keeps a piece, and others may not know it."""
        return []

    def lost_weights(self) -> ShardingError | None:
        """Return the error that says how weights were lost on this rank, so that they can't be stored; None where none were."""
        return None

    @property
    def written(self) -> int:
        """What stands for the whole values that parameters were given since the last step; the same on every rank."""
        return 0

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

    def bound_optimizers(self) -> list[Any]:
        """Return the optimizers that are known to step what is cut, given or not; none where nobody knows."""
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

    def live_places(
        self, buffers: Sequence[tuple[str, paddle.Tensor]], steppers: Sequence[tuple[Any, Sequence[SteppedParameter]]]
    ) -> LivePlaces | None:
        """Return where this rank keeps all that :meth:`model_weights` and :meth:`states` describe; None where it can't be said so.

        Args:
            buffers: the model's, by name.
            steppers: each optimizer, and the parameters that it holds.

        Raises:
            ShardingError: the model was written to in a way that would be lost.
            UnsupportedOptimizerError: an optimizer has a state that is not known.
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
        return stacked(state) if state.kind is StateKind.STACKED else replicated(state.key, state.tensor)

    def begin_load(self, optimizer: Any, parameters: Sequence[SteppedParameter], stored: Collection[str]) -> StateLoad:
        """Let an optimizer have states for just the parameters named in ``stored``, and return what to load them into."""
        replace_states(optimizer, parameters, stored)
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


def stacked(state: OptimizerState, wanted: Range | None = None) -> ShardedWeight:
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
