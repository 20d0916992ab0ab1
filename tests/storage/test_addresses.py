"""Bytes at many places of memory, in an order of their own, right from numpy."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_fsdp_ckpt.storage import addresses
from paddle_fsdp_ckpt.storage.addresses import Places, address_of, copy_places


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=8), st.integers(1, 20), st.integers(20, 60))
def test_all_bytes_in_their_order(parts: list[tuple[int, int]], small: int, together: int) -> None:
    """Wherever they lie, also twice or over each other, and whatever counts as small."""
    memory = np.random.default_rng(0).integers(0, 256, 90, np.uint8)
    first = memory.ctypes.data
    places = Places(np.array([first + start for start, _ in parts], np.int64), np.array([nbytes for _, nbytes in parts], np.int64))
    expected = b"".join(memory[start : start + nbytes].tobytes() for start, nbytes in parts)
    with patch.object(addresses, "SMALL_NBYTES", small), patch.object(addresses, "TOGETHER_NBYTES", together):
        made = list(places.buffers())
    assert b"".join(made) == expected and all(made)
    assert places.total == len(expected)
    assert [bytes(view) for view in places.views()] == [memory[start : start + nbytes].tobytes() for start, nbytes in parts]
    copied = bytearray(len(expected) + 1)
    places.copy_to(address_of(copied))
    assert copied == expected + b"\0"


def test_large_places_are_not_copied_and_neighbours_are_one() -> None:
    memory = np.arange(200_000, dtype=np.uint8)
    first = memory.ctypes.data
    places = Places(np.array([first, first + 50_000, first + 150_000]), np.array([50_000, 50_000, 50_000]))
    one, other = places.buffers()
    assert (len(one), len(other)) == (100_000, 50_000)
    assert (address_of(one), address_of(other)) == (first, first + 150_000)


@given(st.lists(st.integers(1, 80), min_size=1, max_size=120), st.integers(1, 5), st.integers(1, 90), st.randoms(use_true_random=False))
def test_many_places_get_their_bytes_and_nothing_else_changes(sizes: list[int], many: int, tiny: int, random: Random) -> None:
    """Of whatever sizes, in whatever order, at addresses that nothing divides, and in memories that lie apart."""
    source = np.random.default_rng(0).integers(0, 256, sum(sizes) + 7, np.uint8)
    targets = [np.zeros(sum(sizes) + 2 * len(sizes), np.uint8) for _ in range(2)]
    expected = [one.copy() for one in targets]
    places = []
    begin = 3
    for number, size in enumerate(sizes):
        whose = random.randrange(2)
        start = begin - 3 + 2 * number
        expected[whose][start : start + size] = source[begin : begin + size]
        places.append((targets[whose].ctypes.data + start, source.ctypes.data + begin, size))
        begin += size
    random.shuffle(places)
    with patch.object(addresses, "_MANY", many), patch.object(addresses, "_TINY_NBYTES", tiny):
        copy_places(*np.array(places, np.int64).T)
    assert all(np.array_equal(one, other) for one, other in zip(targets, expected, strict=True))
