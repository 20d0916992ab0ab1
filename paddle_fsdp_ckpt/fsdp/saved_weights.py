"""Keep gathered weights out of the autograd graph: what a forward saves of them is fetched again when the backward needs it.

Paddle has one pair of saved-tensor hooks for the whole process, so this is the one place with process-wide state.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import paddle
from paddle.base import core

from ..errors import ShardingError
from .recomputation import keeps_marked_tensors

if TYPE_CHECKING:
    from .live_buffer import LiveBuffer
    from .runtime import Runtime


@dataclass(frozen=True)
class _SavedWeight:
    """A saved tensor that lies in a flat buffer: enough to find it again. The offset is in bytes, the strides in elements."""

    buffer: LiveBuffer
    generation: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stop_gradient: bool


@dataclass(frozen=True)
class _SavedShape:
    """A saved tensor without data: what a backward with ``create_graph=True`` saves of a bias, of which it needs the shape only.

    The offset is in bytes, the strides in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: paddle.dtype
    stop_gradient: bool


@dataclass(frozen=True)
class _SavedTensor:
    """Any other saved tensor, without its place in the graph, and how often it had been changed in place."""

    tensor: paddle.Tensor
    inplace_version: int
    stop_gradient: bool


_STANDS_FOR = "_fully_shard_stands_for"

_REGISTER, _RESET = core.eager.register_saved_tensors_hooks, core.eager.reset_saved_tensors_hooks


class SavedWeights:
    """The saved-tensor hooks, on while a sharded model's forward runs.

    Paddle takes one pair at a time. Recompute that is not reentrant has a pair of its own around a piece of a forward, so ours must make
    room for others: while ours are on, the functions that Paddle's ``saved_tensors_hooks`` calls are replaced by such as swap the pairs.
    """

    def __init__(self) -> None:
        self._on = False
        self._others = False
        # Weak: a model that is dropped after its forward must not live on here.
        self._active: WeakSet[Runtime] = WeakSet()
        self._gathered: WeakKeyDictionary[LiveBuffer, tuple[int, int]] = WeakKeyDictionary()

    def enter(self, runtime: Runtime) -> None:
        """Turn the hooks on for ``runtime``, unless somebody else's are on: then weights stay in the graph, which is right too."""
        self._active.add(runtime)
        if not self._on and paddle.is_grad_enabled():  # else Paddle takes no hooks, without a word
            with suppress(ValueError):  # Paddle takes one pair at a time.
                _REGISTER(self._pack, self._unpack)
                self._on = True
                core.eager.register_saved_tensors_hooks, core.eager.reset_saved_tensors_hooks = self._register_others, self._reset_others

    def _register_others(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        """Let others have their hooks in place of ours."""
        if not paddle.is_grad_enabled():  # where Paddle would take none
            return
        if not self._others:
            _RESET()
        _REGISTER(_packing(self._apart, pack), partial(self._unpack_others, unpack))
        self._others = True

    def _unpack_others(self, unpack: Callable[..., Any], saved: Any) -> Any:
        """Recompute's runs a piece of a forward again, with hooks that keep what that saves: not the parameters themselves."""
        found = core.eager.register_saved_tensors_hooks

        def register(pack: Callable[..., Any], inner: Callable[..., Any]) -> None:
            found(_packing(self._stand_in if keeps_marked_tensors(pack) else self._apart, pack), inner)

        core.eager.register_saved_tensors_hooks = register
        try:
            with _gradients_stay_enabled():
                unpacked = unpack(saved)
        finally:
            if core.eager.register_saved_tensors_hooks is register:
                core.eager.register_saved_tensors_hooks = found
        stands_for = getattr(unpacked, _STANDS_FOR, None)
        return unpacked if stands_for is None else self._unpack(stands_for)

    def _stand_in(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Return a tensor of one element for a gathered weight, which recompute may keep for long while the weight is let go of."""
        saved = self._find(tensor)
        if saved is None:
            return tensor
        stand_in = paddle.full([1], float("nan"), tensor.dtype)  # NaN would show if somebody read it
        stand_in.main_grad = None
        setattr(stand_in, _STANDS_FOR, saved)
        return stand_in

    def _apart(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Return a gathered weight as a tensor of its own: what others keep of it must not lose its memory when the parameter is parked."""
        if self._find(tensor) is None:
            return tensor
        apart = tensor.detach()
        apart.stop_gradient = tensor.stop_gradient
        return apart

    def _find(self, tensor: paddle.Tensor) -> _SavedWeight | None:
        """Return where a tensor lies, if it does in a gathered buffer."""
        if not tensor._is_initialized():
            return None
        address = tensor.data_ptr()
        for buffer, (start, stop) in self._gathered.items():
            if start <= address < stop:
                place = tuple(tensor.shape), tuple(tensor.strides), tensor.stop_gradient
                return _SavedWeight(buffer, buffer.unit.generation, address - start, *place)
        return None

    def _reset_others(self) -> None:
        """Take up ours again once others are done."""
        if self._others:
            self._others = False
            _RESET()
            _REGISTER(self._pack, self._unpack)

    def leave(self, runtime: Runtime) -> None:
        """Turn the hooks off when no other runtime is in its forward."""
        self._active.discard(runtime)
        if not self._active:
            self.turn_off()

    def turn_off(self) -> None:
        """Turn the hooks off."""
        if self._on:
            core.eager.register_saved_tensors_hooks, core.eager.reset_saved_tensors_hooks = _REGISTER, _RESET
            if not self._others:
                _RESET()
            self._on = self._others = False

    def add(self, buffer: LiveBuffer, whole: paddle.Tensor) -> None:
        """Remember where a gathered buffer lies."""
        address = whole.data_ptr()
        self._gathered[buffer] = (address, address + buffer.layout.nbytes)

    def remove(self, buffer: LiveBuffer) -> None:
        """Forget a buffer that is no longer gathered."""
        self._gathered.pop(buffer, None)

    def _pack(self, tensor: paddle.Tensor) -> _SavedWeight | _SavedShape | _SavedTensor:
        if not tensor._is_initialized():
            return _SavedShape(tuple(tensor.shape), tuple(tensor.strides), tensor.offset, tensor.dtype, tensor.stop_gradient)
        weight = self._find(tensor)
        if weight is not None:
            return weight
        # With its place in the graph, the graph would hold the tensor and the tensor the graph, for ever.
        return _SavedTensor(tensor.detach(), tensor.inplace_version, tensor.stop_gradient)

    def _unpack(self, saved: _SavedWeight | _SavedShape | _SavedTensor) -> paddle.Tensor:
        with _gradients_stay_enabled():
            return self._unpacked(saved)

    def _unpacked(self, saved: _SavedWeight | _SavedShape | _SavedTensor) -> paddle.Tensor:
        if isinstance(saved, _SavedShape):
            # Paddle asks for memory behind it, at the same offset; NaN would show if somebody read it.
            numel = math.prod(saved.shape) + saved.offset // paddle.empty([1], saved.dtype).element_size()
            tensor = paddle.as_strided(paddle.full([numel], float("nan"), saved.dtype), saved.shape, saved.strides, saved.offset)
        elif isinstance(saved, _SavedWeight):
            whole = saved.buffer.unit.runtime.whole_for_backward(saved.buffer, saved.generation)
            tensor = paddle.as_strided(whole, saved.shape, saved.strides, saved.offset)
        elif saved.tensor.inplace_version != saved.inplace_version:
            raise ShardingError(
                f"a tensor of shape {list(saved.tensor.shape)} that the backward needs was changed in place after the forward saved it"
            )
        else:
            tensor = saved.tensor.detach()
        # A PyLayer gets this tensor itself, and recompute looks at its stop_gradient.
        tensor.stop_gradient = saved.stop_gradient
        return tensor


def _packing(replace: Callable[[paddle.Tensor], paddle.Tensor], pack: Callable[..., Any]) -> Callable[[paddle.Tensor], Any]:
    """Return others' hook, which is given something else in place of gathered weights."""
    return lambda tensor: pack(replace(tensor))


@contextmanager
def _gradients_stay_enabled() -> Iterator[None]:
    """After an error inside the block, record gradients again: Paddle 3.3 doesn't around unpacking, and goes back only without an error."""
    try:
        yield
    except BaseException:
        paddle.set_grad_enabled(True)  # else whoever catches the error trains on without gradients, in silence
        raise


SAVED_WEIGHTS = SavedWeights()
# Paddle hangs at exit while hooks are on, as they are after an error in the middle of a forward.
atexit.register(SAVED_WEIGHTS.turn_off)
