"""Where in this host's memory the values of many keys lie, in columns: a model of many parameters has hundreds of thousands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import numpy as np
import paddle
from numpy.typing import NDArray


class SuffixedNames(Sequence[str]):
    """Texts that are each a name and a suffix, as the keys of states are; made when they are asked for, since they take much memory.

    Args:
        tables: names, and the suffix that they all have.
    """

    def __init__(self, *tables: tuple[Sequence[str], str]) -> None:
        self._tables = tables
        self._stops = list(accumulate(len(names) for names, _ in tables))

    @classmethod
    def joined(cls, several: Iterable[SuffixedNames]) -> SuffixedNames:
        """Return several as one."""
        return cls(*(table for one in several for table in one._tables))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __iter__(self) -> Iterator[str]:
        for names, suffix in self._tables:
            yield from (name + suffix for name in names)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        """Return one, or several."""
        positions = range(len(self))[number]
        if isinstance(positions, range):
            return [self[position] for position in positions]
        table = bisect_right(self._stops, positions)
        names, suffix = self._tables[table]
        return names[positions - self._stops[table]] + suffix  # counted from the end of the table


@dataclass(frozen=True, eq=False)
class LivePlaces:
    """Where this rank keeps values of several keys, in this host's memory; entry ``i`` of each column is of the same key.

    Attributes:
        keys: state dict keys.
        dtypes: Paddle's dtype names.
        shapes: of the whole tensors.
        starts: which of the flattened whole tensor's elements are kept, from here on ...
        stops: ... up to here.
        addresses: of the memory that holds just these elements, one behind the other.
        stored: whether this rank is the one that stores these elements, where nothing is kept by replicas.
        tensors: what keeps that memory where it is.
    """

    keys: SuffixedNames
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    addresses: NDArray[np.int64]
    stored: NDArray[np.bool_]
    tensors: list[paddle.Tensor]

    @classmethod
    def joined(cls, several: Sequence[LivePlaces]) -> LivePlaces:
        """Return several, at least one, as one."""
        return cls(
            SuffixedNames.joined(one.keys for one in several),
            [dtype for one in several for dtype in one.dtypes],
            [shape for one in several for shape in one.shapes],
            np.concatenate([one.starts for one in several]),
            np.concatenate([one.stops for one in several]),
            np.concatenate([one.addresses for one in several]),
            np.concatenate([one.stored for one in several]),
            [tensor for one in several for tensor in one.tensors],
        )
