"""Describe live tensors to ``paddle.distributed.save_state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..layout import Range, Slot
from .tensors import own_view


def replicated(key: str, tensor: paddle.Tensor) -> ShardedWeight:
    """Describe a tensor that every rank has whole."""
    shape = tuple(tensor.shape)
    return ShardedWeight(key, tensor, shape, shape, (0,) * len(shape))


def elementwise(key: str, piece: paddle.Tensor, slot: Slot, kept: Range, world_size: int) -> ShardedWeight:
    """Describe what a rank keeps of something that has one value an element of a parameter.

    Args:
        key: its key.
        piece: the live values, 1-D.
        slot: the parameter.
        kept: which of its elements these are.
        world_size: over how many ranks it is cut; over one it is described as whole.
    """
    # A view of its own: stock load_state_dict reshapes what it is given, in place.
    view = own_view(piece)
    shape, offset = slot.shape, (0,) * len(slot.shape)
    if world_size == 1:
        view.get_tensor()._set_dims(list(shape))
        return ShardedWeight(key, view, shape, shape, offset)
    return ShardedWeight(key, view, shape, shape, offset, True, slice(kept.start, kept.stop))
