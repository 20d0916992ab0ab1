"""Whole tensors out of a sharded model and its optimizer, one flat buffer at a time.

For those who need complete named tensors: a rollout engine, an export, a test. What comes out is never a shard: a tensor has the
shape that it has in the plain model, and belongs to the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from .errors import FEW, CheckpointError, RankFailedError, ShardingError, listing
from .fsdp import Communicator, dtype_name, named_buffers, named_parameters, runtime_of
from .host_memory import chunks_of
from .layout import Slot
from .shardings import FlatShard, Sharding, sharding_of
from .storage.casts import may_overflow
from .storage.digests import digest_of_parts
from .storage.plan import FLOATING_DTYPES
from .subjects import check_tensors
from .warn import warn_caller

Selection: TypeAlias = str | Iterable[str] | Callable[[str], bool]
"""Which names: a shell-style pattern or several (``*``, ``?``, ``[...]``; ``*`` crosses dots), or a function that tells of a name."""

_GOES_ON, _HAS_LEFT, _HAS_CHANGED, _HAS_TOO_LARGE = 0, 1, 2, 3
"""What ranks tell each other before each flat buffer."""

_CHANGED = (
    "the weights changed while iter_full_parameters ran (a step, a load, set_value), so those to come are newer than those that came; "
    "run it to the end before the next step"
)


def iter_full_parameters(
    model: nn.Layer,
    *,
    include: Selection | None = None,
    exclude: Selection | None = None,
    trainable_only: bool = False,
    dtype: Any = None,
    device: Any = None,
    to_rank: int | None = None,
) -> Iterator[tuple[str, paddle.Tensor]]:
    """Yield (structured name, whole tensor) of each parameter, in the same order on every rank.

    All ranks must call it, and run it to the end. Each flat buffer is gathered once, and only where something of it is wanted; no
    more than one is whole at a time, beside the tensor that is being handed out. A parameter with several names comes
    out under each, as the same tensor. The tensors are copies of what the weights were when the iteration began; they stay as they are.
    Where our ``fully_shard`` did not cut the model, each rank reads its part of the weights once more to see whether they changed
    meanwhile. A rank that is slow with the tensors of one buffer keeps the others waiting, on gloo no longer than 30 seconds.

    Args:
        model: sharded by ``fully_shard``, ours or Paddle's own; or plain, without any communication then.
        include: names to yield; by default all. A pattern that no name has is warned of.
        exclude: names not to yield, though included.
        trainable_only: leave out parameters with ``stop_gradient``.
        dtype: a floating point dtype of Paddle, or its name, to convert to; by default each keeps its own. A finite value that would
            become infinite is an error.
        device: where the tensors go, e.g. ``"cpu"``; by default they stay.
        to_rank: the only one of the ranks that train the model, counted from 0, that is given tensors; the iterators of the others are
            empty, and must be run all the same. By default every rank is given all.

    Raises:
        ShardingError: as :func:`~.state_dict.sharded_state_dict`; or the ranks ask for different things.
        CheckpointError: there is no rank ``to_rank``, no such dtype or device; or, while iterating, a value is too large for ``dtype``.
        RankFailedError: while iterating, another rank left its iterator before the end.
        ShardingError: while iterating, a step, a load or the like changed weights on any rank, so that those to come are not of the same
            moment as those that came.
    """
    check_tensors(model)
    sharding = sharding_of(model)
    is_wanted = _choice(include, exclude, lambda: _parameter_names(model, sharding))
    dtype = None if dtype is None else _name_of(dtype)
    if sharding.is_plain:
        if not receives(sharding, to_rank):
            return iter(())
        error = receiving_error(device, dtype)
        if error is not None:
            raise error
        return _iterate_plain(model, is_wanted, trainable_only, dtype, device)
    wanted = _wanted_slots(sharding, is_wanted, trainable_only)
    asked = repr(([[slot.names for slot in slots] for _, slots in wanted], dtype, to_rank))
    sharding.communicator.check_same("what is asked of iter_full_parameters", asked)
    is_receiver = receives(sharding, to_rank)  # after that, so that an error of one rank is one of all
    sharding.communicator.raise_together(sharding.lost_weights() or receiving_error(device if is_receiver else None, dtype))
    return _iterate(_Gathering(sharding.communicator, wanted, dtype), is_wanted, dtype, device, is_receiver)


def parameter_versions(model: nn.Layer) -> dict[str, int]:
    """Return a number for each name of each parameter, which grows when the parameter may have changed. All ranks must call it.

    For handing on only what is new: a step, ``load``, ``set_value`` and the like change the numbers of the parameters that they write
    to, alike on all ranks. Not noticed is what somebody else, such as stock ``paddle.distributed.load_state_dict``, writes into the views
    of ``sharded_state_dict``.

    Args:
        model: sharded by our ``fully_shard``.

    Raises:
        ShardingError: it is not.
    """
    runtime = runtime_of(model)
    if runtime is None:
        raise ShardingError("parameter_versions: only a model that paddle_fsdp_ckpt.fully_shard sharded counts its changes")
    # A rank that keeps nothing of a parameter doesn't count its steps, so that the sum grows where the largest might not.
    counts = runtime.communicator.sum(paddle.to_tensor([shard.changes for shard in runtime.shards], dtype="int64")).tolist()
    return {name: count for shard, count in zip(runtime.shards, counts, strict=True) for name in shard.slot.names}


def full_state_dict(
    model: nn.Layer,
    *,
    include: Selection | None = None,
    exclude: Selection | None = None,
    trainable_only: bool = False,
    dtype: Any = None,
    device: Any = "cpu",
    to_rank: int | None = 0,
) -> dict[str, paddle.Tensor]:
    """Return whole parameters and persistable buffers by structured name: all of the plain model's state dict. All ranks must call it.

    Args:
        model: as for :func:`iter_full_parameters`.
        include: as there.
        exclude: as there.
        trainable_only: as there; buffers are left out too.
        dtype: as there, for parameters; buffers keep theirs.
        device: as there.
        to_rank: as there; the others return an empty dict. None: every rank returns all.

    Raises:
        ShardingError: as :func:`iter_full_parameters`.
        CheckpointError: the same.
    """
    buffers = [] if trainable_only else [name for name, _ in named_buffers(model)]
    is_wanted = _choice(include, exclude, lambda: [*_parameter_names(model, sharding_of(model)), *buffers])
    found = dict(iter_full_parameters(model, include=is_wanted, trainable_only=trainable_only, dtype=dtype, device=device, to_rank=to_rank))
    if not trainable_only and receives(sharding_of(model), to_rank):
        for name, buffer in named_buffers(model):
            if is_wanted(name):
                found[name] = owned(buffer.detach(), tuple(buffer.shape), None, device)
    return found


def receives(sharding: Sharding, to_rank: int | None) -> bool:
    """Tell whether this rank is given tensors.

    Raises:
        CheckpointError: there is no such rank.
    """
    rank, world_size = sharding.communicator.overall_rank, sharding.communicator.overall_world_size
    if sharding.is_plain and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    is_number = isinstance(to_rank, (int, np.integer)) and type(to_rank) is not bool
    if to_rank is not None and not (is_number and 0 <= to_rank < world_size):
        raise CheckpointError(f"to_rank is {to_rank!r:.100}, and the ranks that train the model are 0 to {world_size - 1}")
    return to_rank in (None, rank)


def receiving_error(device: Any, dtype: str | None = None) -> CheckpointError | None:
    """Say why a rank can't put tensors on a device, or convert them to a dtype; None where all is well."""
    if dtype is not None and dtype not in FLOATING_DTYPES:  # as whole numbers, weights would lose all that makes them so
        return CheckpointError(f"dtype is '{dtype:.100}', and one of {', '.join(sorted(FLOATING_DTYPES))} is needed")
    try:
        if device is not None:
            paddle.zeros([1]).to(device)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        return CheckpointError(f"tensors can't go to device {device!r}: {error}")
    return None


def _name_of(dtype: Any) -> str:
    """Return Paddle's name of a dtype, which may be given as Paddle's or numpy's own."""
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("paddle.")


def _is_too_large(tensor: paddle.Tensor, dtype: str | None) -> bool:
    """Tell whether finite values would become infinite in a dtype."""
    if dtype is None or not may_overflow(dtype_name(tensor), dtype):
        return False
    with paddle.no_grad():
        return bool(paddle.logical_and(tensor.astype(dtype).isinf(), tensor.isfinite()).any().item())


def _say_too_large(names: Sequence[str], dtype: str | None) -> CheckpointError:
    of = listing(names) if names else "parameters, of which other ranks keep them,"
    return CheckpointError(f"values of {of} are too large for {dtype}, and would become infinite; ask for another dtype")


def _choice(include: Selection | None, exclude: Selection | None, names: Callable[[], list[str]]) -> Callable[[str], bool]:
    """Return what tells whether a name is wanted; warn of patterns that are of none of the names that there are."""
    patterns: dict[str, tuple[str, ...]] = {}
    included = _matcher("include", "*" if include is None else include, patterns)
    excluded = _matcher("exclude", () if exclude is None else exclude, patterns)
    if any(one != "*" for some in patterns.values() for one in some):
        _warn_of_unused(patterns, names())
    return lambda name: included(name) and not excluded(name)


def _matcher(option: str, selection: Selection, patterns: dict[str, tuple[str, ...]]) -> Callable[[str], bool]:
    """Return what tells whether a name is selected; add the option's patterns, if it has any."""
    if callable(selection):
        return lambda name: bool(selection(name))
    own = patterns[option] = (selection,) if isinstance(selection, str) else tuple(selection)
    return lambda name: any(fnmatchcase(name, pattern) for pattern in own)


def _warn_of_unused(patterns: dict[str, tuple[str, ...]], names: list[str]) -> None:
    for option, some in patterns.items():
        unused = [repr(one) for one in some if not any(fnmatchcase(name, one) for name in names)]
        if unused:
            warn_caller(f"{option}: nothing is called as {listing(unused)}; the names are {listing(names, FEW)}")


def _parameter_names(model: nn.Layer, sharding: Sharding) -> list[str]:
    if sharding.is_plain:
        return [name for named in named_parameters(model) for name in named.names]
    return [name for shard in sharding.flat_shards() for slot in shard.layout.slots for name in slot.names]


def _iterate_plain(
    model: nn.Layer, is_wanted: Callable[[str], bool], trainable_only: bool, dtype: str | None, device: Any
) -> Iterator[tuple[str, paddle.Tensor]]:
    wanted = [
        (named.parameter, names)
        for named in named_parameters(model)
        if not (trainable_only and named.parameter.stop_gradient) and (names := [name for name in sorted(named.names) if is_wanted(name)])
    ]
    before = [_digest(parameter) for parameter, _ in wanted]
    for (parameter, names), digest in zip(wanted, before, strict=True):
        if _digest(parameter) != digest:
            raise ShardingError(_CHANGED)
        if _is_too_large(parameter.detach(), dtype):
            raise _say_too_large(names, dtype)
        tensor = owned(parameter.detach(), tuple(parameter.shape), dtype, device)
        yield from ((name, tensor) for name in names)
        del tensor


def _wanted_slots(sharding: Sharding, is_wanted: Callable[[str], bool], trainable_only: bool) -> list[tuple[FlatShard, list[Slot]]]:
    """Return the slots to yield of each flat buffer that has any."""
    wanted = []
    for shard in sharding.flat_shards():
        slots = [
            slot
            for slot, trainable in zip(shard.layout.slots, shard.trainable, strict=True)
            if (trainable or not trainable_only) and any(is_wanted(name) for name in slot.names)
        ]
        if slots:
            wanted.append((shard, slots))
    return wanted


def _iterate(
    gathering: _Gathering,
    is_wanted: Callable[[str], bool],
    dtype: str | None,
    device: Any,
    is_receiver: bool,
) -> Iterator[tuple[str, paddle.Tensor]]:
    with closing(gathering):
        for _, slots in gathering.wanted:
            whole = gathering.gather_next()
            for slot in slots if is_receiver else ():
                gathering.check_live_buffer()
                tensor = owned(whole._slice(slot.range.start, slot.range.stop), slot.shape, dtype, device)
                for name in slot.names:
                    if is_wanted(name):
                        yield name, tensor
                del tensor
            del whole  # before the next one is gathered


class _Gathering:
    """The flat buffers of one iteration, gathered one after another.

    Where a rank closes or drops it before the last one, or its weights are not what they were at the beginning, or too large, all raise.
    """

    def __init__(self, communicator: Communicator, wanted: Sequence[tuple[FlatShard, Sequence[Slot]]], dtype: str | None) -> None:
        self._communicator = communicator
        self.wanted = wanted
        self._dtype = dtype
        self._shards = [shard for shard, _ in wanted]
        self._gathered = 0
        self._versions = [_version(shard) for shard in self._shards]

    def gather_next(self) -> paddle.Tensor:
        """Return the next whole buffer: the live one where this rank is alone. A collective operation."""
        number, self._gathered = self._gathered, len(self._shards)  # after an error, which all ranks get, there is nothing to tell
        shard = self._shards[number]
        too_large = self._too_large(number)
        mine = _HAS_TOO_LARGE if too_large else _GOES_ON if _version(shard) == self._versions[number] else _HAS_CHANGED
        verdict = int(self._communicator.max_of_integers(np.array([mine], dtype=np.int32))[0])
        if verdict == _HAS_TOO_LARGE:
            raise _say_too_large(too_large, self._dtype)
        if verdict == _HAS_CHANGED:
            raise ShardingError(_CHANGED)
        if verdict == _HAS_LEFT:
            raise RankFailedError(
                "another rank left iter_full_parameters before its end; run it to the end on every rank, and ask by include, exclude or "
                "to_rank for less"
            )
        self._gathered = number + 1
        return shard.tensor if self._communicator.alone else self._communicator.all_gather(shard.tensor)

    def _too_large(self, number: int) -> list[str]:
        """Return the names of what is wanted of a buffer and holds values on this rank that are too large for the dtype."""
        shard, slots = self.wanted[number]
        mine = shard.layout.shard(self._communicator.rank)
        parts = [(slot.name, slot.range.intersect(mine)) for slot in slots]
        return [
            name
            for name, part in parts
            if part.numel and _is_too_large(shard.tensor._slice(part.start - mine.start, part.stop - mine.start), self._dtype)
        ]

    def check_live_buffer(self) -> None:
        """Raise where what :meth:`gather_next` returned is the live buffer, and was written to since then.

        Raises:
            ShardingError: it was.
        """
        number = self._gathered - 1
        if self._communicator.alone and _version(self._shards[number]) != self._versions[number]:
            raise ShardingError(_CHANGED)

    def close(self) -> None:
        """Tell the other ranks, where there are buffers left."""
        if self._gathered < len(self._shards):
            self._gathered = len(self._shards)
            self._communicator.max_of_integers(np.array([_HAS_LEFT], dtype=np.int32))

    def __del__(self) -> None:
        self.close()  # of an iterator that never began


def _version(shard: FlatShard) -> object:
    """Return what is another value once this rank's shard was written to."""
    return _digest(shard.tensor) if shard.changes is None else shard.changes


def _digest(tensor: paddle.Tensor) -> str:
    # Paddle's optimizers count no versions of what they write to.
    return digest_of_parts(chunks_of(tensor))


def owned(tensor: paddle.Tensor, shape: tuple[int, ...], dtype: str | None, device: Any) -> paddle.Tensor:
    """Return a copy that shares nothing."""
    with paddle.no_grad():
        own = tensor.clone() if dtype in (None, dtype_name(tensor)) else tensor.astype(dtype)  # astype to the same makes no copy
        own = own.reshape(list(shape))
        own = own if device is None else own.to(device)
    own.stop_gradient = True
    return own
