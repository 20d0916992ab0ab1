"""The collectives, on gloo, against plain sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from harness import RankPool, this_rank

from paddle_fsdp_ckpt.fsdp import Communicator

Ranks = Callable[[int], RankPool]


def reduce_scatter(dtype: str) -> np.ndarray:
    communicator = Communicator(dist.get_group(0))
    whole = (paddle.arange(4 * communicator.world_size, dtype="float32") + communicator.rank).astype(dtype)
    part = communicator.reduce_scatter(whole)
    assert str(part.dtype).endswith(dtype)
    return part.astype("float32").numpy()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter(ranks: Ranks, world_size: int, dtype: str) -> None:
    parts = ranks(world_size).run(reduce_scatter, dtype)
    whole = world_size * np.arange(4 * world_size) + sum(range(world_size))
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def broadcast(dtype: str, kind: str) -> list[float]:
    communicator = Communicator(dist.get_group(0))
    tensor = (paddle.arange(6, dtype="float32").reshape([2, 3]) * (this_rank().rank + 1)).astype(dtype)
    if kind == "strided":
        tensor = tensor.transpose([1, 0])
        assert not tensor.is_contiguous()
    elif kind == "empty":
        tensor = tensor[:0]
    communicator.broadcast(tensor)
    return tensor.astype("float32").numpy().reshape(-1).tolist()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"])
@pytest.mark.parametrize(("kind", "right"), [("plain", [0, 1, 2, 3, 4, 5]), ("strided", [0, 3, 1, 4, 2, 5]), ("empty", [])])
def test_broadcast(ranks: Ranks, dtype: str, kind: str, right: list[float]) -> None:
    right = [min(value, 1) for value in right] if dtype == "bool" else right
    assert ranks(2).run(broadcast, dtype, kind) == [right, right]


def all_to_all() -> list[int]:
    communicator = Communicator(dist.get_group(0) if this_rank().world_size > 1 else None)
    rank, world_size = communicator.rank, communicator.world_size
    numels = np.array([[1 if i == j else (i + 2 * j) % 3 for j in range(world_size)] for i in range(world_size)])
    outgoing = np.concatenate([np.full(numels[rank, j], 10 * rank + j) for j in range(world_size)])
    room = communicator.room_for(numels, "uint8")
    return communicator.all_to_all(paddle.to_tensor(outgoing.astype(np.uint8)), numels, room).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_to_all(ranks: Ranks, world_size: int) -> None:
    right = [[10 * i + j for i in range(world_size) for _ in range(1 if i == j else (i + 2 * j) % 3)] for j in range(world_size)]
    assert ranks(world_size).run(all_to_all) == right
