"""How the ranks that keep the same shards, one of them in each replica, divide what they write: every element is written once.

Pure arithmetic, as in :mod:`.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .layout import ITEM_SIZES, SLOT_ALIGNMENT_BYTES, FlatBuffer, Range, Slot, stock_loads_exactly


def written_range(buffer: FlatBuffer, slot: Slot, rank: int, replica: int, replica_count: int) -> Range:
    """Return the part of ``slot`` that ``rank`` of this replica writes, counted from the slot's own first element; may be empty.

    Each replica writes about an equal share of each shard. A parameter is cut where stock Paddle loads it right: see
    :func:`~.layout.stock_loads_exactly`; if need be between two elements of its first axis, or not at all.
    """
    mine = buffer.local_range(slot, rank)
    if replica_count == 1 or not mine.numel:
        return mine
    row = math.prod(slot.shape[1:])
    for step in (1, row):
        pieces = [
            _part(buffer, slot, one, number, replica_count, step) for one in _keepers(buffer, slot) for number in range(replica_count)
        ]
        if len(slot.shape) < 2 or stock_loads_exactly(slot.shape, pieces):
            return _part(buffer, slot, rank, replica, replica_count, step)
    first = mine.shift(slot.offset - buffer.shard(rank).start).start
    return mine if first // _part_numel(buffer, replica_count) == replica else Range(0, 0)


def _keepers(buffer: FlatBuffer, slot: Slot) -> Iterator[int]:
    """Yield the ranks that keep something of the slot."""
    yield from range(slot.range.start // buffer.shard_numel, (slot.range.stop - 1) // buffer.shard_numel + 1)


def _part(buffer: FlatBuffer, slot: Slot, rank: int, replica: int, replica_count: int, step: int) -> Range:
    """Return the replica's part of what ``rank`` keeps of the slot; it begins and ends with that, or at multiples of ``step``."""
    mine, part = buffer.local_range(slot, rank), _part_numel(buffer, replica_count)
    begin = buffer.shard(rank).start - slot.offset
    cuts = [(begin + number * part) // step * step for number in (replica, replica + 1)]
    start = mine.start if replica == 0 else max(mine.start, cuts[0])
    stop = mine.stop if replica == replica_count - 1 else min(mine.stop, cuts[1])
    return Range(start, stop) if start < stop else Range(0, 0)


def _part_numel(buffer: FlatBuffer, replica_count: int) -> int:
    """Return how many elements of a shard a replica writes, but for the last one, which may have fewer."""
    alignment = SLOT_ALIGNMENT_BYTES // ITEM_SIZES[buffer.dtype]
    return -(-buffer.shard_numel // (replica_count * alignment)) * alignment
