"""The collectives that our runtime needs, over one group of ranks, on gloo (CPU) and the backends of devices, such as NCCL, alike."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ..errors import CheckpointError, RankFailedError, ShardingError

_BROADCAST_AS_THEY_ARE = (paddle.float64, paddle.float32, paddle.float16, paddle.bfloat16, paddle.int64, paddle.int32, paddle.uint8)


class Communicator:
    """Collectives over the ranks that share a model's flat buffers; without a group, a world of one rank.

    Attributes:
        rank: this process's place in the group.
        world_size: how many ranks the group has.
        group: Paddle's group, or None for one rank without a process group.

    Raises:
        ShardingError: this process is not in the group.
    """

    def __init__(self, group: dist.communication.group.Group | None) -> None:
        if group is not None and dist.get_rank() not in group.ranks:
            raise ShardingError(f"this process is not in the group of ranks {list(group.ranks)} that it was told to shard over")
        self.group = group
        # Paddle gives the one member of a group of one the rank -1.
        self.rank: int = 0 if group is None else max(0, group.rank)
        self.world_size: int = 1 if group is None else group.nranks
        self._has_reduce_scatter = self.world_size > 1 and dist.get_backend(group).upper() != "GLOO"

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.world_size == 1

    def all_gather(self, shard: paddle.Tensor) -> paddle.Tensor:
        """Return a fresh 1-D tensor with every rank's ``shard`` (1-D, equally long everywhere) end to end."""
        whole = paddle.empty([shard.shape[0] * self.world_size], dtype=shard.dtype)
        dist.stream.all_gather(whole, shard, group=self.group, sync_op=True)
        return whole

    def reduce_scatter(self, whole: paddle.Tensor) -> paddle.Tensor:
        """Sum ``whole`` (1-D) over the ranks and return this rank's equal share of it. ``whole`` may be overwritten.

        16-bit floats are summed in float32: in their own precision the sum depends on the number of ranks, and gloo gets float16 wrong
        (Paddle 3.3.1 on CPU: 1 + 2 = inf).
        """
        if self.alone:
            return whole
        dtype = whole.dtype
        if dtype in (paddle.float16, paddle.bfloat16):
            whole = whole.astype("float32")
        shard_numel = whole.shape[0] // self.world_size
        if self._has_reduce_scatter:
            shard = paddle.empty([shard_numel], dtype=whole.dtype)
            dist.stream.reduce_scatter(shard, whole, group=self.group, sync_op=True)
        else:
            # gloo has no reduce_scatter.
            dist.all_reduce(whole, group=self.group)
            shard = whole[self.rank * shard_numel : (self.rank + 1) * shard_numel].clone()
        return shard.astype(dtype)

    def broadcast(self, tensor: paddle.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor``, of any dtype, shape and strides, by that of the rank at place ``source`` in the group."""
        if self.alone or tensor.size == 0:
            return
        assert self.group is not None
        rank = self.group.ranks[source]
        if tensor.dtype in _BROADCAST_AS_THEY_ARE and tensor.is_contiguous():
            dist.broadcast(tensor, src=rank, group=self.group)
            return
        # gloo aborts the process on int16, and takes no strided tensors.
        with paddle.no_grad():
            copy = tensor.detach().reshape([-1]).clone()
            dist.broadcast(copy.view("uint8"), src=rank, group=self.group)
            paddle.assign(copy.reshape(tensor.shape), tensor)

    def sum(self, values: paddle.Tensor) -> paddle.Tensor:
        """Return the sum of ``values`` over the ranks; ``values`` may be overwritten."""
        if not self.alone:
            dist.all_reduce(values, group=self.group)
        return values

    def max_of_integers(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the elementwise maximum of an int32 array over the ranks."""
        if self.alone:
            return values
        tensor = paddle.to_tensor(values.astype(np.int32))
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return np.asarray(tensor.numpy())

    def gather_texts(self, text: str) -> list[str]:
        """Return the text that each rank gave, in the order of the ranks."""
        if self.alone:
            return [text]
        encoded = np.frombuffer(text.encode(), np.uint8)
        longest = int(self.max_of_integers(np.array([len(encoded)], dtype=np.int32))[0])
        # Padded with zeros, which no text holds; and never empty, since gloo sends nothing of no size.
        padded = np.zeros(longest + 1, np.uint8)
        padded[: len(encoded)] = encoded
        gathered = self.all_gather(paddle.to_tensor(padded)).numpy().reshape([self.world_size, longest + 1])
        return [row.tobytes().rstrip(b"\0").decode() for row in gathered]

    def raise_together(self, error: CheckpointError | None) -> None:
        """Raise on every rank where one has an error: its own there, and on the others one that names it. A collective operation.

        Raises:
            RankFailedError: another rank has an error.
        """
        failed = int(self.max_of_integers(np.array([-1 if error is None else self.rank], dtype=np.int32))[0])
        if error is not None:
            raise error
        if failed >= 0:
            assert self.group is not None
            raise RankFailedError(f"rank {self.group.ranks[failed]} refused; its own error says why. Nothing was changed on this rank")

    def check_same(self, what: str, text: str) -> None:
        """Raise on every rank where ``text`` differs between ranks.

        Raises:
            ShardingError: naming ``what``.
        """
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "little")
        seen = self.max_of_integers(np.array([digest, -digest], dtype=np.int32))
        if int(seen[0]) != -int(seen[1]):
            raise ShardingError(f"{what} differs between ranks; build the same model with the same settings on every rank")


def default_group() -> dist.communication.group.Group | None:
    """Return fleet's sharding group where fleet shards, else the group of all ranks; None without a process group.

    Raises:
        ShardingError: fleet was set up with another kind of parallelism, see :func:`check_fleet`; or the process is one of several that
            ``paddle.distributed.launch`` started, and doesn't know of the others.
    """
    check_fleet()
    if not dist.is_initialized():
        started = os.environ.get("PADDLE_TRAINERS_NUM", "1")
        if started not in ("", "0", "1"):
            raise ShardingError(
                f"this is one of {started} processes (PADDLE_TRAINERS_NUM), and has no process group, so each would train and save a model "
                "of its own; call paddle.distributed.init_parallel_env() first"
            )
        return None
    hybrid = _fleet_topology()
    if hybrid is not None and hybrid.get_sharding_parallel_world_size() > 1:
        return hybrid.get_sharding_parallel_group()
    return dist.get_group(0)


def check_fleet() -> None:
    """Raise where fleet was set up with another kind of parallelism than sharding.

    Raises:
        ShardingError: ranks outside the sharding group would hold other parameters, or other copies, under the same names.
    """
    hybrid = _fleet_topology()
    if hybrid is None:
        return
    degrees = {
        "dp_degree": hybrid.get_data_parallel_world_size(),
        "mp_degree": hybrid.get_model_parallel_world_size(),
        "pp_degree": hybrid.get_pipe_parallel_world_size(),
        "sep_degree": hybrid.get_sep_parallel_world_size(),
    }
    for name, degree in degrees.items():
        if degree > 1:
            raise ShardingError(
                f"fleet was set up with {name}={degree}, which is not supported together with fully_shard yet; "
                "give all ranks to sharding_degree"
            )


def _fleet_topology() -> Any:
    from paddle.distributed import fleet

    return getattr(fleet.fleet, "_hcg", None)
