"""A layer that several tests' models are made of. The harness itself does not import it, nor Paddle."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F


class Block(nn.Layer):
    """Six parameters, of which four are vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))
