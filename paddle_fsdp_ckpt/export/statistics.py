"""What the values of a key are like, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..pieces import Piece
from ..storage.casts import convert
from ..storage.index import CheckpointIndex
from .values import Array, iter_values


@dataclass(frozen=True)
class Statistics:
    """What the values of one key are like.

    Attributes:
        minimum: of the values that are numbers; None where none is.
        maximum: of the values that are numbers; None where none is.
        mean: of the finite values; None where none is.
        nan: how many are not numbers.
        infinite: how many are infinite.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    nan: int
    infinite: int


def statistics_of(index: CheckpointIndex, piece: Piece) -> Statistics:
    """Read a piece's values, and say what they are like.

    Raises:
        What :func:`~.values.iter_values` raises.
    """
    minima, maxima = [], []
    total, finite, nan, infinite = 0.0, 0, 0, 0
    for part in iter_values(index, [piece]):
        values = as_float64(part.values, piece.dtype)
        numbers = values[~np.isnan(values)]
        inside = numbers[np.isfinite(numbers)]
        nan += len(values) - len(numbers)
        infinite += len(numbers) - len(inside)
        finite += len(inside)
        total += float(inside.sum())
        if len(numbers):
            minima.append(float(numbers.min()))
            maxima.append(float(numbers.max()))
    mean = total / finite if finite else None
    return Statistics(min(minima, default=None), max(maxima, default=None), mean, nan, infinite)


def as_float64(values: Array, dtype: str) -> Array:
    """Return values, as a checkpoint's parts have them, as float64; int64 beyond 2**53 are rounded."""
    return convert(values, dtype, "float64")[0] if dtype == "bfloat16" else values.astype(np.float64)
