"""What an optimizer's update gets for gradients: clipped, and in a dtype that its kernels take.

The gradients of 16-bit parameters are kept in float32. Paddle's kernels of Adam and AdamW take such a gradient beside a 16-bit parameter
with a master weight (``grad_type`` in ``paddle/phi/kernels/gpu/adamw_kernel.cu``; fleet's ``main_grad`` rests on it); others, such as
SGD's, want the parameter's own dtype.
"""

from __future__ import annotations

from typing import Any

import paddle

from .clipping import Pairs, ShardedClip

_TAKE_FLOAT32 = (paddle.optimizer.Adam, paddle.optimizer.AdamW)


class SteppedGradients:
    """Stands in for a clip object while an optimizer steps: clips, where there is a clip, and converts gradients.

    Every rank must call it where there is a clip, also one that has no gradients.
    """

    def __init__(self, optimizer: Any, clip: ShardedClip | None) -> None:
        self._optimizer = optimizer
        self._clip = clip

    def __call__(self, pairs: Pairs) -> Pairs:
        """Return the (parameter, gradient) pairs as the update takes them."""
        clipped = pairs if self._clip is None else self._clip(pairs)
        with paddle.no_grad():
            return [(p, g if g.dtype == p.dtype or self._takes_float32(p) else g.astype(p.dtype)) for p, g in clipped]

    def _takes_float32(self, parameter: Any) -> bool:
        # Where the gradient has another dtype than the parameter, Paddle forgets a single parameter's regularizer.
        regularized = self._optimizer.regularization is not None or parameter.regularizer is not None
        return isinstance(self._optimizer, _TAKE_FLOAT32) and bool(self._optimizer._multi_precision) and not regularized
