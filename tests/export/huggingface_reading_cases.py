"""What runs on ranks that read a Hugging Face model together."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import paddle
import paddle.distributed as dist
from harness import hybrid_groups, this_rank
from made_models import build
from paddle import nn
from paddle.distributed.fsdp import fully_shard as paddles_fully_shard

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.export import row_blocks
from paddle_fsdp_ckpt.fsdp import Communicator
from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu
from paddle_fsdp_ckpt.progress import ProgressLine

Arrays = Mapping[str, np.ndarray]


class Counts(NamedTuple):
    """What one rank did: bytes that it read, bytes of the model that it keeps, and the lengths of what it sent."""

    read: int
    kept: int
    sent: list[int]


def made(shapes: Arrays | Mapping[str, tuple[int, ...]], dtype: str = "float32") -> nn.Layer:
    sizes = {name: one.shape if isinstance(one, np.ndarray) else one for name, one in shapes.items()}
    return build({name: np.full(shape, -7, np.float32) for name, shape in sizes.items()}, dtype, {})


@contextmanager
def small_rounds(block_nbytes: int, round_nbytes: int) -> Iterator[list[int]]:
    """Let blocks and rounds be so small, and give the lengths of what this rank sends, one a round."""
    kept = row_blocks.ROW_BLOCK_NBYTES, row_blocks.ROUND_NBYTES, Communicator.all_to_all
    sent: list[int] = []

    def noting(self: Communicator, outgoing: Any, *others: Any) -> Any:
        sent.append(int(outgoing.shape[0]))
        return kept[2](self, outgoing, *others)

    row_blocks.ROW_BLOCK_NBYTES, row_blocks.ROUND_NBYTES, Communicator.all_to_all = block_nbytes, round_nbytes, noting
    try:
        yield sent
    finally:
        row_blocks.ROW_BLOCK_NBYTES, row_blocks.ROUND_NBYTES, Communicator.all_to_all = kept


@contextmanager
def reads(change: Callable[[int, int], int] = lambda number, nbytes: nbytes) -> Iterator[list[int]]:
    """Give the lengths of all reads, each as ``change`` makes it of its number and what it was."""
    kept = os.preadv
    lengths: list[int] = []

    def noting(*args: Any) -> int:
        lengths.append(change(len(lengths), kept(*args)))  # from several threads
        return lengths[-1]

    os.preadv = noting
    try:
        yield lengths
    finally:
        os.preadv = kept


def load_and_count(path: str, right: Arrays, kind: str, recipe: str) -> Counts:
    """Load into a model that is cut in one of several ways, in rounds of 2 KiB; each value must be right, and the bar at its end."""
    model = made(right)
    looks: list[Callable[[], tuple[int, int]]] = []
    noting = patch.object(ProgressLine, "follow", lambda line, look: looks.append(look))
    with paddle_runtime_on_cpu(), small_rounds(512, 2048) as sent, reads() as lengths, noting:
        if kind == "paddle's":
            mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
            dist.auto_parallel.set_mesh(mesh)
            paddles_fully_shard(model, mesh=mesh)
        elif kind != "plain":
            ckpt.fully_shard(model, optimizer=None, **(hybrid_groups(2) if kind == "replicas" else {}))
        ckpt.load_huggingface(path, model=model, recipe=recipe)
        weights = ckpt.sharded_state_dict(model)
    for name, weight in weights.items():
        values = right[name].reshape(-1)[weight.flattened_range if weight.is_flattened else slice(None)]
        np.testing.assert_array_equal(weight.local_tensor.numpy().reshape(-1), values, err_msg=name)
    kept = sum(4 * int(weight.local_tensor.size) for weight in weights.values())
    assert [look() for look in looks] == [(kept, kept)]
    return Counts(sum(lengths), kept, sent)


def load_each(models: Mapping[str, Arrays], kind: str, recipe: str) -> list[Counts]:
    return [load_and_count(path, right, kind, recipe) for path, right in models.items()]


def peak_memory(path: str, shapes: Mapping[str, tuple[int, ...]], recipe: str) -> tuple[int, list[int]]:
    """Return how many bytes a load held at once outside of Paddle's tensors, and how many these had for each round."""
    model = made(shapes)
    ckpt.fully_shard(model, optimizer=None)
    with small_rounds(1 << 18, 1 << 20) as sent:
        tracemalloc.start()
        try:
            ckpt.load_huggingface(path, model=model, recipe=recipe)
            return tracemalloc.get_traced_memory()[1], sent
        finally:
            tracemalloc.stop()


def fail_on_one(path: str, shapes: Mapping[str, tuple[int, ...]], recipe: str, number: int) -> tuple[str, str]:
    """Return what a load raised where a file ends, for rank 1 only, at its read of this number."""
    model = made(shapes)
    ckpt.fully_shard(model, optimizer=None)
    ends = this_rank().rank == 1
    with small_rounds(512, 2048), reads(lambda count, nbytes: 0 if ends and count >= number else nbytes):
        return what_it_raises(path, model, recipe)


def without_memory(path: str, shapes: Mapping[str, tuple[int, ...]], recipe: str) -> list[str]:
    """Return what loads raised in which rank 1 got no memory for its first tensor, its second, and so on."""
    kept = paddle.empty
    raised = []
    for number in range(4):
        model = made(shapes)
        ckpt.fully_shard(model, optimizer=None)
        left = iter([True] * number)

        def empty(*args: Any, left: Iterator[bool] = left, **options: Any) -> paddle.Tensor:
            if this_rank().rank == 1 and not next(left, False):
                raise MemoryError("nothing left")
            return kept(*args, **options)

        paddle.empty = empty
        try:
            with small_rounds(512, 2048):
                raised.append(what_it_raises(path, model, recipe)[1])
        finally:
            paddle.empty = kept
    return raised


def overflow(path: str, shapes: Mapping[str, tuple[int, ...]], recipe: str) -> tuple[str, str]:
    """Return what a load into float16 raised."""
    model = made(shapes, "float16")
    ckpt.fully_shard(model, optimizer=None)
    with small_rounds(512, 2048):
        return what_it_raises(path, model, recipe, cast=True)


def load_tied(path: str) -> tuple[str, str]:
    """Return what a load raised into a model in which two names are one tensor."""
    model = build({"a": np.zeros((3, 2), np.float32)}, "float32", {"b": "a"})
    ckpt.fully_shard(model, optimizer=None)
    return what_it_raises(path, model, "none")


def what_it_raises(path: str, model: nn.Layer, recipe: str, **options: Any) -> tuple[str, str]:
    try:
        ckpt.load_huggingface(path, model=model, recipe=recipe, timeout_seconds=20, **options)
    except ckpt.CheckpointError as error:
        return type(error).__name__, str(error)
    return "nothing", ""
