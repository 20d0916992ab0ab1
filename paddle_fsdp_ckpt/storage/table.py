"""All pieces that the files of one checkpoint store, by key and place, as columns: for whoever asks of all keys at once."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .columns import FileColumns, Integers, numbered, numbers_of, renumbered
from .entries import Box, Stored

Said = TypeVar("Said")

_KEYS_AT_A_TIME = 4096
_GATHERED = {"keys": np.int32, "dtypes": np.int32, "boxes": np.int32, "starts": np.int64, "stops": np.int64, "offsets": np.int64}
"""What is gathered of all files, file by file, and how."""


@dataclass(frozen=True, eq=False)
class PieceTable:
    """The pieces of all files, those of a key together, in the order of their first elements.

    Attributes:
        numbers: key -> its number, counted from 0 in the order in which the files have the keys.
        dtypes: the dtypes that there are: Paddle's names.
        key_dtypes: number of the dtype of each key.
        shapes: the shapes that there are, of whole tensors.
        key_shapes: number of the shape of each key.
        first: position of the first piece of each key, and at the end how many pieces there are.
        files: position of each piece's file in the index.
        boxes: the boxes that there are.
        box_numbers: which of these each piece is a part of.
        starts: first element of the box.
        stops: past-the-last element.
        offsets: first byte in the file.
    """

    numbers: dict[str, int]
    dtypes: Sequence[str]
    key_dtypes: Integers
    shapes: Sequence[tuple[int, ...]]
    key_shapes: Integers
    first: Integers
    files: Integers
    boxes: Sequence[Box]
    box_numbers: Integers
    starts: Integers
    stops: Integers
    offsets: Integers

    @property
    def key_numbers(self) -> Integers:
        """The number of each piece's key."""
        return np.repeat(np.arange(len(self.numbers)), np.diff(self.first))

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """Whether each piece is a part of the flattened whole tensor, not only of a box in it."""
        whole = [box.local_shape == box.global_shape for box in self.boxes]
        return np.array(whole, np.bool_)[self.box_numbers]

    @property
    def key_numels(self) -> Integers:
        """How many elements the whole tensor of each key has."""
        return np.array([math.prod(shape) for shape in self.shapes], np.int64)[self.key_shapes]

    def uncovered_keys(self) -> list[str]:
        """Return the keys whose pieces are something else than ranges of the flattened tensor that follow each other up to its end."""
        if not self.numbers:
            return []
        begins_here = np.zeros(len(self.starts), np.bool_)
        begins_here[self.first[:-1]] = True
        expected = np.where(begins_here, 0, np.concatenate([[0], self.stops[:-1]]))
        follows = np.logical_and.reduceat(self.is_whole & (self.starts == expected), self.first[:-1])
        is_covered = follows & (self.stops[self.first[1:] - 1] == self.key_numels)
        return [key for key, covered in zip(self.numbers, is_covered.tolist(), strict=True) if not covered]

    def walk(self) -> Iterator[tuple[str, list[Stored]]]:
        """Yield each key with its pieces, in the order of the files; only a few at a time are made."""
        order = np.lexsort((self.files, self.key_numbers))
        keys = list(self.numbers)
        for number in range(0, len(keys), _KEYS_AT_A_TIME):
            first = self.first[number : number + _KEYS_AT_A_TIME + 1].tolist()
            rows = order[first[0] : first[-1]]
            boxes = map(self.boxes.__getitem__, self.box_numbers[rows].tolist())
            places = (one[rows].tolist() for one in (self.starts, self.stops, self.offsets))
            pieces = list(zip(self.files[rows].tolist(), boxes, *places, strict=True))
            for key, (start, stop) in zip(keys[number : number + _KEYS_AT_A_TIME], pairwise(first), strict=True):
                yield key, pieces[start - first[0] : stop - first[0]]

    def dtype_of_each(self) -> dict[str, str]:
        """Return the dtype of each key."""
        return dict(zip(self.numbers, map(self.dtypes.__getitem__, self.key_dtypes.tolist()), strict=True))

    def without(self, prefix: str) -> PieceTable:
        """Return the table without the keys that begin with something."""
        unwanted = [number for key, number in self.numbers.items() if key.startswith(prefix)]
        if not unwanted:
            return self
        wanted = np.ones(len(self.numbers), np.bool_)
        wanted[unwanted] = False
        return self._of(wanted)

    def only(self, prefix: str) -> PieceTable:
        """Return the table of the keys that begin with something."""
        wanted = np.zeros(len(self.numbers), np.bool_)
        wanted[[number for key, number in self.numbers.items() if key.startswith(prefix)]] = True
        return self._of(wanted)

    def _of(self, wanted: NDArray[np.bool_]) -> PieceTable:
        """Return the table of the keys of which it says so."""
        pieces = wanted[self.key_numbers]
        keys = [key for key, is_wanted in zip(self.numbers, wanted.tolist(), strict=True) if is_wanted]
        return replace(
            self,
            numbers=numbers_of(keys),
            key_dtypes=self.key_dtypes[wanted],
            key_shapes=self.key_shapes[wanted],
            first=_sums(np.diff(self.first)[wanted]),
            files=self.files[pieces],
            box_numbers=self.box_numbers[pieces],
            starts=self.starts[pieces],
            stops=self.stops[pieces],
            offsets=self.offsets[pieces],
        )


def table_of(files: Iterable[FileColumns]) -> PieceTable | None:
    """Return the table of all pieces in some files; None where a key has another dtype or shape in one file than in another.

    Files that are read one by one are let go of one by one: of many, the texts of their keys take most of the memory.
    """
    numbers: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    boxes: dict[Box, int] = {}
    counts: list[int] = []
    columns = {name: bytearray() for name in _GATHERED}
    for one in files:
        counts.append(len(one.keys))
        found = {
            "keys": renumbered(numbers, one.keys),
            "dtypes": renumbered(dtypes, one.dtypes)[one.dtype_numbers],
            "boxes": renumbered(boxes, one.boxes)[one.box_numbers],
            "starts": one.starts,
            "stops": one.stops,
            "offsets": one.offsets,
        }
        # Not as an array for each file, since thousands of small ones leave holes in the heap.
        for name, column in found.items():
            columns[name] += column.astype(_GATHERED[name]).tobytes()

    def take(name: str) -> Integers:
        return np.frombuffer(columns.pop(name), _GATHERED[name])

    keys, dtype_numbers, box_numbers = take("keys"), take("dtypes"), take("boxes")
    shapes_of_boxes, shapes = numbered(box.global_shape for box in boxes)
    shape_numbers = shapes_of_boxes[box_numbers]
    # Any of a key's pieces will do, since all must be alike.
    key_dtypes, key_shapes = np.zeros((2, len(numbers)), np.int32)
    key_dtypes[keys], key_shapes[keys] = dtype_numbers, shape_numbers
    if (key_dtypes[keys] != dtype_numbers).any() or (key_shapes[keys] != shape_numbers).any():
        return None
    starts = take("starts")
    order = np.lexsort((starts, keys))
    return PieceTable(
        numbers=numbers,
        dtypes=list(dtypes),
        key_dtypes=key_dtypes,
        shapes=shapes,
        key_shapes=key_shapes,
        first=_sums(np.bincount(keys, minlength=len(numbers))),
        files=np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order],
        boxes=list(boxes),
        box_numbers=box_numbers[order],
        starts=starts[order],
        stops=take("stops")[order],
        offsets=take("offsets")[order],
    )


def _sums(counts: Integers) -> Integers:
    """Return how many there are before each, and at the end of all."""
    return np.concatenate([[0], np.cumsum(counts)])


class _OfEachKey(Mapping[str, Said]):
    """What a table says of each key, made when it is asked for first."""

    def __init__(self, table: PieceTable) -> None:
        self.table = table

    def __getitem__(self, key: str) -> Said:
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.numbers)

    def __len__(self) -> int:
        return len(self.table.numbers)

    def __contains__(self, key: object) -> bool:
        return key in self.table.numbers

    def keys(self) -> KeysView[str]:
        """The keys, in the order in which the files have them."""
        return self.table.numbers.keys()

    def items(self) -> ItemsView[str, Said]:
        """Each key with what is said of it, in the same order."""
        return self._by_key.items()

    @cached_property
    def _by_key(self) -> dict[str, Said]:
        return self._make()

    @abstractmethod
    def _make(self) -> dict[str, Said]: ...


class DtypesInTable(_OfEachKey[str]):
    """The dtype of each key."""

    def _make(self) -> dict[str, str]:
        return self.table.dtype_of_each()


class StoredInTable(_OfEachKey["list[Stored]"]):
    """The pieces of each key, in the order of the files."""

    def _make(self) -> dict[str, list[Stored]]:
        return dict(self.table.walk())
