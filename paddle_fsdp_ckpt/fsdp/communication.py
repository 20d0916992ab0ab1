"""The collectives that our runtime needs, over the ranks that train a model, on gloo (CPU) and devices' backends, such as NCCL, alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist

from ..errors import CheckpointError, RankFailedError, ShardingError

_BROADCAST_AS_THEY_ARE = (paddle.float64, paddle.float32, paddle.float16, paddle.bfloat16, paddle.int64, paddle.int32, paddle.uint8)


class StartedCollective:
    """A collective that may run while the caller computes.

    Paddle 3.3.1's gloo has run all of it before it returns the task, whatever ``sync_op`` says.
    """

    def __init__(self, task: Any, result: Callable[[], paddle.Tensor], used: paddle.Tensor) -> None:
        self._task = task
        self._result = result
        self._used = used  # must live until the collective is over

    def finish(self) -> paddle.Tensor:
        """Wait for it, and return what it gives."""
        if self._task is not None:
            self._task.wait()
        return self._result()


class AllToAllRoom(NamedTuple):
    """Memory for :meth:`Communicator.all_to_all`.

    Attributes:
        incoming: for what this rank gets; 1-D.
        heard: for all that one other rank sends; None where the backend sends each rank its own alone.
    """

    incoming: paddle.Tensor
    heard: paddle.Tensor | None


class Communicator:
    """Collectives over the ranks that train one model; without a group, a world of one rank.

    The model is cut over the ranks of ``group``. With a ``replicate_group`` (hybrid sharding, HSDP) as many such groups, its *replicas*,
    train it together: the ranks of a replicate group keep the same shards, one of them in each replica.

    Attributes:
        rank: this process's place in the group over which the model is cut.
        world_size: how many ranks that group has.
        group: Paddle's group, or None for one rank without a process group.
        replica: which replica this process is in.
        replica_count: how many there are.
        replicas: of each replica the places of its ranks in :attr:`ranks`, by shard.
        ranks: of all replicas in ascending order, as the job counts them.
        overall_rank: this process's place among them.

    Raises:
        ShardingError: this process is not in one of the groups, or, on all ranks, the groups don't fit together.
    """

    def __init__(self, group: dist.communication.group.Group | None, replicate_group: dist.communication.group.Group | None = None) -> None:
        for one, purpose in ((group, "shard over"), (replicate_group, "replicate over")):
            if one is not None and dist.get_rank() not in one.ranks:
                raise ShardingError(f"this process is not in the group of ranks {list(one.ranks)} that it was told to {purpose}")
        self.group = group
        # Paddle gives the one member of a group of one the rank -1.
        self.rank: int = 0 if group is None else max(0, group.rank)
        self.world_size: int = 1 if group is None else group.nranks
        self.replica: int = 0 if replicate_group is None else max(0, replicate_group.rank)
        self.replica_count: int = 1 if replicate_group is None else replicate_group.nranks
        self._replicate_group = replicate_group
        self._groups = [one for one in (group, replicate_group) if one is not None and one.nranks > 1]
        self._is_gloo = self.world_size > 1 and dist.get_backend(group).upper() == "GLOO"
        rows = self._find_replicas([dist.get_rank()] if group is None else list(group.ranks))
        self.ranks: tuple[int, ...] = tuple(sorted(rank for row in rows for rank in row))
        self.replicas = [[self.ranks.index(rank) for rank in row] for row in rows]
        self.overall_rank: int = self.ranks.index(rows[self.replica][self.rank])

    def _find_replicas(self, mine: list[int]) -> list[list[int]]:
        """Return the job's ranks in each replica, by shard."""
        if self.replica_count == 1:
            return [mine]
        assert self._replicate_group is not None
        # The longest first, as gloo aborts the process where ranks send differently much.
        length = paddle.to_tensor([len(mine)], dtype="int32")
        dist.all_reduce(length, op=dist.ReduceOp.MAX, group=self._replicate_group)
        rows: list[paddle.Tensor] = []
        padded = [*mine, *(-1 for _ in range(int(length[0].item()) - len(mine)))]
        dist.all_gather(rows, paddle.to_tensor(padded, dtype="int64"), group=self._replicate_group)
        found = [[int(rank) for rank in row.tolist() if rank >= 0] for row in rows]
        fits = {len(row) for row in found} == {len(mine)} and len({rank for row in found for rank in row}) == len(mine) * len(found)
        fits = fits and [row[self.rank] for row in found] == list(self._replicate_group.ranks)
        if self.max_of_integers(np.array([not fits], dtype=np.int32))[0]:
            raise ShardingError(
                f"group and replicate_group don't fit together, here ranks {mine} and {list(self._replicate_group.ranks)}: the sharding "
                "groups must be equally large and share no rank, and a replicate group have one rank of each, at the same place in it"
            )
        return found

    @property
    def alone(self) -> bool:
        """Whether the model is not cut, as each replica has one rank."""
        return self.world_size == 1

    @property
    def overall_world_size(self) -> int:
        """How many ranks train the model, in all replicas together."""
        return len(self.ranks)

    def all_gather(self, shard: paddle.Tensor) -> paddle.Tensor:
        """Return a fresh 1-D tensor with every rank's ``shard`` (1-D, equally long everywhere) end to end."""
        return self.start_all_gather(shard, sync_op=True).finish()

    def start_all_gather(self, shard: paddle.Tensor, *, sync_op: bool = False) -> StartedCollective:
        """Begin what :meth:`all_gather` does; until it is finished, ``shard`` must not change."""
        if self.alone:  # also without a process group
            return StartedCollective(None, shard.clone, shard)
        whole = paddle.empty([shard.shape[0] * self.world_size], dtype=shard.dtype)
        task = dist.stream.all_gather(whole, shard, group=self.group, sync_op=sync_op)
        return StartedCollective(None if sync_op else task, lambda: whole, shard)

    def reduce_scatter(self, whole: paddle.Tensor) -> paddle.Tensor:
        """Sum ``whole`` (1-D) over all ranks and return this rank's share of it, equal on its replicas. ``whole`` may be overwritten.

        16-bit floats are summed in float32: in their own precision the sum depends on the number of ranks, and gloo gets float16 wrong
        (Paddle 3.3.1 on CPU: 1 + 2 = inf).
        """
        return self.start_reduce_scatter(whole, sync_op=True).finish()

    def start_reduce_scatter(self, whole: paddle.Tensor, *, sync_op: bool = False) -> StartedCollective:
        """Begin what :meth:`reduce_scatter` does, which now owns ``whole``; to finish it is a collective operation too."""
        dtype = whole.dtype
        if dtype in (paddle.float16, paddle.bfloat16) and self.overall_world_size > 1:
            whole = whole.astype("float32")
        shard_numel = whole.shape[0] // self.world_size
        mine: paddle.Tensor | None = None
        task = None
        if not self.alone and not self._is_gloo:
            mine = paddle.empty([shard_numel], dtype=whole.dtype)
            task = dist.stream.reduce_scatter(mine, whole, group=self.group, sync_op=sync_op)
        elif not self.alone:
            # gloo has no reduce_scatter.
            task = dist.stream.all_reduce(whole, group=self.group, sync_op=sync_op)

        def result() -> paddle.Tensor:
            shard = whole if self.alone else mine
            if shard is None:
                shard = whole[self.rank * shard_numel : (self.rank + 1) * shard_numel].clone()
            if self.replica_count > 1:
                dist.all_reduce(shard, group=self._replicate_group)
            return shard if shard.dtype == dtype else shard.astype(dtype)

        return StartedCollective(None if sync_op else task, result, whole)

    def room_for(self, numels: np.ndarray[Any, Any], dtype: str) -> AllToAllRoom:
        """Return the memory that :meth:`all_to_all` needs: a rank that has none must say so before others wait for it there.

        Args:
            numels: as for :meth:`all_to_all`.
            dtype: of what is sent.
        """
        others = [int(row.sum()) for source, row in enumerate(numels) if source != self.rank] if self._is_gloo else []
        heard = paddle.empty([max(others)], dtype=dtype) if others else None
        return AllToAllRoom(paddle.empty([int(numels[:, self.rank].sum())], dtype=dtype), heard)

    def all_to_all(self, outgoing: paddle.Tensor, numels: np.ndarray[Any, Any], room: AllToAllRoom) -> paddle.Tensor:
        """Send each rank of this replica a part of a tensor, and return a fresh 1-D one with what each sent to this rank, end to end.

        Each rank must send itself something: Paddle's tensors without elements have no memory, and backends look at it.

        Args:
            outgoing: 1-D, the parts for the ranks in their order.
            numels: how many elements each rank (row) sends to each (column); int64, the same on all ranks.
            room: what :meth:`room_for` returned for these.
        """
        if self.alone:
            paddle.assign(outgoing, room.incoming)
        elif not self._is_gloo:
            dist.alltoall_single(room.incoming, outgoing, numels[:, self.rank].tolist(), numels[self.rank].tolist(), group=self.group)
        else:
            self._broadcast_all(outgoing, numels, room)
        return room.incoming

    def _broadcast_all(self, outgoing: paddle.Tensor, numels: np.ndarray[Any, Any], room: AllToAllRoom) -> None:
        """Do what :meth:`all_to_all` does where the backend, gloo, has none: everybody hears all, and keeps what is for it.

        Sends and receives between pairs won't do: each takes the next number in its process's count of all operations of the group, so that
        after an exchange in which ranks took part differently often, nobody finds anybody (measured in Paddle 3.3.1: time-outs).
        """
        assert self.group is not None
        assert room.heard is not None
        done = 0
        for source, row in enumerate(numels):
            whole = outgoing if source == self.rank else room.heard._slice(0, int(row.sum()))
            dist.broadcast(whole, src=self.group.ranks[source], group=self.group)
            start, numel = int(row[: self.rank].sum()), int(row[self.rank])
            paddle.assign(whole._slice(start, start + numel), room.incoming._slice(done, done + numel))
            done += numel

    def broadcast(self, tensor: paddle.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor``, of any dtype, shape and strides, by that of the rank at place ``source`` among all."""
        if not self._groups or tensor.size == 0:
            return
        if tensor.dtype in _BROADCAST_AS_THEY_ARE and tensor.is_contiguous():
            self._broadcast(tensor, source)
            return
        # gloo aborts the process on int16, and takes no strided tensors.
        with paddle.no_grad():
            copy = tensor.detach().reshape([-1]).clone()
            self._broadcast(copy.view("uint8"), source)
            paddle.assign(copy.reshape(tensor.shape), tensor)

    def _broadcast(self, tensor: paddle.Tensor, source: int) -> None:
        rank = self.ranks[source]
        replica = next(number for number, row in enumerate(self.replicas) if source in row)
        if replica == self.replica and not self.alone:
            dist.broadcast(tensor, src=rank, group=self.group)
        self._broadcast_to_replicas(tensor, replica)

    def _broadcast_to_replicas(self, tensor: paddle.Tensor, replica: int) -> None:
        if self._replicate_group is not None and self.replica_count > 1:
            dist.broadcast(tensor, src=self._replicate_group.ranks[replica], group=self._replicate_group)

    def sum(self, values: paddle.Tensor) -> paddle.Tensor:
        """Return the sum of ``values`` over all ranks; ``values`` may be overwritten."""
        for group in self._groups:
            dist.all_reduce(values, group=group)
        return values

    def sum_over_shards(self, values: paddle.Tensor) -> paddle.Tensor:
        """Return the sum of ``values`` over the ranks of one replica, the same bits in all; ``values`` may be overwritten.

        For what each replica has once, such as the norms of its pieces of the reduced gradients.
        """
        if not self.alone:
            dist.all_reduce(values, group=self.group)
        # Each replica may sum in an order of its own, and replicas must never part.
        self._broadcast_to_replicas(values, 0)
        return values

    def max_of_integers(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the elementwise maximum of an int32 array over all ranks."""
        if not self._groups:
            return values
        tensor = paddle.to_tensor(values.astype(np.int32))
        for group in self._groups:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        return np.asarray(tensor.numpy())

    def gather_texts(self, text: str) -> list[str]:
        """Return the text that each rank of this replica gave, in the order of the ranks."""
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
        failed = int(self.max_of_integers(np.array([-1 if error is None else self.overall_rank], dtype=np.int32))[0])
        if error is not None:
            raise error
        if failed >= 0:
            raise RankFailedError(f"rank {self.ranks[failed]} refused; its own error says why. Nothing was changed on this rank")

    def check_same(self, what: str, text: str) -> None:
        """Raise on every rank where ``text`` differs between ranks.

        Raises:
            ShardingError: naming ``what``.
        """
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "little")
        seen = self.max_of_integers(np.array([digest, -digest], dtype=np.int32))
        if int(seen[0]) != -int(seen[1]):
            raise ShardingError(f"{what} differs between ranks; build the same model with the same settings on every rank")
