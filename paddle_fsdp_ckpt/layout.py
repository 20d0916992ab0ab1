"""Where every parameter lies: slots in flat buffers, and the shard of each buffer that a rank keeps.

Pure arithmetic: integers and names, no tensors. All counts are elements, not bytes, unless a name says otherwise.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

SLOT_ALIGNMENT_BYTES = 256
"""Slots and shards start at multiples of this, so that kernels meet equally aligned data at every world size."""

ITEM_SIZES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes an element, for each dtype that a flat buffer may have."""

LOW_PRECISION = ("float16", "bfloat16")
"""Those dtypes of which parameters can have float32 master weights."""


@dataclass(frozen=True, slots=True)
class Range:
    """A half-open range of elements, ``start <= i < stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a range: [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        """How many elements the range holds."""
        return self.stop - self.start

    def intersect(self, other: Range) -> Range:
        """Return what both ranges share; an empty range where they share nothing."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Range:
        """Return the range moved by ``by`` elements."""
        return Range(self.start + by, self.stop + by)


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat buffer.

    Attributes:
        names: the parameter's structured names in sorted order, more than one when it is tied.
        shape: the parameter's whole shape.
        offset: where its first element lies in the flat buffer.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def name(self) -> str:
        """The name that carries optimizer state: the first of :attr:`names`."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """How many elements the parameter has."""
        return math.prod(self.shape)

    @property
    def range(self) -> Range:
        """The slot's range in its flat buffer, padding not included."""
        return Range(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class FlatBuffer:
    """One fused 1-D tensor: slots end to end with padding between, cut into equal shards.

    Attributes:
        name: the unit's name and what tells its buffers apart; unique in a layout.
        dtype: Paddle's dtype name, a key of :data:`ITEM_SIZES`.
        slots: in the order of their offsets.
        shard_numel: how many elements each rank keeps.
        world_size: over how many ranks the buffer is cut.
    """

    name: str
    dtype: str
    slots: tuple[Slot, ...]
    shard_numel: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, padding included."""
        return self.numel * ITEM_SIZES[self.dtype]

    @property
    def gradient_dtype(self) -> str:
        """In which dtype our runtime reduces and keeps gradients: float32 for 16-bit floats, else :attr:`dtype`."""
        return "float32" if self.dtype in LOW_PRECISION else self.dtype

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the whole buffer's gradient, padding included."""
        return self.numel * ITEM_SIZES[self.gradient_dtype]

    def shard(self, rank: int) -> Range:
        """Return the range of the buffer that ``rank`` keeps."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        return Range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def local_range(self, slot: Slot, rank: int) -> Range:
        """Return the part of ``slot`` that ``rank`` keeps, counted from the slot's own first element.

        Empty, and then ``Range(0, 0)``, where the rank keeps nothing of it.
        """
        common = slot.range.intersect(self.shard(rank))
        return common.shift(-slot.offset) if common.numel else Range(0, 0)

    def cuts(self, slot: Slot) -> tuple[int, range]:
        """Return the first rank that keeps something of ``slot``, and before which of its elements the ranks after it begin.

        Of two slots of one shape over as many ranks these are equal just where each rank keeps the same part of both.
        """
        first = slot.offset // self.shard_numel
        return first, range((first + 1) * self.shard_numel - slot.offset, slot.numel, self.shard_numel)

    def local_pieces(self, rank: int) -> Iterator[tuple[Slot, Range]]:
        """Yield each slot of which ``rank`` keeps something, and that part, as :meth:`local_range` counts it; no others are looked at."""
        shard = self.shard(rank)
        first = bisect.bisect_right(self.slots, shard.start, key=lambda slot: slot.offset) - 1
        for slot in itertools.takewhile(lambda slot: slot.offset < shard.stop, self.slots[max(0, first) :]):
            local = self.local_range(slot, rank)
            if local.numel:
                yield slot, local


@dataclass(frozen=True)
class Layout:
    """All flat buffers of one model, for one world size."""

    buffers: tuple[FlatBuffer, ...]
    world_size: int


def build_flat_buffer(name: str, dtype: str, parameters: Sequence[tuple[Iterable[str], Sequence[int]]], world_size: int) -> FlatBuffer:
    """Place parameters, given as (structured names, shape), end to end in one flat buffer.

    Slots and shards are aligned to :data:`SLOT_ALIGNMENT_BYTES`. A parameter is moved on until no shard boundary cuts it where
    stock Paddle would load it wrong, see :func:`stock_loads_exactly`.

    Raises:
        ValueError: unknown dtype, no parameters, a parameter without elements, or a world size below 1.
    """
    if dtype not in ITEM_SIZES:
        raise ValueError(f"flat buffer '{name}': dtype '{dtype}' is not one of {', '.join(ITEM_SIZES)}")
    if world_size < 1:
        raise ValueError(f"world size {world_size} is below 1")
    shapes = [tuple(shape) for _, shape in parameters]
    if not shapes or any(math.prod(shape) == 0 for shape in shapes):
        raise ValueError(f"flat buffer '{name}': no parameters, or one without elements")
    alignment = SLOT_ALIGNMENT_BYTES // ITEM_SIZES[dtype]
    total = sum(_round_up(math.prod(shape), alignment) for shape in shapes)
    shard_numel = _round_up(-(-total // world_size), alignment)
    offsets = _place(shapes, alignment, shard_numel, world_size)
    while offsets is None:
        shard_numel += alignment
        offsets = _place(shapes, alignment, shard_numel, world_size)
    slots = tuple(Slot(tuple(sorted(names)), shape, offset) for (names, _), shape, offset in zip(parameters, shapes, offsets, strict=True))
    return FlatBuffer(name, dtype, slots, shard_numel, world_size)


def stock_loads_exactly(shape: Sequence[int], pieces: Sequence[Range]) -> bool:
    """Tell whether stock Paddle restores a tensor of ``shape`` right from ``pieces``, adjoining flat ranges that cover it.

    Paddle 3.3's ``load_state_dict`` (``paddle/distributed/flex_checkpoint/dcp``) turns each flat range into a box, without an error where

    - the box misses elements: ``minimal_nd_slice`` looks, for each axis, only at the axis just before, so where the first and last
      element of a range of three or more dimensions differ on an earlier axis and agree by chance on that one, the box is too small;
    - the box holds elements of a neighbour that happens to be a box itself: only neighbours that aren't are asked for those, and the
      box gets zeros there.
    """
    filled = [piece for piece in pieces if piece.numel]
    boxes = [_stock_box(shape, piece) for piece in filled]
    for i, (piece, box) in enumerate(zip(filled, boxes, strict=True)):
        if box is None:
            return False
        if box != piece and any(boxes[j] == filled[j] for j in _neighbours(filled, i, box)):
            return False
    return True


def _neighbours(pieces: Sequence[Range], i: int, box: Range) -> Iterator[int]:
    """Yield the positions of the pieces, other than the one at ``i``, that reach into ``box``, which holds that one."""
    yield from itertools.takewhile(lambda j: pieces[j].stop > box.start, range(i - 1, -1, -1))
    yield from itertools.takewhile(lambda j: pieces[j].start < box.stop, range(i + 1, len(pieces)))


def _stock_box(shape: Sequence[int], flat: Range) -> Range | None:
    """Return the flat range of the box that stock Paddle makes of ``flat``; None where the box misses elements."""
    first, last = _unravel(flat.start, shape), _unravel(flat.stop - 1, shape)
    start = stop = 0
    inside_one = True
    for axis, size in enumerate(shape):
        low, high = min(first[axis], last[axis]), max(first[axis], last[axis])
        if axis and first[axis - 1] != last[axis - 1]:
            low, high = 0, size - 1
        if not inside_one and (low, high) != (0, size - 1):
            return None
        inside_one = inside_one and low == high
        start, stop = start * size + low, stop * size + high
    return Range(start, stop + 1)


def _place(shapes: Sequence[tuple[int, ...]], alignment: int, shard_numel: int, world_size: int) -> list[int] | None:
    """Return an offset for each shape, or None where they don't fit into ``world_size`` shards of ``shard_numel``."""
    offsets: list[int] = []
    cursor = 0
    for shape in shapes:
        numel = math.prod(shape)
        while not _cuts_load_exactly(shape, cursor, shard_numel):
            cursor += alignment
            if cursor + numel > shard_numel * world_size:
                return None
        offsets.append(cursor)
        cursor = _round_up(cursor + numel, alignment)
    return offsets if cursor <= shard_numel * world_size else None


def _cuts_load_exactly(shape: tuple[int, ...], offset: int, shard_numel: int) -> bool:
    slot = Range(offset, offset + math.prod(shape))
    first_shard, last_shard = slot.start // shard_numel, (slot.stop - 1) // shard_numel
    if first_shard == last_shard or len(shape) < 2:
        return True
    shards = (Range(i * shard_numel, (i + 1) * shard_numel) for i in range(first_shard, last_shard + 1))
    return stock_loads_exactly(shape, [slot.intersect(shard).shift(-offset) for shard in shards])


def _unravel(index: int, shape: Sequence[int]) -> list[int]:
    coordinates = []
    for size in reversed(shape):
        coordinates.append(index % size)
        index //= size
    return coordinates[::-1]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
