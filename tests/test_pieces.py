from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Overlap, Piece, check_piece, only_difference, overlaps, ranges_inside


def values_of(piece: Piece) -> np.ndarray:
    """Cut the piece's elements out of the whole tensor, each element numbered by its place in it."""
    whole = np.arange(math.prod(piece.global_shape)).reshape(piece.global_shape)
    box = whole[tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.local_shape, strict=True))]
    return box.reshape(-1)[piece.box_range.start : piece.box_range.stop]


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> Piece:
    whole_box = draw(st.booleans())
    bounds = [(0, size) if whole_box else sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    offset, local = tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
    flat = None
    if draw(st.booleans()):
        numel = math.prod(local)
        flat = Range(*sorted(draw(st.tuples(st.integers(0, numel), st.integers(0, numel)))))
    return Piece("k", "float32", shape, offset, local, flat)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Piece, Piece]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    return draw(pieces(shape)), draw(pieces(shape))


@settings(max_examples=1500, deadline=None)
@given(pairs())
def test_overlaps_are_exactly_the_elements_that_both_pieces_hold(pair: tuple[Piece, Piece]) -> None:
    source, target = pair
    check_piece(source)
    check_piece(target)
    source_values, target_values = values_of(source), values_of(target)
    read = np.full(target_values.shape, -1)
    runs = list(overlaps(source, target))
    for run in runs:
        assert run.numel > 0
        part = read[run.target_start : run.target_start + run.numel]
        assert part.size == run.numel and (part == -1).all(), "each element once"
        part[:] = source_values[run.source_start : run.source_start + run.numel]
    expected = np.where(np.isin(target_values, source_values), target_values, -1)
    np.testing.assert_array_equal(read, expected)
    for before, after in itertools.pairwise(runs):
        assert after.source_start >= before.source_start + before.numel and after.target_start >= before.target_start + before.numel
        joined = Overlap(before.source_start + before.numel, before.target_start + before.numel, after.numel)
        assert after != joined, "neighbouring runs are one run"


def test_a_flat_range_against_the_whole_tensor_is_one_run() -> None:
    whole = Piece("k", "float32", (1000, 1000), (0, 0), (1000, 1000))
    shard = Piece("k", "float32", (1000, 1000), (0, 0), (1000, 1000), Range(999, 500_001))
    assert list(overlaps(whole, shard)) == [Overlap(999, 0, 499_002)]
    assert list(overlaps(shard, whole)) == [Overlap(0, 999, 499_002)]


def test_rows_that_a_narrow_flat_range_does_not_touch_cost_nothing() -> None:
    left = Piece("k", "float32", (10**9, 8), (0, 0), (10**9, 4), Range(4 * 10**8, 4 * 10**8 + 6))
    whole = Piece("k", "float32", (10**9, 8), (0, 0), (10**9, 8))
    assert list(overlaps(left, whole)) == [Overlap(0, 8 * 10**8, 4), Overlap(4, 8 * 10**8 + 8, 2)]


def test_scalars_overlap_in_their_one_element() -> None:
    scalar = Piece("k", "float32", (), (), ())
    assert list(overlaps(scalar, scalar)) == [Overlap(0, 0, 1)]


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece("w", "float32", (4, 4), (0,), (4, 4)), "different numbers of dimensions"),
        (Piece("w", "float32", (4, 4), (0, 0), (4,)), "different numbers of dimensions"),
        (Piece("w", "float32", (4, 4), (0, 1), (4, 4)), "inside of the tensor's shape"),
        (Piece("w", "float32", (4, 4), (-1, 0), (4, 4)), "inside of the tensor's shape"),
        (Piece("w", "float32", (4, 4), (0, 0), (4, -1)), "inside of the tensor's shape"),
        (Piece("w", "float32", (4, 4), (0, 0), (2, 4), Range(0, 9)), r"flat range \[0, 9\)"),
        (Piece("w", "float32", (), (), (), Range(0, 2)), r"flat range \[0, 2\)"),
    ],
)
def test_a_piece_outside_of_its_tensor_is_refused(piece: Piece, message: str) -> None:
    with pytest.raises(ValueError, match=f"'w'.*{message}"):
        check_piece(piece)


@st.composite
def targets_beyond(draw: st.DrawFn) -> tuple[Piece, Piece]:
    """A piece that is stored of a tensor, and one that is wanted of the tensor that it has become, as one of the stored tensor."""
    now = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(now) - 1))
    stored = tuple(draw(st.integers(0, 6)) if i == axis else size for i, size in enumerate(now))
    return draw(pieces(stored)), replace(draw(pieces(now)), global_shape=stored)


@settings(max_examples=1500, deadline=None)
@given(targets_beyond())
def test_pieces_that_reach_beyond_their_tensor(pair: tuple[Piece, Piece]) -> None:
    """Each element has its place in a tensor that is as large as both."""
    source, target = pair
    both = tuple(max(size, o + n) for size, o, n in zip(target.global_shape, target.global_offset, target.local_shape, strict=True))
    source_values, target_values = values_of(replace(source, global_shape=both)), values_of(replace(target, global_shape=both))
    read = np.full(target_values.shape, -1)
    for run in overlaps(source, target):
        assert (read[run.target_start : run.target_start + run.numel] == -1).all()
        read[run.target_start : run.target_start + run.numel] = source_values[run.source_start : run.source_start + run.numel]
    np.testing.assert_array_equal(read, np.where(np.isin(target_values, source_values), target_values, -1))
    stored = values_of(Piece("k", "float32", both, (0,) * len(both), target.global_shape))
    inside = np.zeros(target_values.shape, bool)
    for one in ranges_inside(target):
        assert one.numel and not inside[one.start : one.stop].any()
        inside[one.start : one.stop] = True
    np.testing.assert_array_equal(inside, np.isin(target_values, stored))


@pytest.mark.parametrize(
    ("shape", "other", "dimension"),
    [((3, 4), (5, 4), 0), ((3, 4), (3, 2), 1), ((3, 4), (3, 4), None), ((3, 4), (4, 3), None), ((3,), (3, 4), None), ((), (), None)],
)
def test_the_only_dimension_that_differs(shape: tuple[int, ...], other: tuple[int, ...], dimension: int | None) -> None:
    assert only_difference(shape, other) == dimension
