"""How replicas divide what they write: every element once, about equal shares, and cut where stock Paddle loads it right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fsdp_ckpt.division import written_range
from paddle_fsdp_ckpt.layout import ITEM_SIZES, FlatBuffer, build_flat_buffer, stock_loads_exactly

SIZES = st.sampled_from([1, 2, 3, 5, 8, 16, 33])
SHAPES = st.one_of(st.lists(SIZES, max_size=4), st.lists(st.integers(1, 4000), min_size=1, max_size=1))


@settings(max_examples=60, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=6), st.sampled_from(sorted(ITEM_SIZES)), st.integers(1, 4), st.integers(1, 3))
def test_every_element_is_written_once_and_loads_right(shapes: list[list[int]], dtype: str, world_size: int, replicas: int) -> None:
    buffer = build_flat_buffer("b", dtype, [([f"p{number}"], shape) for number, shape in enumerate(shapes)], world_size)
    for slot in buffer.slots:
        written = [written_range(buffer, slot, rank, replica, replicas) for rank in range(world_size) for replica in range(replicas)]
        pieces = sorted((piece for piece in written if piece.numel), key=lambda piece: piece.start)
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == slot.numel
        assert len(slot.shape) < 2 or stock_loads_exactly(slot.shape, pieces)


def shares(buffer: FlatBuffer, rank: int, replicas: int) -> list[int]:
    return [sum(written_range(buffer, slot, rank, replica, replicas).numel for slot in buffer.slots) for replica in range(replicas)]


def test_shares_are_about_equal() -> None:
    one = build_flat_buffer("b", "float32", [(["embed"], [151936, 2048])], 8)
    assert shares(one, 3, 4) == [151936 * 2048 // 32] * 4
    convolutions = build_flat_buffer("b", "float32", [([f"c{number}"], [64, 32, 3, 3]) for number in range(4)], 2)
    for rank in range(2):
        assert max(shares(convolutions, rank, 2)) < 1.05 * min(shares(convolutions, rank, 2))


def test_what_can_not_be_cut_right_is_written_by_one_replica_of_each_rank() -> None:
    buffer = build_flat_buffer("b", "float32", [(["p"], [5, 33])], 3)
    (slot,) = buffer.slots
    for rank in range(3):
        kept = buffer.local_range(slot, rank)
        assert sorted(written_range(buffer, slot, rank, replica, 2).numel for replica in range(2)) == [0, kept.numel]
