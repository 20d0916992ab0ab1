"""Where in this host's memory the values of a model lie that our runtime cut, and those of its optimizers' states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import paddle

from ..fsdp import LiveBuffer, TensorFacts, facts_of, lie_on_host, names_of_dtypes
from ..layout import ITEM_SIZES
from ..optim import StateColumn, StateKind, SteppedParameter
from .sharding import LivePlaces


def places_of_cut(
    flat: Sequence[LiveBuffer], whole: Sequence[tuple[str, paddle.Tensor]], columns: Sequence[StateColumn], rank: int
) -> LivePlaces | None:
    """Return where flat buffers' pieces, whole tensors and states are; None where some are on a device, or don't lie as they should.

    Args:
        flat: this rank's shards of them.
        whole: what every rank has all of, by name.
        columns: the states of the parameters of which this rank keeps a piece.
        rank: this one, among those over which the model is cut.
    """
    shards, tensors = [one.shard for one in flat], [tensor for _, tensor in whole]
    live = chain(shards, tensors, *(column.tensors for column in columns))
    if any(column.kind is StateKind.STACKED for column in columns) or not lie_on_host(live):
        return None
    of_shards, of_tensors = facts_of(shards), facts_of(tensors)
    if not all(all(one.contiguous) for one in (of_shards, of_tensors, *(column.facts for column in columns))):
        return None
    stored = [rank == 0] * len(whole)
    of_model = [_places_of_flat(flat, of_shards), _places_of_whole([name for name, _ in whole], tensors, of_tensors, stored)]
    return LivePlaces.joined(chain(of_model, _places_of_states(columns)))


def _places_of_states(columns: Sequence[StateColumn]) -> Iterator[LivePlaces]:
    """Yield where states are, a column at a time."""
    kept = _Kept.of([])
    for column in columns:
        if column.shards != kept.parameters:
            kept = _Kept.of(column.shards)
        suffix = f".{column.suffix}"
        keys = [name + suffix for name in kept.names]
        if column.kind is StateKind.SCALAR:
            yield _places_of_whole(keys, column.tensors, column.facts, [start == 0 for start in kept.starts])
        else:
            dtypes, stored = names_of_dtypes(column.facts.dtypes), [True] * len(keys)
            yield LivePlaces(keys, dtypes, kept.shapes, kept.starts, kept.stops, column.facts.addresses, stored, column.tensors)


@dataclass(frozen=True)
class _Kept:
    """What this rank keeps of some parameters; entry ``i`` of each list is of the same one."""

    parameters: Sequence[SteppedParameter]
    names: list[str]
    shapes: list[tuple[int, ...]]
    starts: list[int]
    stops: list[int]

    @classmethod
    def of(cls, parameters: Sequence[SteppedParameter]) -> _Kept:
        slots, ranges = [one.slot for one in parameters], [one.range for one in parameters]
        return cls(
            parameters,
            [slot.names[0] for slot in slots],
            [slot.shape for slot in slots],
            [piece.start for piece in ranges],
            [piece.stop for piece in ranges],
        )


def _places_of_flat(flat: Sequence[LiveBuffer], facts: TensorFacts) -> LivePlaces:
    """Return where this rank's pieces of flat buffers' parameters are, under each of their names."""
    places = LivePlaces([], [], [], [], [], [], [], [one.shard for one in flat])
    for buffer, address in zip(flat, facts.addresses, strict=True):
        dtype, itemsize = buffer.layout.dtype, ITEM_SIZES[buffer.layout.dtype]
        first = address - buffer.layout.shard(buffer.communicator.rank).start * itemsize
        for shard in buffer.shards:
            slot, piece = shard.slot, shard.range
            for name in slot.names if piece.start < piece.stop else ():
                places.keys.append(name)
                places.dtypes.append(dtype)
                places.shapes.append(slot.shape)
                places.starts.append(piece.start)
                places.stops.append(piece.stop)
                places.addresses.append(first + (slot.offset + piece.start) * itemsize)
    places.stored.extend([True] * len(places.keys))
    return places


def _places_of_whole(keys: list[str], tensors: list[paddle.Tensor], facts: TensorFacts, stored: list[bool]) -> LivePlaces:
    """Return where tensors are that every rank has whole."""
    shapes = list(map(tuple, facts.shapes))
    return LivePlaces(
        keys, names_of_dtypes(facts.dtypes), shapes, [0] * len(keys), list(map(math.prod, shapes)), facts.addresses, stored, tensors
    )
