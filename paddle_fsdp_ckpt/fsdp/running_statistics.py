"""Running statistics, such as BatchNorm's, which each rank takes of its own part of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from .communication import Communicator


def average_statistics(communicator: Communicator, statistics: Sequence[paddle.Tensor]) -> None:
    """Give all ranks the mean of their running statistics, so that each step leaves, and a checkpoint holds, one model."""
    if communicator.overall_world_size == 1 or not statistics:
        return
    with paddle.no_grad():
        dtype = "float64" if any(tensor.dtype == paddle.float64 for tensor in statistics) else "float32"
        mine = paddle.concat([tensor.detach().reshape([-1]).astype(dtype) for tensor in statistics])
        first = mine.clone()
        communicator.broadcast(first)
        # From differences: where the ranks agree already, nothing is rounded.
        mean = first + communicator.sum(mine - first) / communicator.overall_world_size
        parts = mean.split([int(tensor.size) for tensor in statistics])
        for tensor, part in zip(statistics, parts, strict=True):
            paddle.assign(part.reshape(tensor.shape).astype(tensor.dtype), tensor)
