"""The live side of a layout: flat buffers with this rank's data, gathered and released a unit at a time."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
import paddle
from paddle.base import core

from ..errors import ShardingError, UnboundOptimizerError
from ..layout import FlatBuffer, Range, Slot
from .communication import Communicator
from .parameter import ShardedParameter
from .saved_weights import SAVED_WEIGHTS

if TYPE_CHECKING:
    from paddle.base.framework import EagerParamBase

    from .runtime import RunningBackward, Runtime

_Tensor = core.eager.Tensor


class ParameterShard:
    """One parameter of a sharded model: its slot, this rank's piece of it, and this rank's piece of its gradient.

    Attributes:
        unit: the unit that it is gathered with.
        buffer: the flat buffer that it lies in.
        slot: its place there.
        range: the part of it that this rank keeps, in elements of the flattened parameter; may be empty.
        index: its place among the model's parameters, the same on every rank.
        got_gradient: a gradient arrived on this rank and is not known to the other ranks yet.
        has_gradient: some rank got a gradient (which may have been set to zero since).
    """

    def __init__(self, buffer: LiveBuffer, slot: Slot, index: int, parameter: EagerParamBase) -> None:
        self.unit = buffer.unit
        self.buffer = buffer
        self.slot = slot
        self.index = index
        self.range: Range = buffer.layout.local_range(slot, buffer.communicator.rank)
        self.got_gradient = False
        self.has_gradient = False
        self._hooked = False
        self._filled_version = 0
        self._filled_address = 0
        # Paddle's tensors take no part in garbage collection: a strong reference would keep the model alive for ever.
        self._parameter = weakref.ref(parameter)
        self._clear_data()
        self._local: paddle.Tensor | None = None

    @property
    def parameter(self) -> ShardedParameter:
        """The parameter."""
        parameter = self._parameter()
        assert parameter is not None, f"parameter '{self.slot.name}' is gone"
        return parameter

    @property
    def buffer_range(self) -> Range:
        """This rank's piece, counted from the beginning of its shard."""
        start = self.slot.offset + self.range.start - self.buffer.layout.shard(self.buffer.communicator.rank).start
        return Range(start, start + self.range.numel) if self.range.numel else Range(0, 0)

    @property
    def local(self) -> paddle.Tensor:
        """This rank's piece: a 1-D view of its shard; shape [0] where it keeps nothing."""
        if self._local is None:
            self._local = _slice(self.buffer.shard, self.buffer_range)
        return self._local

    def describe(self) -> str:
        """Say in words what this is."""
        keeps = f"elements {self.range.start} to {self.range.stop}" if self.range.numel else "nothing"
        return (
            f"sharded parameter '{' = '.join(self.slot.names)}' (shape {list(self.slot.shape)}, {self.buffer.layout.dtype}; "
            f"this rank keeps {keeps} of {self.slot.numel})"
        )

    # Data.

    def check_parked(self) -> None:
        """Raise where the parameter has memory of its own.

        Raises:
            ShardingError: somebody wrote to it.
        """
        if self.parameter._is_initialized():
            raise ShardingError(
                f"{self.describe()}: it was written to while it was sharded, which would be lost; use set_value, or "
                "`with paddle_fsdp_ckpt.local_parameters(model):`"
            )

    def fill(self, whole: paddle.Tensor) -> None:
        """Make the parameter whole: a view of the gathered buffer ``whole``."""
        self.check_parked()
        parameter = self.parameter
        tensor = parameter.get_tensor()
        tensor._share_data_with(whole.get_tensor()._slice(self.slot.offset, self.slot.offset + self.slot.numel))
        tensor._set_dims(list(self.slot.shape))
        self._filled_version, self._filled_address = parameter.inplace_version, parameter.data_ptr()
        if not (self._hooked or parameter.stop_gradient):
            parameter._register_backward_hook(_GradientHook(self))
            self._hooked = True

    def park(self) -> bool:
        """Take the data away from the parameter; its shape stays whole. Return whether it was changed in place meanwhile."""
        parameter = self.parameter
        filled = self._filled_version, self._filled_address
        changed = parameter._is_initialized() and (parameter.inplace_version, parameter.data_ptr()) != filled
        self._clear_data()
        return changed

    def show_local(self) -> None:
        """Let the parameter be this rank's piece, 1-D, sharing the shard's memory."""
        self.parameter.get_tensor()._share_data_with(self.local.get_tensor())

    def hide_local(self) -> None:
        """End :meth:`show_local`."""
        self._clear_data()

    def _clear_data(self) -> None:
        # Without memory Paddle refuses to compute with the parameter, also where a graph saved it.
        parameter = self.parameter
        parameter._clear_data()
        parameter.get_tensor()._set_dims(list(self.slot.shape))

    def write(self, value: paddle.Tensor | np.ndarray) -> None:
        """Set the whole parameter to ``value``; this rank keeps its part."""
        tensor = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        if tuple(tensor.shape) != self.slot.shape or dtype_name(tensor) != self.buffer.layout.dtype:
            raise ShardingError(
                f"{self.describe()}: can't be set to a value of shape {list(tensor.shape)} and dtype {dtype_name(tensor)}; "
                "give the whole value"
            )
        if self.range.numel:
            with paddle.no_grad():
                paddle.assign(tensor.detach().reshape([-1])[self.range.start : self.range.stop], self.local)
        self.unit.changed()
        self.unit.runtime.parameters_written([self])

    # Gradient.

    def take_gradient(self) -> None:
        """Move the whole gradient that Paddle's backward just left on the parameter into the buffer's whole gradient."""
        parameter = self.parameter
        gradient = _Tensor._grad_ivar(parameter)
        if gradient is None or self._is_mark(gradient):
            return
        self.unit.runtime.gradients_pending = True
        if gradient.is_selected_rows():
            _Tensor.clear_gradient(parameter, False)
            self.unit.runtime.fail(
                ShardingError(f"{self.describe()}: sparse gradients are not supported; build the embedding with sparse=False")
            )
            return
        self.buffer.add_gradient(self.slot, gradient)
        self.got_gradient = True
        self._leave_mark(gradient)

    def _leave_mark(self, gradient: paddle.Tensor) -> None:
        """Make a mark of the tensor that Paddle keeps as the parameter's gradient; its memory is freed."""
        # Paddle's minimize reads gradients past the parameter's Python face. With none there, that of an unbound optimizer would do nothing,
        # in silence.
        gradient.get_tensor()._share_data_with(self.unit.runtime.gradient_mark(self._mark_numel).get_tensor())
        _Tensor.clear_gradient(self.parameter, True)  # to zero; so the next backward replaces it, and does not add to it

    @property
    def _mark_numel(self) -> int:
        # A number that no gradient of this parameter has, whole or in pieces.
        return next(numel for numel in (1, 2, 3) if numel not in (self.slot.numel, self.range.numel))

    def _is_mark(self, gradient: paddle.Tensor) -> bool:
        return not gradient.is_selected_rows() and int(gradient.size) == self._mark_numel

    def check_gradient(self, gradient: paddle.Tensor | None) -> None:
        """Raise where what an optimizer is about to use is not this parameter's gradient, but the mark in its place.

        Raises:
            UnboundOptimizerError: saying what to call instead.
        """
        if gradient is not None and self._is_mark(gradient):
            raise UnboundOptimizerError(
                f"{self.describe()}: minimize, or apply_gradients, of an optimizer that is not bound to the model can't see its gradient; "
                "call bind_optimizer(opt), or opt.step() inside `with paddle_fsdp_ckpt.local_parameters(model):`"
            )

    def gradient(self) -> paddle.Tensor | None:
        """Return this rank's piece of the gradient, 1-D, reduced over the ranks; None without one or without a piece."""
        self.unit.runtime.reduce_pending_gradients()
        if not self.has_gradient or not self.range.numel:
            return None
        return self._gradient_view()

    def set_gradient(self, value: paddle.Tensor | None) -> None:
        """Replace this rank's piece of the gradient; None drops it."""
        self.unit.runtime.reduce_pending_gradients()
        if value is None:
            self.clear_gradient(set_to_zero=False)
            return
        if list(value.shape) != [self.range.numel] or dtype_name(value) != self.buffer.layout.dtype:
            raise ShardingError(
                f"{self.describe()}: its gradient can't be set to a tensor of shape {list(value.shape)} and dtype {dtype_name(value)}; "
                f"give this rank's piece, shape [{self.range.numel}]"
            )
        self.has_gradient = True
        if self.range.numel:
            with paddle.no_grad():
                paddle.assign(value, self._gradient_view())

    def _gradient_view(self) -> paddle.Tensor:
        return _slice(self.buffer.gradient_shard(), self.buffer_range)

    def clear_gradient(self, set_to_zero: bool) -> None:
        """Set the gradient to zero, or drop it, as Paddle does: a parameter without one stays without."""
        self.has_gradient = self.has_gradient and set_to_zero
        if self.got_gradient:
            self.buffer.zero_pending(self.slot)
            self.got_gradient = set_to_zero
        self.buffer.note_zero(self)

    def reset_gradient(self, present: bool) -> None:
        """Let there be a gradient of zeros, or none, whatever there was; the same on every rank."""
        self.got_gradient = False
        self.has_gradient = present
        self.buffer.zero_pending(self.slot)
        self.buffer.note_zero(self)


class _GradientHook:
    """Called by Paddle when the parameter's gradient of one backward is complete."""

    def __init__(self, shard: ParameterShard) -> None:
        self._shard = shard

    def __call__(self, *_: object) -> None:
        self._shard.take_gradient()


class LiveBuffer:
    """One flat buffer: this rank's shard, and, while they are needed, the whole buffer and the gradients."""

    def __init__(
        self, unit: Unit, layout: FlatBuffer, parameters: list[EagerParamBase], first_index: int, communicator: Communicator
    ) -> None:
        self.unit = unit
        self.layout = layout
        self.communicator = communicator
        self.shard: paddle.Tensor = self._fuse(parameters)
        self.whole: paddle.Tensor | None = None
        self._whole_gradient: paddle.Tensor | None = None
        self._filled_slots: set[int] = set()  # by their offset
        self._gradient_shard: paddle.Tensor | None = None
        self._zeros: set[ParameterShard] = set()
        self.shards = [
            ParameterShard(self, slot, first_index + position, parameter)
            for position, (slot, parameter) in enumerate(zip(layout.slots, parameters, strict=True))
        ]
        self._local_pieces = sum(shard.range.numel > 0 for shard in self.shards)

    def _fuse(self, parameters: list[EagerParamBase]) -> paddle.Tensor:
        """Copy the parameters, as the first rank has them, into a flat buffer, and return this rank's shard."""
        with paddle.no_grad():
            whole = paddle.zeros([self.layout.numel], dtype=self.layout.dtype)
            for slot, parameter in zip(self.layout.slots, parameters, strict=True):
                paddle.assign(parameter.detach().reshape([-1]), _slice(whole, slot.range))
            self.communicator.broadcast_from_first(whole)
            mine = self.layout.shard(self.communicator.rank)
            return whole if self.communicator.alone else whole[mine.start : mine.stop].clone()

    # Data.

    def gather(self) -> None:
        """Fetch the whole buffer. A collective operation."""
        if self.whole is None:
            # Always fresh memory: a view that a graph kept of an earlier one must not see other values.
            self.whole = self.shard if self.communicator.alone else self.communicator.all_gather(self.shard)
            SAVED_WEIGHTS.add(self, self.whole)

    def release(self) -> None:
        """Let go of the whole buffer."""
        if self.whole is not None:
            SAVED_WEIGHTS.remove(self)
            self.whole = None

    # Gradients.

    def add_gradient(self, slot: Slot, gradient: paddle.Tensor) -> None:
        """Add a parameter's whole gradient of this rank, not reduced yet."""
        with paddle.no_grad():
            if self._whole_gradient is None:
                self._whole_gradient = paddle.empty([self.layout.numel], dtype=self.layout.dtype)
            view = _slice(self._whole_gradient, slot.range)
            if slot.offset in self._filled_slots:
                view.add_(gradient.detach().reshape([-1]))
            else:
                self._filled_slots.add(slot.offset)
                paddle.assign(gradient.detach().reshape([-1]), view)

    def zero_pending(self, slot: Slot) -> None:
        """Forget what :meth:`add_gradient` added for ``slot``."""
        self._filled_slots.discard(slot.offset)

    @property
    def has_pending_gradient(self) -> bool:
        """Whether some gradient of this rank is not reduced yet."""
        return self._whole_gradient is not None

    def reduce_gradient(self, mean: bool) -> None:
        """Reduce the pending gradient over the ranks and add this rank's part to its shard. A collective operation."""
        with paddle.no_grad():
            whole = self._take_whole_gradient()
            part = self.communicator.reduce_scatter(whole)
            if mean and not self.communicator.alone:
                part.scale_(1.0 / self.communicator.world_size)
            if self._gradient_shard is None:
                self._gradient_shard = part
            else:
                self.gradient_shard().add_(part)

    def _take_whole_gradient(self) -> paddle.Tensor:
        """Return the pending gradient, zero where none was added, and forget it. What padding holds does not matter."""
        whole, filled = self._whole_gradient, self._filled_slots
        self._whole_gradient, self._filled_slots = None, set()
        if whole is None:
            return paddle.zeros([self.layout.numel], dtype=self.layout.dtype)
        for slot in self.layout.slots:
            if slot.offset not in filled:
                _slice(whole, slot.range).zero_()
        return whole

    def gradient_shard(self) -> paddle.Tensor:
        """Return this rank's shard of the reduced gradient, made of zeros where there is none."""
        if self._gradient_shard is None:
            self._gradient_shard = paddle.zeros([self.layout.shard_numel], dtype=self.layout.dtype)
        for shard in self._zeros:
            _slice(self._gradient_shard, shard.buffer_range).zero_()
        self._zeros.clear()
        return self._gradient_shard

    def note_zero(self, shard: ParameterShard) -> None:
        """Let a parameter's piece of the gradient count as zero; the memory is freed once all pieces do."""
        if self._gradient_shard is not None and shard.range.numel:
            self._zeros.add(shard)
            if len(self._zeros) == self._local_pieces:
                self._gradient_shard = None
                self._zeros.clear()

    def memory_bytes(self) -> tuple[int, int]:
        """Return (bytes of this rank's shards: data and gradient; bytes of whole buffers: data and gradient not reduced yet)."""
        item = self.layout.nbytes // self.layout.numel
        local = [self.shard, self._gradient_shard]
        whole = [None if self.communicator.alone else self.whole, self._whole_gradient]
        local_bytes, whole_bytes = (sum(item * tensor.shape[0] for tensor in group if tensor is not None) for group in (local, whole))
        return local_bytes, whole_bytes


class Unit:
    """Flat buffers that are gathered and released together.

    Attributes:
        generation: counts the changes of this rank's data, so that weights saved before a change are told from the new ones.
        uses: how many forwards of layers that need the unit are running.
        held: needed until the outermost forward ends, because a parameter was used outside its layer's forward.
        held_by: needed until this ends, for the same reason.
        backward_calls: backwards of its layers that are still to come.
        in_backward: a backward needed it since its gradients were last reduced.
    """

    def __init__(self, runtime: Runtime, name: str, index: int) -> None:
        self._runtime = weakref.ref(runtime)
        self.name = name
        self.index = index
        self.buffers: list[LiveBuffer] = []
        self.generation = 0
        self.uses = 0
        self.held = False
        self.held_by: RunningBackward | None = None
        self.backward_calls = 0
        self.in_backward = False
        self.is_filled = False

    @property
    def runtime(self) -> Runtime:
        """The runtime of the unit's model."""
        runtime = self._runtime()
        assert runtime is not None
        return runtime

    @property
    def is_gathered(self) -> bool:
        """Whether the whole buffers are in memory."""
        return self.buffers[0].whole is not None

    @property
    def shards(self) -> list[ParameterShard]:
        """All parameters of the unit."""
        return [shard for buffer in self.buffers for shard in buffer.shards]

    def gather(self) -> None:
        """Fetch the whole buffers. A collective operation."""
        for buffer in self.buffers:
            buffer.gather()

    def fill(self) -> None:
        """Make the parameters whole; the buffers must be gathered."""
        if not self.is_filled:
            for buffer in self.buffers:
                for shard in buffer.shards:
                    assert buffer.whole is not None
                    shard.fill(buffer.whole)
            self.is_filled = True

    def park(self) -> None:
        """Take the parameters' data away; the buffers may stay gathered."""
        if self.is_filled:
            self.is_filled = False
            changed = [shard for shard in self.shards if shard.park()]
            if changed:
                raise ShardingError(
                    f"{changed[0].describe()}: it was changed in place while it was whole, which would be lost; change it with "
                    "set_value, or inside `with paddle_fsdp_ckpt.local_parameters(model):`"
                )

    def release(self) -> None:
        """Let go of the whole buffers."""
        try:
            self.park()
        finally:
            for buffer in self.buffers:
                buffer.release()

    def changed(self) -> None:
        """Note that this rank's data changed: whatever was gathered is out of date."""
        self.generation += 1
        self.release()

    def reduce_gradients(self, mean: bool) -> None:
        """Reduce the gradients of the buffers that train, also those that got none here. A collective operation."""
        self.in_backward = False
        for buffer in self.buffers:
            if any(not shard.parameter.stop_gradient for shard in buffer.shards):
                buffer.reduce_gradient(mean)


def dtype_name(tensor: paddle.Tensor) -> str:
    """Return Paddle's dtype name, such as ``float32``."""
    return str(tensor.dtype).rpartition(".")[2]


def _slice(flat: paddle.Tensor, wanted: Range) -> paddle.Tensor:
    """Return a 1-D view of ``flat``; of shape [0] for an empty range."""
    if wanted.numel:
        return flat._slice(wanted.start, wanted.stop)
    view = flat._slice(0, 1)
    view.get_tensor()._set_dims([0])
    return view
