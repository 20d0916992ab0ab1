"""Where in this host's memory the values of a model lie that our runtime cut, and those of its optimizers' states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import paddle
from numpy.typing import NDArray

from ..fsdp import LiveBuffer, TensorFacts, facts_of, lie_on_host, names_of_dtypes
from ..layout import ITEM_SIZES
from ..optim import StateColumn, StateKind, SteppedParameter
from .live_places import LivePlaces, SuffixedNames


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
    own = _places_of_whole(SuffixedNames(([name for name, _ in whole], "")), tensors, of_tensors, [rank == 0] * len(whole))
    return LivePlaces.joined([_places_of_flat(flat, of_shards), own, *_places_of_states(columns)])


def _places_of_states(columns: Sequence[StateColumn]) -> Iterator[LivePlaces]:
    """Yield where states are, a column at a time."""
    kept = _Kept.of([])
    for column in columns:
        if column.shards != kept.parameters:
            kept = _Kept.of(column.shards)
        keys = SuffixedNames((kept.names, f".{column.suffix}"))
        if column.kind is StateKind.SCALAR:
            yield _places_of_whole(keys, column.tensors, column.facts, kept.starts == 0)
        else:
            dtypes, addresses = names_of_dtypes(column.facts.dtypes), np.array(column.facts.addresses, np.int64)
            stored = np.ones(len(keys), np.bool_)
            yield LivePlaces(keys, dtypes, kept.shapes, kept.starts, kept.stops, addresses, stored, column.tensors)


@dataclass(frozen=True)
class _Kept:
    """What this rank keeps of some parameters; entry ``i`` of each list is of the same one."""

    parameters: Sequence[SteppedParameter]
    names: list[str]
    shapes: list[tuple[int, ...]]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def of(cls, parameters: Sequence[SteppedParameter]) -> _Kept:
        slots, ranges = [one.slot for one in parameters], [one.range for one in parameters]
        return cls(
            parameters,
            [slot.names[0] for slot in slots],
            [slot.shape for slot in slots],
            np.array([piece.start for piece in ranges], np.int64),
            np.array([piece.stop for piece in ranges], np.int64),
        )


def _places_of_flat(flat: Sequence[LiveBuffer], facts: TensorFacts) -> LivePlaces:
    """Return where this rank's pieces of flat buffers' parameters are, under each of their names."""
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    places: list[tuple[int, int, int]] = []
    for buffer, address in zip(flat, facts.addresses, strict=True):
        dtype, itemsize = buffer.layout.dtype, ITEM_SIZES[buffer.layout.dtype]
        first = address - buffer.layout.shard(buffer.communicator.rank).start * itemsize
        for shard in buffer.shards:
            slot, piece = shard.slot, shard.range
            for name in slot.names if piece.start < piece.stop else ():
                names.append(name)
                dtypes.append(dtype)
                shapes.append(slot.shape)
                places.append((piece.start, piece.stop, first + (slot.offset + piece.start) * itemsize))
    starts, stops, addresses = np.array(places, np.int64).reshape(-1, 3).T
    stored = np.ones(len(names), np.bool_)
    return LivePlaces(SuffixedNames((names, "")), dtypes, shapes, starts, stops, addresses, stored, [one.shard for one in flat])


def _places_of_whole(
    keys: SuffixedNames, tensors: list[paddle.Tensor], facts: TensorFacts, stored: list[bool] | NDArray[np.bool_]
) -> LivePlaces:
    """Return where tensors are that every rank has whole."""
    shapes = list(map(tuple, facts.shapes))
    numels, addresses = np.array(list(map(math.prod, shapes)), np.int64), np.array(facts.addresses, np.int64)
    starts = np.zeros(len(keys), np.int64)
    return LivePlaces(keys, names_of_dtypes(facts.dtypes), shapes, starts, numels, addresses, np.array(stored, np.bool_), tensors)
