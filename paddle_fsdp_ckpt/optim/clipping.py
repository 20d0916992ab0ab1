"""Gradient clipping over pieces: the norms of whole gradients need the pieces of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from ..errors import UnsupportedOptimizerError
from ..fsdp import ParameterShard, Runtime
from .gradient_norm import measure_gradients

Pairs = list[tuple[Any, paddle.Tensor]]


def check_clip(clip: Any) -> None:
    """Raise where a clip can't be made right on pieces.

    Raises:
        UnsupportedOptimizerError: naming the clip's class.
    """
    if clip is not None and type(clip) not in (nn.ClipGradByGlobalNorm, nn.ClipGradByNorm, nn.ClipGradByValue):
        raise UnsupportedOptimizerError(
            f"{type(clip).__name__} can't clip the gradients of a sharded model; use paddle.nn.ClipGradByGlobalNorm, "
            "ClipGradByNorm or ClipGradByValue"
        )


class ShardedClip:
    """Stands in for a clip object while an optimizer steps: the same arithmetic, with norms summed over the ranks.

    Every rank must call it, also one that has no gradients.
    """

    def __init__(self, clip: Any, shards: Sequence[ParameterShard]) -> None:
        check_clip(clip)
        self._clip = clip
        self._shards = shards

    def __call__(self, pairs: Pairs) -> Pairs:
        """Return the (parameter, gradient) pairs with clipped gradients; those with ``need_clip=False`` as they are."""
        with paddle.no_grad():
            if isinstance(self._clip, nn.ClipGradByValue):
                return list(self._clip(pairs))
            if isinstance(self._clip, nn.ClipGradByNorm):
                return self._by_norm(pairs)
            return self._by_global_norm(pairs)

    def _squared_norms(self, pairs: Pairs) -> dict[Runtime, paddle.Tensor]:
        """Return, for each runtime, the squared norms of the whole gradients, one a parameter of the runtime's model."""
        clipped = [(parameter._shard, gradient) for parameter, gradient in pairs if _needs_clip(parameter)]
        squares = measure_gradients(self._shards, clipped, lambda gradient: gradient.square().sum())
        return {runtime: runtime.communicator.sum_over_shards(parts) for runtime, parts in squares.items()}

    def _by_global_norm(self, pairs: Pairs) -> Pairs:
        total = paddle.add_n([squares.sum() for squares in self._squared_norms(pairs).values()])
        norm = total.sqrt()
        limit = paddle.full_like(norm, self._clip.clip_norm)
        if self._clip.auto_skip_clip and not norm > limit:
            return pairs
        factor = limit / paddle.maximum(norm, limit)
        # In place, as Paddle's own: a gradient that is not cleared is the clipped one.
        return [(p, g.multiply_(factor.astype(g.dtype)) if _needs_clip(p) else g) for p, g in pairs]

    def _by_norm(self, pairs: Pairs) -> Pairs:
        squares = self._squared_norms(pairs)
        clipped = []
        for parameter, gradient in pairs:
            if _needs_clip(parameter):
                norm = squares[parameter._shard.unit.runtime][parameter._shard.index].sqrt()
                limit = paddle.full_like(norm, self._clip.clip_norm)
                gradient = gradient * (limit / paddle.maximum(norm, limit)).astype(gradient.dtype)
            clipped.append((parameter, gradient))
        return clipped


def _needs_clip(parameter: Any) -> bool:
    return getattr(parameter, "need_clip", True) is not False
