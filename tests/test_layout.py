"""The arithmetic of flat buffers, against brute force and Paddle's own code."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.distributed.flex_checkpoint.dcp.utils import flat_range_in_min_slice, minimal_nd_slice

from paddle_fsdp_ckpt.layout import ITEM_SIZES, SLOT_ALIGNMENT_BYTES, FlatBuffer, Range, Slot, build_flat_buffer, stock_loads_exactly

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=5).map(tuple)
dtypes = st.sampled_from(sorted(ITEM_SIZES))


def pieces_of(buffer: FlatBuffer, position: int) -> list[Range]:
    return [buffer.local_range(buffer.slots[position], rank) for rank in range(buffer.world_size)]


@given(st.lists(shapes, min_size=1, max_size=8), dtypes, st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_every_element_lies_in_one_place_on_one_rank(parameters: list[tuple[int, ...]], dtype: str, world_size: int) -> None:
    buffer = build_flat_buffer("unit", dtype, [((f"p{i}",), shape) for i, shape in enumerate(parameters)], world_size)
    owners = np.zeros(buffer.numel, int)
    for position, (slot, shape) in enumerate(zip(buffer.slots, parameters, strict=True)):
        assert slot.shape == shape
        assert slot.numel == int(np.prod(shape, dtype=int))
        assert slot.offset * ITEM_SIZES[dtype] % SLOT_ALIGNMENT_BYTES == 0
        owners[slot.offset : slot.offset + slot.numel] += 1
        seen = np.zeros(slot.numel, int)
        for rank, piece in enumerate(pieces_of(buffer, position)):
            seen[piece.start : piece.stop] += 1
            in_buffer = range(slot.offset + piece.start, slot.offset + piece.stop)
            shard = buffer.shard(rank)
            assert all(shard.start <= i < shard.stop for i in (in_buffer[:1] or [shard.start]))
            assert all(shard.start <= i < shard.stop for i in (in_buffer[-1:] or [shard.start]))
        assert (seen == 1).all()
    assert owners.max() == 1
    assert buffer.shard_numel * ITEM_SIZES[dtype] % SLOT_ALIGNMENT_BYTES == 0
    assert [buffer.shard(rank).start for rank in range(world_size)] == [rank * buffer.shard_numel for rank in range(world_size)]


@given(st.lists(shapes, min_size=1, max_size=6), dtypes, st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_stock_paddle_restores_every_parameter_from_our_cuts(parameters: list[tuple[int, ...]], dtype: str, world_size: int) -> None:
    # Repeated, so that they are large enough to be cut.
    grown = [(17 * shape[0], *shape[1:]) if shape else shape for shape in parameters]
    buffer = build_flat_buffer("unit", dtype, [((f"p{i}",), shape) for i, shape in enumerate(grown)], world_size)
    for position, slot in enumerate(buffer.slots):
        assert restored_by_stock(slot.shape, pieces_of(buffer, position))


@given(shapes.filter(len), st.lists(shapes, max_size=4), st.lists(shapes, max_size=4), dtypes, dtypes, st.integers(1, 5))
@settings(max_examples=500, deadline=None)
def test_cuts_tell_whether_ranks_keep_the_same_of_a_parameter_in_two_buffers(
    shape: tuple[int, ...], before: list[tuple[int, ...]], others: list[tuple[int, ...]], dtype: str, other: str, world_size: int
) -> None:
    shape = (37 * shape[0], *shape[1:])  # so that it may be cut
    one, two = (
        build_flat_buffer("unit", kind, [((f"p{i}",), one) for i, one in enumerate([*rest, shape])], world_size)
        for kind, rest in ((dtype, before), (other, others))
    )
    kept = [pieces_of(buffer, -1) for buffer in (one, two)]
    assert (one.cuts(one.slots[-1]) == two.cuts(two.slots[-1])) == (kept[0] == kept[1])


@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 12))
@settings(max_examples=500, deadline=None)
def test_cuts_are_where_the_pieces_of_the_next_ranks_begin(offset: int, numel: int, shard_numel: int) -> None:
    buffer = FlatBuffer("unit", "float32", (Slot(("p",), (numel,), offset),), shard_numel, -(-(offset + numel) // shard_numel))
    kept = [(rank, piece) for rank, piece in enumerate(pieces_of(buffer, 0)) if piece.numel]
    first, begins = buffer.cuts(buffer.slots[0])
    assert (first, list(begins)) == (kept[0][0], [piece.start for _, piece in kept[1:]])


@given(shapes.filter(len), st.lists(st.integers(0, 10_000), max_size=4))
@settings(max_examples=1000, deadline=None)
def test_what_stock_paddle_loads_right_is_told_right(shape: tuple[int, ...], cuts: list[int]) -> None:
    numel = math.prod(shape)
    bounds = sorted({0, numel, *(cut % numel for cut in cuts)})
    pieces = [Range(start, stop) for start, stop in itertools.pairwise(bounds)]
    assert stock_loads_exactly(shape, pieces) == restored_by_stock(shape, pieces)


def restored_by_stock(shape: tuple[int, ...], pieces: list[Range]) -> bool:
    """Do what stock ``restore_unflattened_state_dict`` does with flat pieces of a tensor; tell whether every box comes out right."""
    if not shape:
        return True
    right = np.arange(1, math.prod(shape) + 1)
    filled = [piece for piece in pieces if piece.numel]
    boxes = [minimal_nd_slice(shape, piece.start, piece.stop)[0] for piece in filled]
    sizes = [math.prod(stop - start for start, stop in box) for box in boxes]
    resharded = np.zeros(2 * right.size, int)
    for piece, size in zip(filled, sizes, strict=True):
        if size != piece.numel:
            resharded[piece.start : piece.stop] = right[piece.start : piece.stop]
    for piece, box, size in zip(filled, boxes, sizes, strict=True):
        if size == piece.numel:
            values = right[piece.start : piece.stop]
        else:
            first = piece.start - flat_range_in_min_slice(shape, box, piece.start, piece.stop)[0]
            values = resharded[first : first + size]
        wanted = right.reshape(shape)[tuple(slice(start, stop) for start, stop in box)]
        if not np.array_equal(values.reshape(wanted.shape), wanted):
            return False
        covers = np.isin(right[piece.start : piece.stop], wanted)
        if not covers.all():
            return False
    return True


def test_a_small_convolution_is_moved_so_that_stock_loads_it() -> None:
    # Cut in the middle, stock Paddle 3.3.1 gets 502 of the 576 elements of the second half wrong.
    assert not stock_loads_exactly((16, 8, 3, 3), [Range(0, 580), Range(580, 1152)])
    buffer = build_flat_buffer("unit", "float32", [(("conv",), (16, 8, 3, 3)), (("other",), (600,))], 2)
    assert stock_loads_exactly((16, 8, 3, 3), pieces_of(buffer, 0))


def test_a_matrix_whose_last_row_is_cut_is_not_left_to_stock() -> None:
    assert not stock_loads_exactly((13, 10), [Range(0, 128), Range(128, 130)])
    assert stock_loads_exactly((13, 10), [Range(0, 64), Range(64, 130)])


@pytest.mark.parametrize(
    ("dtype", "parameters", "world_size"),
    [("int8", [(("a",), (3,))], 2), ("float32", [], 2), ("float32", [(("a",), (3, 0))], 2), ("float32", [(("a",), (3,))], 0)],
)
def test_what_can_not_be_placed_is_refused(dtype: str, parameters: list[tuple[tuple[str], tuple[int, ...]]], world_size: int) -> None:
    with pytest.raises(ValueError, match=r"dtype|no parameters|below 1"):
        build_flat_buffer("unit", dtype, parameters, world_size)


def test_ranges() -> None:
    assert Range(2, 5).intersect(Range(4, 9)) == Range(4, 5)
    assert Range(2, 5).intersect(Range(5, 9)).numel == 0
    assert Range(7, 9).intersect(Range(0, 3)).numel == 0
    with pytest.raises(ValueError, match="not a range"):
        Range(3, 2)
