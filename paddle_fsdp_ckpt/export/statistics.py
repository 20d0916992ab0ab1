"""What the values of a key are like, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..pieces import Piece
from ..storage.casts import convert
from ..storage.format import DTYPE_NBYTES
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


def statistics_of(index: CheckpointIndex, pieces: Sequence[Piece], progress: Callable[[int, int], None] | None) -> list[Statistics]:
    """Read the values of pieces, and say what those of each are like.

    Args:
        index: of their checkpoint.
        pieces: of it.
        progress: called now and then with the number of bytes read so far, and of all.

    Raises:
        What :func:`~.values.iter_values` raises.
    """
    found = [Statistics(None, None, None, 0, 0)] * len(pieces)
    totals, counts = [0.0] * len(pieces), [0] * len(pieces)
    done, total = 0, sum(piece.numel * DTYPE_NBYTES[piece.dtype] for piece in pieces)
    for part in iter_values(index, pieces):
        values = as_float64(part.values, pieces[part.number].dtype)
        numbers = values[~np.isnan(values)]
        finite = numbers[np.isfinite(numbers)]
        totals[part.number] += float(finite.sum())
        counts[part.number] += len(finite)
        so_far = found[part.number]
        found[part.number] = Statistics(
            min(_both(so_far.minimum, numbers.min(initial=np.inf), len(numbers)), default=None),
            max(_both(so_far.maximum, numbers.max(initial=-np.inf), len(numbers)), default=None),
            totals[part.number] / counts[part.number] if counts[part.number] else None,
            so_far.nan + len(values) - len(numbers),
            so_far.infinite + len(numbers) - len(finite),
        )
        done += len(values) * DTYPE_NBYTES[pieces[part.number].dtype]
        if progress is not None:
            progress(done, total)
    return found


def _both(so_far: float | None, new: float, count: int) -> list[float]:
    return ([] if so_far is None else [so_far]) + ([float(new)] if count else [])


def as_float64(values: Array, dtype: str) -> Array:
    """Return values, as a checkpoint's parts have them, as float64; int64 beyond 2**53 are rounded."""
    return convert(values, dtype, "float64")[0] if dtype == "bfloat16" else values.astype(np.float64)
