"""Whole tensors out of a sharded model and its optimizer, one flat buffer at a time.

For those who need complete named tensors: a rollout engine, an export, a test. What comes out is never a shard: a tensor has the
shape that it has in the plain model, and belongs to the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from .errors import CheckpointError, RankFailedError, ShardingError
from .fsdp import Communicator, ParameterShard, named_buffers, named_parameters, runtime_of
from .fsdp.paddle_runtime import PaddleShard
from .layout import FlatBuffer, Slot
from .optim import OptimizerState, StateKind
from .shardings import FlatShard, Sharding, sharding_of
from .subjects import check_subjects, check_tensors

Selection: TypeAlias = Iterable[str] | Callable[[str], bool]
"""Which names: shell-style patterns (``*``, ``?``, ``[...]``; ``*`` crosses dots), or a function that tells of a name."""


def iter_full_parameters(
    model: nn.Layer,
    *,
    include: Selection | None = None,
    exclude: Selection | None = None,
    trainable_only: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    to_rank: int | None = None,
) -> Iterator[tuple[str, paddle.Tensor]]:
    """Yield (structured name, whole tensor) of each parameter, in the same order on every rank.

    All ranks must call it, and run it to the end. Each flat buffer is gathered once, and only where something of it is wanted; no
    more than one is whole at a time. A parameter with several names comes out under each, as the same tensor. The tensors are
    copies of what the weights are when they are yielded; they stay as they are.

    Args:
        model: sharded by ``fully_shard``, ours or Paddle's own; or plain, without any communication then.
        include: names to yield; by default all.
        exclude: names not to yield, though included.
        trainable_only: leave out parameters with ``stop_gradient``.
        dtype: Paddle's dtype name to convert to; by default each keeps its own.
        device: where the tensors go, e.g. ``"cpu"``; by default they stay.
        to_rank: the only rank of the model's group that is given tensors; the iterators of the others are empty, and must be run
            all the same. By default every rank is given all.

    Raises:
        ShardingError: as :func:`~.state_dict.sharded_state_dict`; or the ranks ask for different things.
        CheckpointError: there is no rank ``to_rank``.
        RankFailedError: while iterating, another rank left its iterator before the end.
    """
    check_tensors(model)
    sharding = sharding_of(model)
    receives = _receives(sharding, to_rank)
    if sharding.is_plain:
        pairs = _plain_parameters(model, include, exclude, trainable_only) if receives else iter(())
        return ((name, _owned(tensor, tuple(tensor.shape), dtype, device)) for name, tensor in pairs)
    wanted = _wanted_slots(sharding, include, exclude, trainable_only)
    asked = repr(([[slot.names for slot in slots] for _, slots in wanted], dtype, to_rank))
    sharding.communicator.check_same("what is asked of iter_full_parameters", asked)
    return _iterate(sharding.communicator, wanted, include, exclude, dtype, device, receives)


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
    dtype: str | None = None,
    device: str | None = "cpu",
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
    found = dict(
        iter_full_parameters(
            model, include=include, exclude=exclude, trainable_only=trainable_only, dtype=dtype, device=device, to_rank=to_rank
        )
    )
    if not trainable_only and _receives(sharding_of(model), to_rank):
        for name, buffer in named_buffers(model):
            if _is_selected(name, include, exclude):
                found[name] = _owned(buffer.detach(), tuple(buffer.shape), None, device)
    return found


def full_optimizer_state_dict(optimizer: Any, *, device: str | None = "cpu", to_rank: int | None = 0) -> dict[str, paddle.Tensor]:
    """Return an optimizer's whole states and master weights by key, as :func:`~.state_dict.optimizer_sharded_state_dict` names them.

    All ranks must call it. Only states that there are; none is created.

    Args:
        optimizer: bound to a sharded model; or one that steps a model that Paddle's own ``fully_shard`` cut.
        device: as for :func:`iter_full_parameters`.
        to_rank: as for :func:`full_state_dict`.

    Returns:
        Elementwise states in the parameter's shape, scalars in their own, ASGD's ``y`` with its leading dimension.

    Raises:
        ShardingError: the optimizer is not bound.
        UnsupportedOptimizerError: it has a state that its class is not known to have.
        CheckpointError: there is no rank ``to_rank``.
    """
    subjects = check_subjects(None, [optimizer])
    sharding = subjects.sharding
    receives = _receives(sharding, to_rank)
    (stepper,) = subjects.steppers
    communicator = sharding.communicator
    tables = _agree_on_tables(communicator, sharding.states(optimizer, stepper.parameters))
    found: dict[str, paddle.Tensor] = {}
    for layout in [shard.layout for shard in sharding.flat_shards()]:
        for table in tables.get(layout.name, []):
            for slot, tensor in table.gather(layout, communicator):
                if receives:
                    found[f"{slot.name}.{table.suffix}"] = _owned(tensor, tuple(tensor.shape), None, device)
    return found


def _receives(sharding: Sharding, to_rank: int | None) -> bool:
    """Tell whether this rank is given tensors.

    Raises:
        CheckpointError: there is no such rank.
    """
    rank, world_size = sharding.communicator.rank, sharding.communicator.world_size
    if sharding.is_plain and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if to_rank is not None and not 0 <= to_rank < world_size:
        raise CheckpointError(f"to_rank is {to_rank}, and the model's group has ranks 0 to {world_size - 1}")
    return to_rank in (None, rank)


def _matches(name: str, selection: Selection) -> bool:
    return bool(selection(name)) if callable(selection) else any(fnmatchcase(name, pattern) for pattern in selection)


def _is_selected(name: str, include: Selection | None, exclude: Selection | None) -> bool:
    return (include is None or _matches(name, include)) and not (exclude is not None and _matches(name, exclude))


def _plain_parameters(
    model: nn.Layer, include: Selection | None, exclude: Selection | None, trainable_only: bool
) -> Iterator[tuple[str, paddle.Tensor]]:
    for named in named_parameters(model):
        if not (trainable_only and named.parameter.stop_gradient):
            yield from ((name, named.parameter.detach()) for name in sorted(named.names) if _is_selected(name, include, exclude))


def _wanted_slots(
    sharding: Sharding, include: Selection | None, exclude: Selection | None, trainable_only: bool
) -> list[tuple[FlatShard, list[Slot]]]:
    """Return the slots to yield of each flat buffer that has any."""
    wanted = []
    for shard in sharding.flat_shards():
        slots = [
            slot
            for slot, trainable in zip(shard.layout.slots, shard.trainable, strict=True)
            if (trainable or not trainable_only) and any(_is_selected(name, include, exclude) for name in slot.names)
        ]
        if slots:
            wanted.append((shard, slots))
    return wanted


def _iterate(
    communicator: Communicator,
    wanted: Sequence[tuple[FlatShard, Sequence[Slot]]],
    include: Selection | None,
    exclude: Selection | None,
    dtype: str | None,
    device: str | None,
    receives: bool,
) -> Iterator[tuple[str, paddle.Tensor]]:
    with closing(_gather_each(communicator, [shard for shard, _ in wanted])) as gathered:
        for (_, slots), whole in zip(wanted, gathered, strict=True):
            for slot in slots if receives else ():
                tensor = _owned(whole._slice(slot.range.start, slot.range.stop), slot.shape, dtype, device)
                yield from ((name, tensor) for name in slot.names if _is_selected(name, include, exclude))


def _gather_each(communicator: Communicator, shards: Sequence[FlatShard]) -> Generator[paddle.Tensor, None, None]:
    """Yield each whole buffer; where a rank stops before the last one, the others raise."""
    for number, shard in enumerate(shards):
        if communicator.max_of_integers(np.array([0], dtype=np.int32))[0]:
            raise RankFailedError(
                "another rank left iter_full_parameters before its end; run it to the end on every rank, and ask by include, exclude or "
                "to_rank for less"
            )
        whole = shard.tensor if communicator.alone else communicator.all_gather(shard.tensor)
        try:
            yield whole
        except GeneratorExit:
            if number + 1 < len(shards):
                communicator.max_of_integers(np.array([1], dtype=np.int32))
            raise
        del whole  # before the next one is gathered


def _owned(tensor: paddle.Tensor, shape: tuple[int, ...], dtype: str | None, device: str | None) -> paddle.Tensor:
    """Return a copy that shares nothing."""
    with paddle.no_grad():
        own = tensor.clone() if dtype is None or str(tensor.dtype).endswith(f".{dtype}") else tensor.astype(dtype)
        own = own.reshape(list(shape))
        own = own if device is None else own.to(device)
    own.stop_gradient = True
    return own


@dataclass
class _StateTable:
    """One state of the parameters in one flat buffer, as far as this rank has it.

    Attributes:
        suffix: what follows the parameter's name in the keys.
        kind: of all of them.
        dtype: of all of them.
        lead: the shape of a scalar; how many layers a stacked state has, as a list of one.
        offsets: the slots that have the state on any rank.
        states: this rank's, by the slot's offset.
    """

    suffix: str
    kind: StateKind
    dtype: str
    lead: list[int]
    offsets: set[int]
    states: dict[int, OptimizerState] = field(default_factory=dict)

    def gather(self, layout: FlatBuffer, communicator: Communicator) -> Iterator[tuple[Slot, paddle.Tensor]]:
        """Yield the whole state of each slot that has it. A collective operation."""
        slots = [slot for slot in layout.slots if slot.offset in self.offsets]
        if self.kind is StateKind.SCALAR:
            yield from self._gather_scalars(layout, slots, communicator)
            return
        layers = [self._gather_layer(layout, layer, communicator) for layer in range(self.lead[0] if self.lead else 1)]
        for slot in slots:
            parts = [layer._slice(slot.range.start, slot.range.stop).reshape(list(slot.shape)) for layer in layers]
            yield slot, paddle.stack(parts) if self.kind is StateKind.STACKED else parts[0]

    def _gather_layer(self, layout: FlatBuffer, layer: int, communicator: Communicator) -> paddle.Tensor:
        """Return one value of each element of the buffer."""
        first = layout.shard(communicator.rank).start
        mine = paddle.zeros([layout.shard_numel], dtype=self.dtype)
        with paddle.no_grad():
            for state in self.states.values():
                start = state.shard.slot.offset + state.shard.range.start - first
                values = state.tensor[layer] if self.kind is StateKind.STACKED else state.tensor
                paddle.assign(values, mine._slice(start, start + state.shard.range.numel))
        return mine if communicator.alone else communicator.all_gather(mine)

    def _gather_scalars(
        self, layout: FlatBuffer, slots: Sequence[Slot], communicator: Communicator
    ) -> Iterator[tuple[Slot, paddle.Tensor]]:
        mine = paddle.zeros([len(slots)], dtype=self.dtype)
        with paddle.no_grad():
            for place, slot in enumerate(slots):
                if slot.offset in self.states:
                    paddle.assign(self.states[slot.offset].tensor.reshape([1]), mine._slice(place, place + 1))
        every = mine if communicator.alone else communicator.all_gather(mine)
        for place, slot in enumerate(slots):
            owner = slot.offset // layout.shard_numel  # the rank that keeps the parameter's first element has its scalars
            at = owner * len(slots) + place
            yield slot, every._slice(at, at + 1).reshape(self.lead)


def _agree_on_tables(communicator: Communicator, states: Sequence[OptimizerState]) -> dict[str, list[_StateTable]]:
    """Return the states that there are on any rank, by the flat buffer's name, in the same order on every rank."""
    tables: dict[tuple[str, str], _StateTable] = {}
    for state in states:
        assert isinstance(state.shard, (ParameterShard, PaddleShard))
        where = state.shard.buffer.layout.name, state.suffix
        table = tables.get(where)
        if table is None:
            shape = list(state.tensor.shape)
            lead = shape if state.kind is StateKind.SCALAR else shape[:1] if state.kind is StateKind.STACKED else []
            dtype = str(state.tensor.dtype).rpartition(".")[2]
            table = tables[where] = _StateTable(state.suffix, state.kind, dtype, lead, set())
        table.offsets.add(state.shard.slot.offset)
        table.states[state.shard.slot.offset] = state
    mine = [[name, one.suffix, one.kind.name, one.dtype, one.lead, sorted(one.offsets)] for (name, _), one in tables.items()]
    for text in communicator.gather_texts(json.dumps(mine)):
        for name, suffix, kind, dtype, lead, offsets in json.loads(text):
            table = tables.setdefault((name, suffix), _StateTable(suffix, StateKind[kind], dtype, lead, set()))
            table.offsets.update(offsets)
    by_buffer: dict[str, list[_StateTable]] = {}
    for name, suffix in sorted(tables):
        by_buffer.setdefault(name, []).append(tables[name, suffix])
    return by_buffer
