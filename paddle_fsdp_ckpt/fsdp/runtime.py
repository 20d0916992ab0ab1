"""The runtime of one sharded model: which unit is whole when, and when gradients are reduced.

Every collective happens at a point that the program fixes, never the data of one rank: a layer's forward begins, a backward
reaches a layer's outputs, an optimizer steps. A journal of the order is compared between ranks at each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol
from weakref import WeakSet

import numpy as np
import paddle
from paddle import nn

from ..errors import CheckpointError, ShardingError, UnboundOptimizerError
from ..layout import Layout
from .communication import Communicator
from .given_values import GivenValues
from .gradient_use import GradientUse
from .known_sums import KnownSums
from .live_buffer import LiveBuffer
from .lost_values import LostValues
from .lost_writes import LostWrites
from .parameter_shard import ParameterShard
from .prefetching import Prefetcher
from .recomputation import running_backwards
from .running_statistics import average_statistics
from .saved_weights import SAVED_WEIGHTS
from .step_agreement import StepAgreement
from .unbound_readers import check_unbound_reader
from .unit import Unit

GradientReduction = Literal["mean", "sum"]


class WeightsObserver(Protocol):
    """Somebody who keeps copies of weights, such as an optimizer's master weights."""

    def parameters_written(self, shards: Sequence[ParameterShard], *, maybe: bool = False) -> None:
        """Take over the values that these parameters were just given; where that is only ``maybe`` so, what differs from the copies."""


class Runtime:
    """What a sharded model and its optimizers share.

    Attributes:
        communicator: the ranks that train the model.
        units: the model's units in a fixed order.
        gradients_pending: a backward ran whose gradients are not all reduced yet.
        gradient_use: what is known of gradients that a step has used.
        was_without_gradients: a step or a clip found no gradient at all, and said so.
        steps_by_hand: the user said that no optimizer will be bound.
        observers: the optimizers that are bound, as long as they live.
        known_sums: what is remembered of checksums of the parameters.
        given_values: what ``set_value`` was given since the last step.
        lost: the parameters whose values were lost on this rank.
        gradient_reduction: what is made of the ranks' gradients.
        kept: what others worked out of this model and keep as long as it is sharded, by their own class. They see to it that it is not
            out of date.
    """

    def __init__(self, communicator: Communicator, gradient_reduction: GradientReduction, prefetch: int) -> None:
        self.communicator = communicator
        self.units: list[Unit] = []
        self.gradients_pending = False
        self.gradient_use = GradientUse()
        self.was_without_gradients = False
        self.steps_by_hand = False
        self.observers: WeakSet[WeightsObserver] = WeakSet()
        self.statistics: list[paddle.Tensor] = []
        # Alone, a rank has whole weights, so that what a forward writes to them past Paddle's counting stays.
        self.known_sums = KnownSums(are_trusted=not communicator.alone)
        self.given_values = GivenValues(are_compared=communicator.overall_world_size > 1)
        self.lost = LostValues()
        self.kept: dict[type, Any] = {}
        self.gradient_reduction = gradient_reduction
        self._prefetcher = Prefetcher(prefetch)
        self._running_forwards = 0
        self._optimizers_stepping = 0
        self._agreement = StepAgreement()
        self._lost_writes = LostWrites()
        self._gradient_marks: dict[int, paddle.Tensor] = {}
        self._failure: CheckpointError | None = None
        self._showing_local: set[int] = set()

    @property
    def layout(self) -> Layout:
        """The model's layout."""
        return Layout(tuple(buffer.layout for buffer in self.buffers), self.communicator.world_size)

    @property
    def buffers(self) -> list[LiveBuffer]:
        """All flat buffers, in the layout's order."""
        return [buffer for unit in self.units for buffer in unit.buffers]

    @property
    def shards(self) -> list[ParameterShard]:
        """All parameters, in the order of their index."""
        return [shard for buffer in self.buffers for shard in buffer.shards]

    @property
    def awaits_step(self) -> bool:
        """Whether this rank has gradients that a later step will use."""
        return self.gradient_use.awaits_step(self.shards)

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward runs, or ended by an error and no other one, nor a step, has begun since."""
        return self._running_forwards > 0

    # Errors that Paddle would not let through where they are found.

    def fail(self, error: CheckpointError) -> None:
        """Keep an error that can't be raised here; it is raised at the next forward or step."""
        self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise the error that was kept, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def check_bound(self) -> None:
        """Raise where nobody said who steps this model.

        Raises:
            UnboundOptimizerError: no optimizer was bound, and ``optimizer=None`` was not said either.
        """
        self.raise_failure()
        if not (self.observers or self.steps_by_hand) and any(not shard.parameter.stop_gradient for shard in self.shards):
            raise UnboundOptimizerError(
                "the model is sharded but no optimizer is bound to it, so its training would go wrong; call "
                "fully_shard(model, optimizer=opt) or bind_optimizer(opt), or fully_shard(model, optimizer=None) to step it yourself"
            )

    def check_stepping(self, shard: ParameterShard) -> bool:
        """Raise where an optimizer reads gradients that is not bound, as it would step parameters that hold no data.

        Returns:
            Whether an optimizer that is not bound reads it.

        Raises:
            UnboundOptimizerError: it is not bound, and the parameter is not this rank's piece at the moment either, or pieces are not
                enough for it.
        """
        self.check_bound()
        if self._optimizers_stepping:
            return False
        reader = sys._getframe(2).f_locals.get("self")
        check_unbound_reader(reader, shard, is_shown=self.shows_local(shard))
        return isinstance(reader, paddle.optimizer.Optimizer)

    def gradient_mark(self, numel: int) -> paddle.Tensor:
        """Return a tensor of this many elements that stands for a gradient which was taken; see :class:`ParameterShard`."""
        mark = self._gradient_marks.get(numel)
        if mark is None:
            mark = self._gradient_marks[numel] = paddle.zeros([numel])
        return mark

    def add_observer(self, observer: WeightsObserver) -> None:
        """Bind an optimizer."""
        self.observers.add(observer)
        if isinstance(self._failure, UnboundOptimizerError):
            self._failure = None

    # Forward and backward.

    def begin_forward(self, units: Sequence[Unit]) -> None:
        """A layer that needs ``units`` begins its forward."""
        self.raise_failure()
        self.lost.check()
        if self._showing_local:
            raise ShardingError("a forward of a sharded model can't run inside `with local_parameters(...)`")
        if self._running_forwards == 0 and not running_backwards():
            self._prefetcher.end_phase()
            # What is still gathered may be older than the shards: others, such as stock load_state_dict, write to those too.
            for unit in self.units:
                if unit.is_gathered:
                    self._let_go(unit)
                unit.in_backward = False
        self._running_forwards += 1
        SAVED_WEIGHTS.enter(self)
        for unit in units:
            unit.uses += 1
            self._make_whole(unit)

    def end_forward(self, units: Sequence[Unit], outputs: Sequence[ParameterShard]) -> None:
        """A layer's forward ended; ``outputs`` are parameters among its outputs, which the layers around it may use."""
        self._running_forwards = max(0, self._running_forwards - 1)
        for unit in units:
            unit.uses = max(0, unit.uses - 1)
        for shard in outputs:
            self._hold(shard.unit)
        # In recompute's backward the forward around this one may have no layer that we watch.
        if self._running_forwards == 0 and not running_backwards():
            for unit in self.units:
                self._lost_writes.look(unit)
            self._end_outermost_forward()

    def forget_aborted_forward(self) -> None:
        """The whole model's forward begins: one that still seems to run ended by an exception."""
        if self._running_forwards:
            self._end_outermost_forward()

    def _end_outermost_forward(self) -> None:
        self._running_forwards = 0
        self._prefetcher.end_phase()
        SAVED_WEIGHTS.leave(self)
        for unit in self.units:
            unit.uses = 0
            unit.held = False
            unit.held_by = None
        _each(self.units, Unit.park)

    def expect_backward(self, units: Sequence[Unit], outputs: Iterable[paddle.Tensor]) -> None:
        """Be told when a backward reaches a layer's outputs."""
        tracked = [tensor for tensor in outputs if not tensor.stop_gradient]
        if not tracked or not units:
            return
        backwards = running_backwards()
        if backwards and not backwards[0].is_reentrant:
            return
        call = _BackwardCall(self, units)
        for unit in units:
            unit.backward_calls += 1
        for tensor in tracked:
            tensor.register_hook(call)

    def begin_backward(self, units: Sequence[Unit], first: bool) -> None:
        """A backward reached the outputs of a layer that needs ``units``."""
        try:
            self.check_bound()
            if self._showing_local:
                raise ShardingError("a backward of a sharded model can't run inside `with local_parameters(...)`")
        except CheckpointError as error:  # Paddle makes another exception of it
            self.fail(error)
            raise
        self.gradients_pending = True
        for unit in units:
            if first:
                unit.backward_calls = max(0, unit.backward_calls - 1)
            unit.in_backward = True
            self._make_whole(unit)

    def whole_for_backward(self, buffer: LiveBuffer, generation: int) -> paddle.Tensor:
        """Return the whole buffer for a tensor that a forward saved.

        Raises:
            ShardingError: the weights have changed since that forward.
        """
        if generation != buffer.unit.generation:
            raise ShardingError(
                f"unit '{buffer.unit.name}': its weights changed between the forward and the backward (a step, a load or set_value); "
                "run the forward again"
            )
        self._make_whole(buffer.unit, fill=False)
        assert buffer.whole is not None
        return buffer.whole

    def use_outside_unit(self, shard: ParameterShard) -> None:
        """A parameter was looked up in a layer while a forward or backward runs; make it whole, in a forward until its outermost end."""
        unit = shard.unit
        if self._showing_local or (unit.uses and unit.is_filled):
            return
        # A backward here is recompute's, which runs a piece of a forward again.
        if self._running_forwards or running_backwards():
            SAVED_WEIGHTS.enter(self)
            self._hold(unit)
            self._make_whole(unit)

    def _hold(self, unit: Unit) -> None:
        """Keep the unit whole until the outermost forward, or the recomputation, ends."""
        backwards = running_backwards()
        if backwards:
            unit.held_by = backwards[0]
        else:
            unit.held = True

    def _make_whole(self, unit: Unit, fill: bool = True) -> None:
        if not unit.is_gathered:
            others = [other for other in self.units if other is not unit and other.is_gathered and not (other.uses or other.held)]
            backwards = running_backwards() if any(other.held_by for other in others) else []
            for other in others:
                if not any(other.held_by is one for one in backwards):
                    other.held_by = None
                    self._let_go(other)
            self._agreement.note("gather", unit)
            unit.gather()
            self._prefetcher.fetched(unit)
        if fill:
            unit.fill()

    def _let_go(self, unit: Unit) -> None:
        if self._running_forwards:  # between forwards others may have written to the shards
            self._lost_writes.look(unit)
        unit.release()
        if unit.in_backward and unit.backward_calls == 0:
            self._agreement.note("reduce", unit)
            self._prefetcher.reduce(unit, self.gradient_reduction == "mean")

    # Step.

    def release_all(self) -> None:
        """Let go of all whole buffers; whatever forward was running is over."""
        try:
            self._end_outermost_forward()
        finally:
            _each(self.units, Unit.release)

    def begin_step(self, settings: object = None) -> None:
        """Get ready for an optimizer: reduce what is pending, and let go of whole weights, which are about to be out of date.

        A collective operation, also where no gradient is pending here.

        Args:
            settings: of the optimizer, such as its learning rate; what must be the same on every rank.

        Raises:
            ShardingError: the ranks differ in it, in which parameters are frozen, or in the order in which they used units.
        """
        self.check_bound()
        self.release_all()
        self.check_unwritten()
        self._reduce_gradients(settings)
        average_statistics(self.communicator, self.statistics)

    @contextmanager
    def stepping(self, settings: object, shards: Iterable[ParameterShard]) -> Iterator[None]:
        """A bound optimizer steps these parameters inside the block; for ``settings`` see :meth:`begin_step`."""
        self.begin_step(settings)
        self.gradient_use.step_uses(shards)
        self._optimizers_stepping += 1
        try:
            yield
        finally:
            self._optimizers_stepping -= 1

    def settle_gradients(self) -> None:
        """Reduce what is pending, and raise on all ranks where a gradient was lost on any. A collective operation."""
        if self.gradients_pending:
            self._reduce_gradients()
            return
        lost = self.lost.vote(self.shards)
        agreed = int(self.communicator.max_of_integers(np.array([lost], dtype=np.int32))[0])
        if agreed:
            self.lost.raise_voted(self.shards, agreed)

    def reduce_pending_gradients(self) -> None:
        """Reduce the gradients that are still pending. A collective operation where there are any."""
        if self.gradients_pending:
            self._reduce_gradients()

    def _reduce_gradients(self, settings: object = None) -> None:
        self._prefetcher.finish_reductions()
        shards, buffers = self.shards, self.buffers
        agreed = self._agreement.reach(
            self.communicator,
            shards,
            buffers,
            written=self._lost_writes.take(),
            lost=self.lost.vote(shards),
            settings=settings,
            given=self.given_values.checksum,
        )
        if agreed.lost:
            self.lost.raise_voted(shards, agreed.lost)
        self.given_values.clear()
        if agreed.written:
            raise ShardingError(
                f"unit '{self.units[agreed.written - 1].name}': a parameter of it was written to inside a forward, as by an initializer, "
                "which would be lost; use set_value between steps, or `with paddle_fsdp_ckpt.local_parameters(model):`. Nothing was stepped"
            )
        for shard, got in zip(shards, agreed.got_gradient, strict=True):
            shard.has_gradient = shard.has_gradient or got
            shard.is_zero = shard.is_zero and (shard.got_gradient or not got)  # one of other ranks alone has values now
            shard.got_gradient = False
        for buffer, pending in zip(buffers, agreed.is_pending, strict=True):
            if pending:
                buffer.reduce_gradient(self.gradient_reduction == "mean")
        for unit in self.units:
            unit.in_backward = False
            unit.backward_calls = 0
        self.gradients_pending = False

    @contextmanager
    def showing_local(self, shards: Sequence[ParameterShard]) -> Iterator[None]:
        """Let the parameters be this rank's pieces inside the block; what is written to them stays."""
        fresh = [shard for shard in shards if shard.index not in self._showing_local]
        self.release_all()
        self.check_unwritten()
        self.lost.check()
        for shard in fresh:
            self._showing_local.add(shard.index)
            shard.show_local()
        try:
            yield
        finally:
            by_unit: dict[int, list[ParameterShard]] = {}
            for shard in fresh:
                shard.hide_local()
                self._showing_local.discard(shard.index)
                by_unit.setdefault(shard.unit.index, []).append(shard)
            for own in by_unit.values():
                own[0].unit.changed(own)
        self.lost.check()

    def shows_local(self, shard: ParameterShard) -> bool:
        """Tell whether a parameter is this rank's piece at the moment, by :meth:`showing_local`."""
        return shard.index in self._showing_local

    def check_unwritten(self) -> None:
        """Raise where a parameter was given memory while it was sharded, so that what was written is not in the shard.

        Raises:
            ShardingError: naming the parameter.
        """
        for unit in self.units:
            if not unit.is_filled:
                for shard in unit.shards:
                    if shard.parameter._is_initialized() and shard.index not in self._showing_local:
                        shard.check_parked()

    def check_closable(self) -> None:
        """Raise where the model is in use.

        Raises:
            ShardingError: inside a block of ``local_parameters``, or of an optimizer's step.
        """
        if self._showing_local or self._optimizers_stepping:
            raise ShardingError("unshard: not inside `with local_parameters(...)`, nor within a step")

    def parameters_written(self, shards: Sequence[ParameterShard], *, maybe: bool = False) -> None:
        """Tell those who keep copies of these parameters that they have new values, or that they may have."""
        shards = [shard for shard in shards if not self.lost.has(shard)]
        for observer in self.observers:
            observer.parameters_written(shards, maybe=maybe)

    def memory_bytes(self) -> tuple[int, int]:
        """Return (bytes of this rank's shards, bytes of whole buffers), data and gradients together."""
        pairs = [buffer.memory_bytes() for buffer in self.buffers]
        return sum(local for local, _ in pairs), sum(whole for _, whole in pairs)


class _BackwardCall:
    """The hook on the outputs of one forward of a layer; Paddle calls it once for each output that gets a gradient."""

    def __init__(self, runtime: Runtime, units: Sequence[Unit]) -> None:
        self._runtime = runtime
        self._units = units
        self._first = True

    def __call__(self, gradient: paddle.Tensor) -> None:
        first, self._first = self._first, False
        self._runtime.begin_backward(self._units, first)


def _each(units: Iterable[Unit], do: Callable[[Unit], None]) -> None:
    """Do it to every unit, also after an error, and raise the first error at the end."""
    errors: list[CheckpointError] = []
    for unit in units:
        try:
            do(unit)
        except CheckpointError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def runtime_of(model: nn.Layer) -> Runtime | None:
    """Return the runtime of a model that our ``fully_shard`` sharded, or None."""
    runtime = model.__dict__.get(RUNTIME_ATTRIBUTE)
    return runtime if isinstance(runtime, Runtime) else None


RUNTIME_ATTRIBUTE = "_fully_shard_runtime"
