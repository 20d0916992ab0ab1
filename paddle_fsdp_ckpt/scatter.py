"""Whole tensors into a sharded model, one flat buffer at a time: the reverse of ``gather``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import paddle
from paddle import nn

from .errors import CheckpointError, MismatchError, RankFailedError, ShardingError, listing
from .fsdp import Communicator, dtype_name, named_buffers
from .layout import Slot
from .shardings import FlatShard, sharding_of
from .subjects import check_tensors

WholeTensors: TypeAlias = "Mapping[str, paddle.Tensor | np.ndarray[Any, Any]] | Iterable[tuple[str, paddle.Tensor | np.ndarray[Any, Any]]]"
"""Whole tensors by structured name, or pairs of both in any order."""

_END, _FAILED = -1, -2


def load_full_state_dict(model: nn.Layer, tensors: WholeTensors | None, *, from_rank: int = 0) -> None:
    """Give a sharded model the whole tensors that one rank has. All ranks must call it.

    Strict: a tensor for each parameter and persistable buffer, of its shape and dtype, and no others; a tied parameter under any or all
    of its names, with equal values. Nothing changes unless all is right. Besides the tensors themselves, the rank that has them holds the
    flat buffers that are not complete yet (one, in the order of ``iter_full_parameters``), the others one, and each a second copy of
    its shards. Master weights of bound optimizers follow.

    Args:
        model: sharded by ``fully_shard``, ours or Paddle's own.
        tensors: on rank ``from_rank`` of those that train the model, counted from 0; not looked at on the others.
        from_rank: the rank that has the tensors.

    Raises:
        ShardingError: the model is plain, which ``model.set_state_dict`` is for; or ``from_rank`` differs between ranks; or as
            :func:`~.state_dict.sharded_state_dict`.
        MismatchError: on rank ``from_rank``, the tensors don't fit; it lists what doesn't.
        RankFailedError: on the others then.
        CheckpointError: there is no rank ``from_rank``.
    """
    check_tensors(model)
    sharding = sharding_of(model)
    if sharding.is_plain:
        raise ShardingError("load_full_state_dict: the model is not sharded; use model.set_state_dict")
    communicator = sharding.communicator
    communicator.check_same("from_rank of load_full_state_dict", str(from_rank))
    if not 0 <= from_rank < communicator.overall_world_size:
        raise CheckpointError(
            f"from_rank is {from_rank}, and the ranks that train the model are 0 to {communicator.overall_world_size - 1}"
        )
    buffers = dict(named_buffers(model))
    if communicator.overall_rank == from_rank:
        staged, values = _send(communicator, sharding.flat_shards(), buffers, {} if tensors is None else tensors)
    else:
        staged, values = _receive(communicator, sharding.flat_shards(), buffers, from_rank)
    with paddle.no_grad():
        for shard, new in zip(sharding.flat_shards(), staged, strict=True):
            paddle.assign(new, shard.tensor)
        for name, buffer in buffers.items():
            paddle.assign(values[name], buffer)
    sharding.values_written(model, [], [])


_Staged: TypeAlias = "tuple[list[paddle.Tensor], dict[str, paddle.Tensor]]"
"""New shards in the order of the flat buffers, and new values of the model's buffers."""


def _send(communicator: Communicator, shards: list[FlatShard], buffers: dict[str, paddle.Tensor], tensors: WholeTensors) -> _Staged:
    """Hand each flat buffer out as soon as it is complete."""
    staged: dict[int, paddle.Tensor] = {}
    incoming = _Incoming(shards, buffers)
    try:
        for number, whole in incoming.complete(tensors):
            _announce(communicator, number)
            communicator.broadcast(whole, communicator.overall_rank)
            staged[number] = _part(shards[number], whole, communicator)
        incoming.check_nothing_missing()
    except BaseException:
        _announce(communicator, _FAILED)
        raise
    _announce(communicator, _END)
    for name in buffers:
        communicator.broadcast(incoming.values[name], communicator.overall_rank)
    return [staged[number] for number in range(len(shards))], incoming.values


def _receive(communicator: Communicator, shards: list[FlatShard], buffers: dict[str, paddle.Tensor], from_rank: int) -> _Staged:
    staged: dict[int, paddle.Tensor] = {}
    while (number := _announce(communicator, None)) >= 0:
        whole = paddle.empty([shards[number].layout.numel], dtype=shards[number].layout.dtype)
        communicator.broadcast(whole, from_rank)
        staged[number] = _part(shards[number], whole, communicator)
    if number == _FAILED:
        raise RankFailedError(f"load_full_state_dict: rank {from_rank} of the group failed, its own error says why. Nothing was changed")
    values = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    for value in values.values():
        communicator.broadcast(value, from_rank)
    return [staged[number] for number in range(len(shards))], values


def _announce(communicator: Communicator, number: int | None) -> int:
    """Tell which flat buffer comes next, or hear it (None)."""
    # The largest over the ranks, of which all but one give the least.
    return int(communicator.max_of_integers(np.array([-3 if number is None else number], dtype=np.int32))[0])


def _part(shard: FlatShard, whole: paddle.Tensor, communicator: Communicator) -> paddle.Tensor:
    mine = shard.layout.shard(communicator.rank)
    return whole._slice(mine.start, mine.stop).clone()


class _Incoming:
    """Whole tensors as they come in, until flat buffers are complete.

    Attributes:
        values: new values of the model's buffers.
    """

    def __init__(self, shards: list[FlatShard], buffers: dict[str, paddle.Tensor]) -> None:
        self._shards = shards
        self._buffers = buffers
        self._places = {name: (number, slot) for number, shard in enumerate(shards) for slot in shard.layout.slots for name in slot.names}
        self._wholes: dict[int, paddle.Tensor] = {}
        self._absent = {number: {slot.offset for slot in shard.layout.slots} for number, shard in enumerate(shards)}
        self._seen: set[str] = set()
        self._tied: dict[str, np.ndarray[Any, Any]] = {}
        self._problems: list[str] = []
        self.values: dict[str, paddle.Tensor] = {}

    def complete(self, tensors: WholeTensors) -> Iterator[tuple[int, paddle.Tensor]]:
        """Yield (position, flat buffer) of each that is complete, until something is wrong."""
        for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
            number = self._take(name, value)
            if number is not None and not self._absent[number] and not self._problems:
                yield number, self._wholes.pop(number)

    def _take(self, name: str, value: paddle.Tensor | np.ndarray[Any, Any]) -> int | None:
        """Put a tensor in its place, and return the position of its flat buffer if it is new there."""
        tensor = value.detach() if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        wanted = self._places.get(name)
        if name in self._seen or (wanted is None and name not in self._buffers):
            self._problems.append(f"'{name}' is given twice" if name in self._seen else f"'{name}' is no tensor of the model")
            return None
        self._seen.add(name)
        if wanted is None:
            shape, dtype = tuple(self._buffers[name].shape), dtype_name(self._buffers[name])
        else:
            shape, dtype = wanted[1].shape, self._shards[wanted[0]].layout.dtype
        if tuple(tensor.shape) != shape or dtype_name(tensor) != dtype:
            self._problems.append(
                f"'{name}' is given as {dtype_name(tensor)} {list(tensor.shape)}, and the model wants {dtype} {list(shape)}"
            )
            return None
        if wanted is None:
            self.values[name] = tensor.clone()
            return None
        number, slot = wanted
        return number if self._put(name, tensor, number, slot) else None

    def _put(self, name: str, tensor: paddle.Tensor, number: int, slot: Slot) -> bool:
        if len(slot.names) > 1:
            value = np.asarray(tensor.numpy())
            first = self._tied.setdefault(slot.name, value)
            if first.tobytes() != value.tobytes():
                self._problems.append(f"'{name}' differs from what was given under another name of it: {' = '.join(slot.names)}")
        if slot.offset not in self._absent[number]:
            return False
        self._absent[number].discard(slot.offset)
        layout = self._shards[number].layout
        whole = self._wholes.get(number)
        if whole is None:
            whole = self._wholes[number] = paddle.zeros([layout.numel], dtype=layout.dtype)
        with paddle.no_grad():
            paddle.assign(tensor.reshape([-1]), whole._slice(slot.range.start, slot.range.stop))
        return True

    def check_nothing_missing(self) -> None:
        """Raise where something is missing or wrong.

        Raises:
            MismatchError: it lists what is.
        """
        missing = [
            slot.name
            for number, shard in enumerate(self._shards)
            for slot in shard.layout.slots
            if slot.offset in self._absent[number] and not any(name in self._seen for name in slot.names)
        ]
        missing += [name for name in self._buffers if name not in self._seen]
        problems = [*self._problems, *(f"'{name}' is missing" for name in missing)]
        if problems:
            raise MismatchError(f"load_full_state_dict: the tensors don't fit the model; nothing was changed: {listing(problems)}")
