"""A sharded model's parameters: dataless between uses, whole during their unit's forward and backward, local while an optimizer steps."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase
from paddle.regularizer import L1Decay, L2Decay

from ..errors import ShardingError

if TYPE_CHECKING:
    from .parameter_shard import ParameterShard

_Tensor = core.eager.Tensor


def is_elementwise_regularizer(value: object) -> bool:
    """Tell whether a regularizer is known to be right on pieces of parameters: one of Paddle's, not of a class of its own, or none."""
    return type(value) in (type(None), float, int, L1Decay, L2Decay)


MAIN_GRAD = (
    "MixPrecisionLayer, or whoever else sets main_grad, would keep gradients there that are not reduced; leave it out, since fully_shard "
    "reduces and accumulates the gradients of 16-bit parameters in float32 itself"
)
"""Why parameters with ``main_grad`` are refused, and the way out."""


class ShardedParameter(EagerParamBase):
    """A Parameter of a sharded model. An ordinary Parameter becomes one by assignment to its ``__class__``.

    Between uses it keeps its whole shape and holds no memory, so that Paddle refuses every computation with it instead of
    computing with a piece. Its gradient is this rank's piece of the reduced one. What would hand out or take data goes to
    the shard, or is a clear error.
    """

    _shard: ParameterShard

    @property
    def grad(self) -> paddle.Tensor | None:
        """This rank's piece of the gradient, 1-D, averaged over the ranks; None where there is none. Of a 16-bit parameter it is float32.

        The first read after a backward is a collective operation: all ranks must do it.
        """
        return self._shard.gradient()

    @grad.setter
    def grad(self, value: paddle.Tensor | None) -> None:
        self._shard.set_gradient(value)

    @property
    def grad_(self) -> paddle.Tensor | None:
        """As :attr:`grad`; what Paddle's ``clip_grad_value_`` changes in place.

        Raises:
            ShardingError: read by Paddle's ``clip_grad_norm_``, which would clip by the norm of this rank's pieces alone.
        """
        if sys._getframe(1).f_globals.get("__name__") == "paddle.nn.utils.clip_grad_norm_":
            raise ShardingError(
                "Paddle's clip_grad_norm_ would take the norm of this rank's pieces for that of the whole gradient; call "
                "paddle_fsdp_ckpt.clip_grad_norm_, or give the optimizer grad_clip=paddle.nn.ClipGradByGlobalNorm(...)"
            )
        return self._shard.gradient()

    def _grad_ivar(self) -> paddle.Tensor | None:
        # What Paddle's optimizers and GradScaler read.
        stepped_by_hand = self._shard.unit.runtime.check_stepping(self._shard)
        gradient = self._shard.gradient(steps=True)
        # Most kernels want the parameter's own dtype. A GradScaler changes what it reads in place, so it gets no copy.
        return gradient.astype(self.dtype) if stepped_by_hand and gradient is not None else gradient

    @property
    def regularizer(self) -> Any:
        """What ``ParamAttr(regularizer=...)`` said, or None.

        Raises:
            UnboundOptimizerError: read by an optimizer's ``minimize`` or ``apply_gradients`` that found a mark instead of the gradient.
        """
        reader = sys._getframe(1)
        if reader.f_code.co_name == "_create_regularization_of_grad":
            self._shard.check_gradient(reader.f_locals.get("grad"))
        return self.__dict__.get("regularizer")

    @regularizer.setter
    def regularizer(self, value: Any) -> None:
        if not is_elementwise_regularizer(value):
            raise ShardingError(
                f"{self._shard.describe()}: {type(value).__name__} is neither L1Decay nor L2Decay of paddle.regularizer, and would see "
                "pieces of it"
            )
        self.__dict__["regularizer"] = value

    def clear_gradient(self, set_to_zero: bool = True) -> None:
        """Set the gradient to zero, or drop it, as Paddle's own method does."""
        self._shard.clear_gradient(set_to_zero)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradient to zero, or drop it, as Paddle's own method does."""
        self._shard.clear_gradient(set_to_zero)

    def set_value(self, value: paddle.Tensor | np.ndarray[Any, Any]) -> None:
        """Set the whole parameter; each rank keeps its part. ``value`` must have the whole shape and be the same on every rank.

        Master weights of the optimizers that are bound are set too. Of this rank's piece alone see :meth:`copy_`.

        Raises:
            ShardingError: wrong shape or dtype.
        """
        self._shard.write(value)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the whole value while the parameter is whole; an error otherwise."""
        return np.asarray(self._data().numpy())

    def item(self, *args: int) -> Any:
        """Return one value while the parameter is whole; an error otherwise."""
        return self._data().item(*args)

    def numel(self) -> paddle.Tensor:
        """Return how many elements the whole parameter has, as a 0-D int64 tensor."""
        return paddle.to_tensor(self._shard.slot.numel, dtype="int64")

    def clone(self) -> paddle.Tensor:
        """Return a copy of the whole value while the parameter is whole; an error otherwise."""
        self._check_data()
        return _Tensor.clone(self)

    def tolist(self) -> Any:
        """Return the whole value while the parameter is whole; an error otherwise."""
        return self._data().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self._data().numpy(), dtype=dtype)

    def detach(self) -> paddle.Tensor:
        """Return the whole value, without gradient, while the parameter is whole; an error otherwise."""
        if not self._is_initialized() and sys._getframe(1).f_code.co_name == "sync_params_buffers":
            raise ShardingError(
                f"{self._shard.describe()}: paddle.DataParallel isn't needed around a sharded model, since fully_shard gave all ranks rank "
                "0's weights and reduces their gradients; leave it out, and train the model itself"
            )
        self._check_data()
        return _Tensor.detach(self)

    @property
    def data(self) -> paddle.Tensor:
        """The parameter's data while it is whole; an error otherwise."""
        self._check_data()
        return _Tensor.data.__get__(self)

    @data.setter
    def data(self, value: paddle.Tensor) -> None:
        self.set_value(value)

    def to(self, *args: Any, **options: Any) -> paddle.Tensor:
        """Return the whole value, moved or converted, while the parameter is whole; an error otherwise."""
        self._check_data()
        return _Tensor.to(self, *args, **options)

    def astype(self, dtype: Any) -> paddle.Tensor:
        """Return the whole value in another dtype while the parameter is whole; an error otherwise."""
        self._check_data()
        return _Tensor.astype(self, dtype)

    def cast(self, dtype: Any) -> paddle.Tensor:
        """As :meth:`astype`."""
        return self.astype(dtype)

    def cpu(self) -> paddle.Tensor:
        """Return a copy of the whole value on the CPU while the parameter is whole; an error otherwise."""
        self._check_data()
        return _Tensor.cpu(self)

    @property
    def main_grad(self) -> NoReturn:
        """There is none, as ``hasattr`` tells: :attr:`grad` is a float32 gradient already.

        Raises:
            ShardingError: fleet's ``MixPrecisionLayer`` sets it, and would keep gradients there that are not reduced.
        """
        raise AttributeError("main_grad")

    @main_grad.setter
    def main_grad(self, value: object) -> None:
        raise ShardingError(f"{self._shard.describe()}: {MAIN_GRAD}")

    def copy_(self, value: paddle.Tensor | np.ndarray[Any, Any], *_: Any) -> ShardedParameter:
        """Set this rank's piece inside a block of ``local_parameters``; elsewhere use ``set_value``.

        Raises:
            ShardingError: it is elsewhere, or ``value`` has not the piece's shape and dtype.
        """
        self._shard.write_piece(value)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ShardingError(
            f"{self._shard.describe()}: it can't be copied; copy the model before fully_shard, or load a checkpoint into a new one"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardingError(f"{self._shard.describe()}: it can't be pickled; use paddle_fsdp_ckpt.save")

    def __str__(self) -> str:
        return self._shard.describe()

    __repr__ = __str__

    def _check_data(self) -> None:
        if not self._is_initialized():
            raise ShardingError(
                f"{self._shard.describe()}: between uses a rank has no whole value of it; use paddle_fsdp_ckpt.iter_full_parameters, or "
                "look at this rank's piece inside `with paddle_fsdp_ckpt.local_parameters(model):`"
            )

    def _data(self) -> paddle.Tensor:
        self._check_data()
        return _Tensor.detach(self)
