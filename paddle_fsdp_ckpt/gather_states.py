"""Whole optimizer states out of a sharded model, one state of one flat buffer at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle

from .fsdp import Communicator, ParameterShard
from .fsdp.paddle_runtime import PaddleShard
from .gather import owned, receives, receiving_error
from .layout import FlatBuffer, Slot
from .optim import OptimizerState, StateKind
from .subjects import check_subjects


def full_optimizer_state_dict(optimizer: Any, *, device: Any = "cpu", to_rank: int | None = 0) -> dict[str, paddle.Tensor]:
    """Return an optimizer's whole states and master weights by key, as :func:`~.state_dict.optimizer_sharded_state_dict` names them.

    All ranks must call it. Only states that there are; none is created.

    Args:
        optimizer: bound to a sharded model; or one that steps a model that Paddle's own ``fully_shard`` cut.
        device: as for :func:`~.gather.iter_full_parameters`.
        to_rank: as for :func:`~.gather.full_state_dict`.

    Returns:
        Elementwise states in the parameter's shape, scalars in their own, ASGD's ``y`` with its leading dimension.

    Raises:
        ShardingError: the optimizer is not bound, or ``to_rank`` differs between ranks.
        UnsupportedOptimizerError: it has a state that its class is not known to have.
        CheckpointError: there is no rank ``to_rank``, or no such device.
    """
    subjects = check_subjects(None, [optimizer])
    sharding = subjects.sharding
    (stepper,) = subjects.steppers
    communicator = sharding.communicator
    communicator.check_same("to_rank of full_optimizer_state_dict", str(to_rank))
    is_receiver = receives(sharding, to_rank)
    communicator.raise_together(receiving_error(device if is_receiver else None))
    tables = _agree_on_tables(communicator, sharding.states(optimizer, stepper.parameters))
    found: dict[str, paddle.Tensor] = {}
    for layout in [shard.layout for shard in sharding.flat_shards()]:
        for table in tables.get(layout.name, []):
            for slot, tensor in table.gather(layout, communicator):
                if is_receiver:
                    found[f"{slot.name}.{table.suffix}"] = owned(tensor, tuple(tensor.shape), None, device)
                del tensor  # a view of the whole buffer, which must be gone before the next one is gathered
    return found


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
