"""What a rank stores of a model and its optimizers, and how it lies in its file: planned once, and kept from save to save.

A plan is kept with the sharded model itself. The next save uses it only where nothing has changed that it was made of: the same tensors
under the same names, each at the same address, of the same shape and dtype. Otherwise it makes a new one.
"""

from __future__ import annotations

import math
import operator
import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .fsdp import TensorFacts, facts_of, few_at_a_time
from .host_memory import bytes_of, is_direct, nbytes_of
from .layout import Range
from .pieces import Piece
from .shardings import LiveTables
from .state_dict import weights_to_store
from .storage.flex import piece_of
from .storage.format import DTYPE_NBYTES
from .storage.header import in_file_order, pieces_of, place_in_file
from .storage.manifest import FileRecord
from .storage.plan import Duplicate
from .storage.reserved_keys import check_not_reserved
from .storage.writer import FilePlan, PlacedPieces, estimate_nbytes, place_pieces, plan_file
from .subjects import Subjects


class _Source(NamedTuple):
    """Where the bytes of a piece are: position of a tensor among those that are known, first byte in it, and how many there are."""

    tensor: int
    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class SourcedPlan:
    """What one rank stores, of tensors that may be anywhere, without the tensors themselves.

    Attributes:
        pieces: what is stored.
        sources: where the bytes of each piece are.
        file: how they lie in the file.
        estimated_nbytes: about how many bytes the file will have.
    """

    pieces: Sequence[Piece]
    sources: Sequence[_Source]
    file: FilePlan
    estimated_nbytes: int


SavePlan: TypeAlias = "PlacedPieces | SourcedPlan"
"""What one rank stores: the former where all of it is in this host's memory."""


@dataclass(frozen=True, eq=False)
class StoredTensors:
    """What one rank stores in one save: a plan, and the live tensors, which this keeps alive."""

    plan: SavePlan
    tensors: Sequence[paddle.Tensor]

    def contents(self) -> Iterator[tuple[Piece, memoryview]]:
        """Yield each piece with its bytes: the tensors' own memory, where that is on the host; else copies."""
        if isinstance(self.plan, PlacedPieces):
            yield from zip(pieces_of(self.plan.start.header), self.plan.places.views(), strict=True)
            return
        for piece, (number, start, nbytes) in zip(self.plan.pieces, self.plan.sources, strict=True):
            tensor = self.tensors[number]
            if is_direct(tensor) or not tensor.is_contiguous():
                yield piece, bytes_of(tensor)[start : start + nbytes]
                continue
            # Not the whole tensor, which may hold the pieces of many keys.
            first, numel = start // int(tensor.element_size()), nbytes // int(tensor.element_size())
            yield piece, bytes_of(tensor.flatten()._slice(first, first + numel))

    def values(self) -> Iterator[tuple[Piece, paddle.Tensor | memoryview]]:
        """Yield each piece with its bytes where all are on the host, else with the tensor that holds them, or a view of a part of one."""
        if isinstance(self.plan, PlacedPieces):
            yield from self.contents()
            return
        for piece, (number, start, nbytes) in zip(self.plan.pieces, self.plan.sources, strict=True):
            tensor = self.tensors[number]
            if nbytes == nbytes_of(tensor):
                yield piece, tensor
            else:
                itemsize = tensor.element_size()
                yield piece, tensor.detach().view([-1])._slice(start // itemsize, (start + nbytes) // itemsize)


class _Seen(NamedTuple):
    """A few tensors as a plan saw them. A plan must not keep them alive."""

    tensors: list[weakref.ReferenceType[paddle.Tensor]]
    facts: TensorFacts

    def are(self, tensors: Sequence[paddle.Tensor]) -> bool:
        """Tell whether they are these, as they were, and contiguous."""
        if not all(map(operator.is_, [known() for known in self.tensors], tensors)):
            return False
        facts = facts_of(tensors)
        return facts == self.facts and all(facts.contiguous)


class KnownIndex(NamedTuple):
    """What rank 0 worked out of the headers of all ranks' files.

    Attributes:
        headers: of each file: name, size, number of pieces, and size and digest of the header.
        paddle_metadata: the content of ``0.metadata``, :func:`~.storage.compressed.compressed`.
        duplicates: what they hold twice.
    """

    headers: list[tuple[str, int, int, int, str]]
    paddle_metadata: bytes
    duplicates: list[Duplicate]


def headers_of(files: Sequence[FileRecord]) -> list[tuple[str, int, int, int, str]]:
    """Return what tells the headers of files from others; see :class:`KnownIndex`."""
    return [(one.name, one.size, one.pieces, one.header_nbytes, one.digest(0)) for one in files]


class SaveMemory:
    """What saves of one sharded model keep from one to the next.

    Attributes:
        index: what rank 0 knows of the last save's files; None before the first, and elsewhere.
    """

    def __init__(self) -> None:
        self.index: KnownIndex | None = None
        self._plan: SavePlan | None = None
        self._names: list[object] = []
        self._count = 0
        self._seen: list[_Seen] = []

    def recall(self, tables: LiveTables) -> SavePlan | None:
        """Return the last plan, where it was made of just these tensors as they are now."""
        if self._plan is None or len(tables.tensors) != self._count or tables.names != self._names:
            return None
        are_same = all(seen.are(few) for seen, few in zip(self._seen, few_at_a_time(tables.tensors), strict=True))
        return self._plan if are_same else None

    def keep(self, tables: LiveTables, plan: SavePlan) -> None:
        """Keep a plan that was made of these tensors."""
        self._plan, self._names, self._count = plan, tables.names, len(tables.tensors)
        shapes: dict[tuple[int, ...], list[int]] = {}
        self._seen = []
        for few in few_at_a_time(tables.tensors):
            facts = facts_of(few)
            few_shapes = [shapes.setdefault(tuple(shape), shape) for shape in facts.shapes]
            self._seen.append(_Seen([weakref.ref(one) for one in few], replace(facts, shapes=few_shapes)))


def memory_of(subjects: Subjects) -> SaveMemory | None:
    """Return what saves of this model keep; None where nothing is kept, as nobody could tell that it is out of date."""
    kept = subjects.sharding.kept
    if kept is None:
        return None
    memory: SaveMemory = kept.setdefault(SaveMemory, SaveMemory())
    return memory


def stored_tensors(subjects: Subjects, rank: int, left_out: Collection[str]) -> StoredTensors:
    """Return what this rank's file holds of a model and its optimizers, but for the keys that are left out.

    Raises:
        ShardingError: the model was written to in a way that would be lost, or two tensors have one key.
        CheckpointError: a key is reserved.
    """
    tables = subjects.sharding.live_tables([one.optimizer for one in subjects.steppers], subjects.buffers)
    memory = memory_of(subjects)
    if memory is not None and tables is not None:
        tables.names.append((rank, frozenset(left_out), [one.names_in_order for one in subjects.steppers]))
        known = memory.recall(tables)
        if known is not None:
            return StoredTensors(known, tables.tensors)
        placed = _plan_places(subjects, left_out)
        if placed is not None:
            memory.keep(tables, placed)
            return StoredTensors(placed, tables.tensors)
    weights = {key: weight for key, weight in weights_to_store(subjects, rank).items() if key not in left_out}
    check_not_reserved(weights)
    sources = None if tables is None else _find(weights, tables.tensors)
    if memory is not None and tables is not None and sources is not None:
        plan = _plan(weights, sources, tables.tensors)
        memory.keep(tables, plan)
        return StoredTensors(plan, tables.tensors)
    tensors = [weight.local_tensor for weight in weights.values()]
    whole = [_Source(number, 0, nbytes_of(tensor)) for number, tensor in enumerate(tensors)]
    return StoredTensors(_plan(weights, whole, tensors), tensors)


def _plan_places(subjects: Subjects, left_out: Collection[str]) -> PlacedPieces | None:
    """Plan what :func:`~.state_dict.weights_to_store` describes by where it is, without a tensor for each; None where that isn't known."""
    if subjects.sharding.communicator.replica_count > 1:
        return None
    places = subjects.live_places()
    if places is None:
        return None
    keys, dtypes, shapes, starts, stops = list(places.keys), places.dtypes, places.shapes, places.starts.tolist(), places.stops.tolist()
    if not DTYPE_NBYTES.keys() >= set(dtypes):
        return None
    wanted = [i for i in np.flatnonzero(places.stored & (places.starts < places.stops)).tolist() if keys[i] not in left_out]
    check_not_reserved(keys[i] for i in wanted)
    if len({keys[i] for i in wanted}) < len(wanted):
        return None
    wanted.sort(key=lambda i: place_in_file(dtypes[i]))
    numels = {shape: math.prod(shape) for shape in set(shapes)}

    def piece(i: int) -> Piece:
        shape = shapes[i]
        flat = None if stops[i] - starts[i] == numels[shape] else Range(starts[i], stops[i])
        return Piece(keys[i], dtypes[i], shape, (0,) * len(shape), shape, flat)

    nbytes = [(stops[i] - starts[i]) * DTYPE_NBYTES[dtypes[i]] for i in wanted]
    return place_pieces(map(piece, wanted), places.addresses[wanted].tolist(), nbytes)


def _plan(weights: Mapping[str, ShardedWeight], sources: Sequence[_Source], tensors: Sequence[paddle.Tensor]) -> SavePlan:
    pieces = [piece_of(key, weight) for key, weight in weights.items()]
    # What a file can't hold is said where it is written.
    known = all(piece.dtype in DTYPE_NBYTES for piece in pieces)
    if known and all(is_direct(one) for one in tensors):
        order = in_file_order(pieces)
        first = [one.data_ptr() for one in tensors]
        addresses = [first[sources[i].tensor] + sources[i].start for i in order]
        return place_pieces((pieces[i] for i in order), addresses, [sources[i].nbytes for i in order])
    return SourcedPlan(pieces, sources, plan_file(pieces if known else []), estimate_nbytes(pieces))


def _find(weights: Mapping[str, ShardedWeight], tensors: Sequence[paddle.Tensor]) -> list[_Source] | None:
    """Return in which of the tensors the bytes of each weight lie; None where one lies in none of them."""
    places = sorted((one.data_ptr(), number, nbytes_of(one)) for number, one in enumerate(tensors))
    addresses = [address for address, _, _ in places]
    sources = []
    for weight in weights.values():
        view = weight.local_tensor
        address, nbytes = view.data_ptr(), nbytes_of(view)
        position = bisect_right(addresses, address) - 1
        if position < 0 or not view.is_contiguous():
            return None
        start, number, available = places[position]
        if address + nbytes > start + available:
            return None
        sources.append(_Source(number, address - start, nbytes))
    return sources
