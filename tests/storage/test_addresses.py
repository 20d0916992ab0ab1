"""Bytes at many places of memory, in an order of their own, right from numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_fsdp_ckpt.storage import buffers
from paddle_fsdp_ckpt.storage.addresses import Places, address_of


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=8), st.integers(1, 20), st.integers(20, 60))
def test_all_bytes_in_their_order(parts: list[tuple[int, int]], small: int, together: int) -> None:
    """Wherever they lie, also twice or over each other, and whatever counts as small."""
    memory = np.random.default_rng(0).integers(0, 256, 90, np.uint8)
    first = memory.ctypes.data
    places = Places(np.array([first + start for start, _ in parts], np.int64), np.array([nbytes for _, nbytes in parts], np.int64))
    expected = b"".join(memory[start : start + nbytes].tobytes() for start, nbytes in parts)
    kept = buffers._SMALL_NBYTES, buffers._TOGETHER_NBYTES
    buffers._SMALL_NBYTES, buffers._TOGETHER_NBYTES = small, together
    try:
        made = list(places.buffers())
    finally:
        buffers._SMALL_NBYTES, buffers._TOGETHER_NBYTES = kept
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
