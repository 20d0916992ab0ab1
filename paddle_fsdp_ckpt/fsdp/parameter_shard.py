"""One parameter of a sharded model on this rank: its data, which comes and goes, and its gradient."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import ShardingError, UnboundOptimizerError
from ..layout import Range, Slot
from .lent_memory import LentMemory, say_held
from .parameter import ShardedParameter
from .sharded_weights import elementwise
from .tensors import dtype_name, flat_view

if TYPE_CHECKING:
    from .live_buffer import LiveBuffer

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
        is_zero: its gradient, if it has one, is the zeros that ``clear_grad()`` leaves.
        is_unused: a gradient arrived on this rank that no step has used.
        is_left: a step has used its gradient, other than such zeros, and nobody cleared it since.
        is_dropped: ``p.grad = None`` was said of a piece on this rank since the ranks last agreed on which gradients there are.
        is_sentinel: its optimizer looks at the mark that stands for its gradient, see :meth:`is_mark_scaled`.
        changes: how often this rank's piece was, or may have been, written to.
    """

    def __init__(self, buffer: LiveBuffer, slot: Slot, index: int, parameter: EagerParamBase) -> None:
        self.unit = buffer.unit
        self.buffer = buffer
        self.slot = slot
        self.index = index
        self.range: Range = buffer.layout.local_range(slot, buffer.communicator.rank)
        self.got_gradient = False
        # Of zeros, as clear_grad() leaves them; others were refused.
        self.has_gradient = parameter.grad is not None
        parameter.clear_gradient(False)
        self.is_zero = True
        self.is_unused = False
        self.is_left = False
        self.is_dropped = False
        self.is_sentinel = False
        self._is_marked = False
        self.changes = 0
        self._hook: _GradientHook | None = None
        self._filled_version = 0
        self._filled_address = 0
        # Paddle's tensors take no part in garbage collection: a strong reference would keep the model alive for ever.
        self._parameter = weakref.ref(parameter)
        self._clear_data()
        self._local: paddle.Tensor | None = None
        self._lent: LentMemory | None = None
        self._lent_gradient: tuple[paddle.Tensor, LentMemory] | None = None

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

    def weight(self, key: str, piece: paddle.Tensor) -> ShardedWeight:
        """Describe the 1-D piece of something elementwise that this rank keeps for the parameter."""
        return elementwise(key, piece, self.slot, self.range, self.buffer.layout.world_size)

    @property
    def local(self) -> paddle.Tensor:
        """This rank's piece: a 1-D view of its shard; shape [0] where it keeps nothing."""
        if self._local is None:
            self._local = flat_view(self.buffer.shard, self.buffer_range)
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
        if self._hook is None and not parameter.stop_gradient:
            self._hook = _GradientHook(self)
            parameter._register_backward_hook(self._hook)

    def park(self) -> bool:
        """Take the data away from the parameter; its shape stays whole. Return whether it was changed in place meanwhile."""
        parameter = self.parameter
        filled = self._filled_version, self._filled_address
        changed = parameter._is_initialized() and (parameter.inplace_version, parameter.data_ptr()) != filled
        # Paddle doesn't count that. Where a rank is alone, the whole buffer is its shard; elsewhere LostWrites sees it.
        if self.buffer.communicator.alone and parameter._is_initialized() and parameter.dtype is not self.buffer.dtype:
            changed = True
            what = f"{say_held(parameter)}: it may lie over the weights of unit '{self.unit.name}' beside it too"
            self.unit.runtime.lost.note(self.buffer.shards, self._say_lost("a forward", what))
            self.show_local()  # for its dtype
        self._clear_data()
        return changed

    def show_local(self) -> None:
        """Let the parameter be this rank's piece, 1-D, sharing the shard's memory."""
        if self._lent is None:
            self._lent = LentMemory(self.local, is_apart=self.buffer.is_lent_apart)
        self._lent.lend(self.parameter)

    def hide_local(self) -> None:
        """End :meth:`show_local`. What can't be taken over of what was written is noted as lost."""
        lent = self._lent
        assert lent is not None
        if not (lent.is_kept(self.parameter) or lent.take_over(self.parameter)):
            self._note_lost(lent)
            lent.lend(self.parameter)  # for its dtype
        self._clear_data()

    def _note_lost(self, lent: LentMemory) -> None:
        if not self.buffer.is_lent_apart:
            so = f"it may lie over the weights of unit '{self.unit.name}' beside it too"
        elif lent.overwritten(self.parameter):
            so = "it lies over the values that this rank kept of it, and over no others"
        else:
            so = "it was written elsewhere and is lost, and this rank keeps the values from before"
        shards = [self] if self.buffer.is_lent_apart else self.buffer.shards
        what = f"{say_held(self.parameter)}: {so}"
        self.unit.runtime.lost.note(shards, self._say_lost("local_parameters, or a step", what))

    def _say_lost(self, where: str, what: str) -> str:
        return (
            f"{self.describe()}: inside {where}, it was made another tensor than it was: it {what}. Paddle does so where values of "
            "another dtype or shape are assigned (paddle.assign), by cast_, and where other memory is shared with it. Write "
            f"{self.buffer.layout.dtype} of its own shape to it, as by paddle.assign(values.astype(p.dtype), p). Nothing goes on before "
            "its values are given again, on all ranks: by load, load_full_state_dict or set_value"
        )

    def _clear_data(self) -> None:
        # Without memory Paddle refuses to compute with the parameter, also where a graph saved it.
        parameter = self.parameter
        parameter._clear_data()
        parameter.get_tensor()._set_dims(list(self.slot.shape))

    def unshard(self, whole: paddle.Tensor) -> None:
        """Make an ordinary parameter of it again, with memory of its own; ``whole`` is the whole flat buffer, its values."""
        parameter = self.parameter
        _Tensor.clear_gradient(parameter, False)
        if self._hook is not None:
            self._hook.close()
        own = flat_view(whole, self.slot.range).clone()
        tensor = parameter.get_tensor()
        tensor._share_data_with(own.get_tensor())
        tensor._set_dims(list(self.slot.shape))
        del parameter._shard
        parameter.__class__ = EagerParamBase

    def write(self, value: paddle.Tensor | np.ndarray[Any, Any]) -> None:
        """Set the whole parameter to ``value``; this rank keeps its part."""
        tensor = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        if tuple(tensor.shape) != self.slot.shape or dtype_name(tensor) != self.buffer.layout.dtype:
            here = ""
            if self.unit.runtime.shows_local(self):
                here = (
                    "; or, as it is this rank's piece here, write to that: p.copy_(values), or, under paddle.no_grad(), p[:] = values, "
                    "p.lerp_(values, weight), p.scale_(factor) and the like"
                )
            raise ShardingError(
                f"{self.describe()}: can't be set to a value of shape {list(tensor.shape)} and dtype {dtype_name(tensor)}; "
                f"give the whole value{here}"
            )
        self.unit.release()
        self.unit.runtime.given_values.note(self, tensor)
        if self.range.numel:
            with paddle.no_grad():
                paddle.assign(tensor.detach().reshape([-1])[self.range.start : self.range.stop], self.local)
        self.unit.runtime.lost.forget([self])
        self.unit.changed([self])
        self.unit.runtime.parameters_written([self])

    def write_piece(self, value: paddle.Tensor | np.ndarray[Any, Any]) -> None:
        """Set this rank's piece, which the parameter must be at the moment."""
        if not self.unit.runtime.shows_local(self):
            raise ShardingError(
                f"{self.describe()}: copy_ can't write to it; use set_value, which takes the whole value, or copy_ this rank's piece "
                "inside `with paddle_fsdp_ckpt.local_parameters(model):`"
            )
        tensor = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        if list(tensor.shape) != [self.range.numel] or dtype_name(tensor) != self.buffer.layout.dtype:
            raise ShardingError(
                f"{self.describe()}: copy_ can't write a value of shape {list(tensor.shape)} and dtype {dtype_name(tensor)} to this rank's "
                f"piece; give one of shape [{self.range.numel}] and {self.buffer.layout.dtype}, or the whole value to set_value"
            )
        if self.range.numel:
            with paddle.no_grad():
                paddle.assign(tensor.detach(), self.local)

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
            self._is_marked = False
            self.unit.runtime.fail(
                ShardingError(f"{self.describe()}: sparse gradients are not supported; build the embedding with sparse=False")
            )
            return
        self.buffer.add_gradient(self.slot, gradient)
        self.got_gradient = self.is_unused = True
        self.is_zero = False
        if self.is_left:
            self.unit.runtime.gradient_use.added_to_used()
        self._leave_mark(gradient)

    def _leave_mark(self, gradient: paddle.Tensor) -> None:
        """Make a mark of the tensor that Paddle keeps as the parameter's gradient; its memory is freed."""
        # Paddle's minimize reads gradients past the parameter's Python face. With none there, that of an optimizer that isn't bound
        # would do nothing, in silence.
        # All may share one, save those that are looked at.
        mark = paddle.zeros([self._mark_numel]) if self.is_sentinel else self.unit.runtime.gradient_mark(self._mark_numel)
        gradient.get_tensor()._share_data_with(mark.get_tensor())
        _Tensor.clear_gradient(self.parameter, True)  # to zero; so the next backward replaces it, and does not add to it
        self._is_marked = True
        self.reset_mark()

    def reset_mark(self) -> None:
        """Let the mark of a sentinel be 1."""
        mark = _Tensor._grad_ivar(self.parameter) if self.is_sentinel and self._is_marked else None
        if mark is not None:
            with paddle.no_grad():
                mark.fill_(1.0)

    def is_mark_scaled(self) -> bool:
        """Tell whether somebody has multiplied the mark, which of a sentinel is 1."""
        mark = _Tensor._grad_ivar(self.parameter) if self.is_sentinel and self._is_marked else None
        return mark is not None and float(mark[0].item()) != 1.0

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
            for shard in self.unit.runtime.shards:
                shard.reset_mark()  # clipping changes them
            raise UnboundOptimizerError(
                f"{self.describe()}: minimize, or apply_gradients, of an optimizer that is not bound to the model can't see its gradient; "
                "call bind_optimizer(opt), or opt.step() inside `with paddle_fsdp_ckpt.local_parameters(model):`"
            )

    def gradient(self, *, steps: bool = False) -> paddle.Tensor | None:
        """Return this rank's piece of the gradient, 1-D, reduced over the ranks; None without one or without a piece.

        Of a 16-bit parameter it is float32.

        Args:
            steps: whether an optimizer gets it, which doesn't put another tensor in its place, so that nobody need look later.
        """
        self.unit.runtime.reduce_pending_gradients()
        if not self.has_gradient or not self.range.numel:
            return None
        self.check_lent_gradient()
        return flat_view(self.buffer.gradient_shard(), self.buffer_range) if steps else self._gradient_view()

    def set_gradient(self, value: paddle.Tensor | None) -> None:
        """Replace this rank's piece of the gradient, by one in its dtype or in the parameter's; None drops it."""
        self.unit.runtime.reduce_pending_gradients()
        if value is None:
            self.clear_gradient(set_to_zero=False)
            self.is_dropped = self.range.numel > 0
            return
        dtype = self.buffer.layout.gradient_dtype
        if list(value.shape) != [self.range.numel] or dtype_name(value) not in (dtype, self.buffer.layout.dtype):
            raise ShardingError(
                f"{self.describe()}: its gradient can't be set to a tensor of shape {list(value.shape)} and dtype {dtype_name(value)}; "
                f"give this rank's piece, shape [{self.range.numel}], in {dtype}"
            )
        self.has_gradient = True
        self.is_dropped = self.is_zero = False
        self._lent_gradient = None
        if self.range.numel:
            with paddle.no_grad():
                paddle.assign(value.astype(dtype), self._gradient_view())

    def _gradient_view(self) -> paddle.Tensor:
        shard = self.buffer.gradient_shard()  # which makes zeros of what was cleared
        if self._lent_gradient is None:
            view = flat_view(shard, self.buffer_range)
            lent = LentMemory(view, is_apart=self.buffer.is_lent_apart)
            lent.lend(view)
            self._lent_gradient = view, lent
        elif self._lent_gradient[0].shape != [self.range.numel]:
            self._lent_gradient[1].lend(self._lent_gradient[0])
        return self._lent_gradient[0]

    def lost_gradient(self) -> str | None:
        """Say what was done to the tensor that was handed out as the gradient, so that its values can't be used; None where nothing."""
        if self._lent_gradient is None:
            return None
        view, lent = self._lent_gradient
        if lent.is_kept(view):
            return None
        dtype = self.buffer.layout.gradient_dtype
        beside = "" if self.buffer.is_lent_apart else f", and gradients of unit '{self.unit.name}' beside it may be garbled"
        return (
            f"{self.describe()}: its gradient was made something else than this rank's piece of it, as paddle.assign of another dtype and "
            f"cast_ do, and whatever shares other memory with it: it {say_held(view)}{beside}. Write {dtype} of shape [{self.range.numel}] "
            "into it, as by set_value, or set p.grad; this one goes by clear_grad()"
        )

    def check_lent_gradient(self) -> None:
        """Raise where the gradient was lost.

        Raises:
            ShardingError: it says what was done to it.
        """
        lost = self.lost_gradient()
        if lost is not None:
            raise ShardingError(lost)

    def clear_gradient(self, set_to_zero: bool) -> None:
        """Set the gradient to zero, or drop it, as Paddle does: a parameter without one stays without."""
        if self.is_left:
            self.unit.runtime.gradient_use.cleared_used()
        self._lent_gradient = None
        self.has_gradient = self.has_gradient and set_to_zero
        self.is_unused = self.is_left = False
        self.is_zero = True
        if self.got_gradient:
            self.buffer.zero_pending(self.slot)
            self.got_gradient = set_to_zero
        self.buffer.note_zero(self)

    def reset_gradient(self, present: bool) -> None:
        """Let there be a gradient of zeros, or none, whatever there was; the same on every rank."""
        self._lent_gradient = None
        self.got_gradient = self.is_unused = self.is_left = False
        self.has_gradient = present
        self.is_zero = True
        self.buffer.zero_pending(self.slot)
        self.buffer.note_zero(self)


class _GradientHook:
    """Called by Paddle when the parameter's gradient of one backward is complete. Paddle can't take it off again."""

    def __init__(self, shard: ParameterShard) -> None:
        self._shard: ParameterShard | None = shard

    def __call__(self, *_: object) -> None:
        if self._shard is not None:
            self._shard.take_gradient()

    def close(self) -> None:
        """Do nothing from now on."""
        self._shard = None
