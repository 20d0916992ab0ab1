"""Memory of a shard that is lent to a tensor which others write to, and what to do where they put other memory in its place.

Paddle writes values of another dtype into the memory that a tensor has, as far as the allocation reaches, and gives it other memory where
they don't fit; both without a word. So an allocation must end where the piece does, or values of its neighbours are written over.
"""

from __future__ import annotations

import math

import paddle
from paddle.base import core

from .tensors import dtype_name


def ends_with_piece(flat: paddle.Tensor) -> bool:
    """Tell whether what :class:`LentMemory` lends of this tensor ends where the piece does: not where Paddle has no DLPack for it."""
    try:
        core.from_dlpack(flat.get_tensor()._to_dlpack())
    except (RuntimeError, ValueError, OSError, SystemError):  # what Paddle makes of its own kinds of errors
        return False
    return True


class LentMemory:
    """The memory of one piece.

    Args:
        piece: a 1-D view of a shard.
        is_apart: what :func:`ends_with_piece` said of the shard.
    """

    def __init__(self, piece: paddle.Tensor, *, is_apart: bool) -> None:
        self._is_apart = is_apart
        self._shape: list[int] = piece.shape
        self._dtype = piece.dtype
        self._address = piece.data_ptr()
        dense = piece.get_tensor()
        if is_apart:
            self._memory = core.from_dlpack(dense._to_dlpack())
        else:
            self._memory = dense._slice(0, self._shape[0]) if self._shape[0] else dense

    def lend(self, tensor: paddle.Tensor) -> None:
        """Let the tensor be the piece, 1-D."""
        tensor.get_tensor()._share_data_with(self._memory)

    def is_kept(self, tensor: paddle.Tensor) -> bool:
        """Tell whether the tensor is the piece still, in whatever shape."""
        if self._shape == [0] and not tensor._is_initialized():  # as Paddle leaves what was made to share nothing
            return True
        return (
            tensor._is_initialized()
            and tensor.dtype is self._dtype  # of each there is one object, and Paddle takes long to compare them
            and (tensor.data_ptr() == self._address or self._shape == [0])
            and self._has_all(tensor)
        )

    def take_over(self, tensor: paddle.Tensor) -> bool:
        """Copy the values of a tensor that has other memory now; return whether they fit."""
        fits = tensor._is_initialized() and tensor.dtype is self._dtype and self._has_all(tensor)
        if fits:
            with paddle.no_grad():
                paddle.assign(tensor.detach().reshape(self._shape), paddle.Tensor(self._memory, place=self._memory._place()))
        return fits

    def overwritten(self, tensor: paddle.Tensor) -> bool:
        """Tell whether values that were there before may have been written over by those of a tensor that is the piece no more."""
        return not self._is_apart or (tensor._is_initialized() and tensor.data_ptr() == self._address and self._shape != [0])

    def _has_all(self, tensor: paddle.Tensor) -> bool:
        shape = tensor.shape
        return shape == self._shape or math.prod(shape) == self._shape[0]


def say_held(tensor: paddle.Tensor) -> str:
    """Say in words what a tensor is that should have been a piece."""
    return f"holds {dtype_name(tensor)} of shape {list(tensor.shape)}" if tensor._is_initialized() else "holds nothing"
