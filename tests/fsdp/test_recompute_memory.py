"""What a backward holds where blocks are run again, and where they return losses of their own besides."""

from __future__ import annotations

import gc
from collections.abc import Callable

import paddle
import pytest
from harness import RankPool
from paddle import nn
from paddle.base import core
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F

from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.training import fully_shard

WIDTH = 96
KINDS = {"reentrant": True, "not reentrant": False, "no recompute": None}


class Block(nn.Layer):
    """A block that returns a loss of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        x = x + self.down(F.tanh(self.up(x)))
        return x, x.square().mean()


class Blocks(nn.Layer):
    """A loss that counts the blocks' own ones, or doesn't."""

    def __init__(self, depth: int, kind: str, side: bool) -> None:
        super().__init__()
        self.blocks = nn.LayerList([Block() for _ in range(depth)])
        self.reentrant, self.side = KINDS[kind], side

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        total = paddle.zeros([])
        for block in self.blocks:
            x, own = block(x) if self.reentrant is None else recompute(block, x, use_reentrant=self.reentrant)
            total = total + own
        return x.square().mean() + (0.1 * total if self.side else 0)


def whole_units(kind: str, side: bool, depth: int) -> float:
    """Return what a backward takes at most beside this rank's gradients, in units' bytes; the second of two steps."""
    model = Blocks(depth, kind, side)
    fully_shard(model, optimizer=None)
    runtime = runtime_of(model)
    assert runtime is not None
    (unit,) = {buffer.layout.nbytes for buffer in runtime.buffers}
    x = paddle.ones([2, WIDTH])
    x.stop_gradient = False
    for _ in range(2):
        gc.collect()
        before = core.host_memory_stat_current_value("Allocated", 0)
        loss = model(x)
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        loss.backward()
        peak = core.host_memory_stat_peak_value("Allocated", 0) - before
        own = runtime.memory_bytes()[0] - sum(buffer.shard.shape[0] * 4 for buffer in runtime.buffers)
        runtime.begin_step()
        for parameter in model.parameters():
            parameter.clear_gradient(False)
        del loss
    assert own > 0
    return float((peak - own) / unit)


@pytest.mark.parametrize(("kind", "side"), [(kind, side) for kind in KINDS for side in (False, True)])
def test_weights_of_a_backward(ranks: Callable[[int], RankPool], kind: str, side: bool) -> None:
    for depth in (6, 12):
        for held in ranks(2).run(whole_units, kind, side, depth):
            # The unit as gathered and its gradient, each with a copy on its way; where blocks have losses of their own, backwards of
            # several blocks go on side by side, and one's gradient waits while another one's is reduced.
            assert held < (4 if side and kind != "reentrant" else 3)
