"""What ranks hold of each key, sent back by them, and put together by a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StatePiece:
    """A rank's piece of one key: box offset, box shape, flat range or None, and the values."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    flat_range: tuple[int, int] | None
    values: np.ndarray


def assemble(ranks: Sequence[Mapping[str, StatePiece]]) -> dict[str, np.ndarray]:
    """Put the ranks' pieces together, and check that they cover every key just once, or are equal replicas."""
    arrays: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for pieces in ranks:
        for key, piece in pieces.items():
            array = arrays.setdefault(key, np.zeros(int(np.prod(piece.global_shape)), piece.values.dtype))
            count = counts.setdefault(key, np.zeros(array.shape, int))
            if piece.local_shape != piece.global_shape:
                assert key.endswith(".y_0"), "both runtimes cut flat only, save what is stacked"
                assert piece.flat_range is None
                box = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.local_shape, strict=True))
                array.reshape(piece.global_shape)[box] = piece.values
                count.reshape(piece.global_shape)[box] += 1
                continue
            assert piece.offset == (0,) * len(piece.global_shape)
            start, stop = piece.flat_range or (0, array.size)
            if piece.flat_range is None and count.any():
                np.testing.assert_array_equal(array, piece.values.reshape(-1), err_msg=f"replicas of {key} differ")
                continue
            array[start:stop] = piece.values.reshape(-1)
            count[start:stop] += 1
    for key, count in counts.items():
        assert (count == 1).all(), f"{key} is not covered once: {count}"
    return arrays


def assert_equal_states(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """Every key, bit for bit."""
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert array.dtype == other[key].dtype, key
        np.testing.assert_array_equal(array, other[key], err_msg=key)
