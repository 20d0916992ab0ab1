"""Stock Paddle's ``0.metadata`` as a stream of bytes: a pickle that is written without an object for each key.

What it says is described in :mod:`.metadata`, which reads such files. It is of protocol 4, as ``paddle.save`` writes it, and makes equal
objects in the same order; ``pickletools`` describes the opcodes. Equal descriptions, shapes and names are written once, and taken from the
memo wherever they come again; what never comes again isn't put there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import TypeAlias, TypeVar

import numpy as np

from .columns import Integers
from .table import PieceTable

Thing = TypeVar("Thing", bound=Hashable)

_MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"  # of Paddle 3.3
_MANY = 4096  # keys, or pieces, in one block
_EMPTY_OBJECT = pickle.EMPTY_TUPLE + pickle.NEWOBJ  # of the class before it
_LIST_BEGIN = pickle.MEMOIZE + pickle.EMPTY_LIST + pickle.MARK  # behind the key, which is kept
_LIST_END = pickle.APPENDS
_SHORT_TEXTS = [pickle.SHORT_BINUNICODE + bytes([nbytes]) for nbytes in range(1 << 8)]  # what stands before them, by their length
_SHORT_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)  # by their length
_KEY_OF_KEY = np.dtype([("get", "S1"), ("number", "<u4"), ("get_again", "S1"), ("number_again", "<u4"), ("tuple", "S1")])

_Place: TypeAlias = "tuple[int, int, int, int]"
"""A part of a tensor, which many keys may have: numbers of its dtype and its box, first and past-the-last element."""


def metadata_blocks(table: PieceTable, file_names: Sequence[str]) -> Iterator[bytes]:
    """Yield ``0.metadata`` for a checkpoint, block by block.

    A part of a tensor that several files hold is said to be in the first of them.

    Args:
        table: what the files store.
        file_names: of these files, as the table counts them.
    """
    yield pickle.PROTO + bytes([4])
    for block in _Writer(table, file_names).blocks():
        yield pickle.FRAME + len(block).to_bytes(8, "little") + block


class _Once(dict[Thing, bytes]):
    """What writes each of some things: the first time what makes it, and keeps it in the memo; from then on what gets it from there.

    Whatever is asked for must be written at once and in this order, since the memo counts what it keeps.
    """

    def __init__(self, memo: Iterator[int], make: Callable[[Thing], bytes]) -> None:
        super().__init__()
        self._memo = memo
        self._make = make

    def __missing__(self, thing: Thing) -> bytes:
        made = self._make(thing)
        self[thing] = _get(next(self._memo))
        return made + pickle.MEMOIZE


class _Writer:
    """One pickle, to be written once.

    Args:
        table: as for :func:`metadata_blocks`.
        file_names: as there.
    """

    def __init__(self, table: PieceTable, file_names: Sequence[str]) -> None:
        self._table = table
        self._rows = _distinct_pieces(table)
        self._row_keys = table.key_numbers[self._rows]
        self._memo = iter(range(1 << 32))
        self._key_numbers = np.zeros(len(table.numbers), np.int64)  # in the memo
        self._texts = _Once(self._memo, _text)
        self._shapes = _Once(self._memo, _integers)
        self._classes = _Once(self._memo, self._class)
        self._descriptions = _Once(self._memo, self._description)
        self._indices = _Once(self._memo, self._index)
        self._files: _Once[int] = _Once(self._memo, lambda number: _text(file_names[number]))

    def blocks(self) -> Iterator[bytes]:
        """Yield all but the number of the protocol."""
        texts = self._texts
        yield self._classes["Metadata"] + _EMPTY_OBJECT + pickle.EMPTY_DICT + pickle.MARK
        yield texts["state_dict_metadata"] + pickle.EMPTY_DICT
        yield from self._descriptions_of_keys()
        yield texts["storage_metadata"] + pickle.EMPTY_DICT
        yield from self._files_of_pieces()
        yield texts["flat_mapping"] + pickle.EMPTY_DICT
        yield from self._keys_of_keys()
        yield pickle.SETITEMS + pickle.BUILD + pickle.STOP

    def _descriptions_of_keys(self) -> Iterator[bytes]:
        keys, descriptions = list(self._table.numbers), self._descriptions
        first = np.searchsorted(self._row_keys, np.arange(len(keys) + 1))
        for start in range(0, len(keys), _MANY):
            bounds = first[start : start + _MANY + 1]
            places = self._places(slice(bounds[0], bounds[-1]))
            parts, numbers = [pickle.MARK], []
            for key, count in zip(keys[start : start + _MANY], np.diff(bounds).tolist(), strict=True):
                numbers.append(next(self._memo))
                parts += _text(key), _LIST_BEGIN, *map(descriptions.__getitem__, islice(places, count)), _LIST_END
            self._key_numbers[start : start + _MANY] = numbers
            yield b"".join([*parts, pickle.SETITEMS])

    def _files_of_pieces(self) -> Iterator[bytes]:
        for start in range(0, len(self._rows), _MANY):
            some = slice(start, start + _MANY)
            rows, keys = self._rows[some], self._key_numbers[self._row_keys[some]]
            # An index gets its key, and then, from the memo, all else, which is the same for many keys.
            parts = zip(
                map(self._classes.__getitem__, repeat("LocalTensorIndex", len(rows))),
                repeat(_EMPTY_OBJECT + pickle.EMPTY_DICT, len(rows)),
                map(self._texts.__getitem__, repeat("tensor_key", len(rows))),
                map(_get, keys.tolist()),
                repeat(pickle.SETITEM + pickle.BUILD, len(rows)),
                map(self._indices.__getitem__, self._places(some)),
                repeat(pickle.BUILD, len(rows)),
                map(self._files.__getitem__, self._table.files[rows].tolist()),
                strict=True,
            )
            yield b"".join([pickle.MARK, *chain.from_iterable(parts), pickle.SETITEMS])

    def _keys_of_keys(self) -> Iterator[bytes]:
        """Yield each key with a tuple of itself: none is nested in another."""
        for start in range(0, len(self._key_numbers), _MANY):
            numbers = self._key_numbers[start : start + _MANY]
            items = np.zeros(len(numbers), _KEY_OF_KEY)
            items["get"] = items["get_again"] = pickle.LONG_BINGET
            items["number"] = items["number_again"] = numbers
            items["tuple"] = pickle.TUPLE1
            yield pickle.MARK + items.tobytes() + pickle.SETITEMS

    def _places(self, some: slice) -> Iterator[_Place]:
        """Return the places of some of the rows."""
        table, rows = self._table, self._rows[some]
        columns = (table.key_dtypes[self._row_keys[some]], table.box_numbers[rows], table.starts[rows], table.stops[rows])
        return zip(*(one.tolist() for one in columns), strict=True)

    def _class(self, name: str) -> bytes:
        return self._texts[_MODULE] + self._texts[name] + pickle.STACK_GLOBAL

    def _description(self, place: _Place) -> bytes:
        texts, shapes, (dtype, box, _, _) = self._texts, self._shapes, place
        written = self._classes["LocalTensorMetadata"] + _EMPTY_OBJECT + pickle.EMPTY_DICT + pickle.MARK
        written += texts["global_offset"] + shapes[self._table.boxes[box].global_offset]
        written += texts["local_shape"] + shapes[self._table.boxes[box].local_shape]
        written += texts["dtype"] + texts[self._table.dtypes[dtype]]
        written += texts["global_shape"] + shapes[self._table.boxes[box].global_shape]
        return written + self._flat_range(place) + pickle.SETITEMS + pickle.BUILD

    def _index(self, place: _Place) -> bytes:
        """Return what makes the attributes of an index but for its key."""
        texts, shapes, box = self._texts, self._shapes, self._table.boxes[place[1]]
        written = pickle.EMPTY_DICT + pickle.MARK + texts["global_offset"] + shapes[box.global_offset] + self._flat_range(place)
        return written + texts["replica_id"] + pickle.NONE + texts["local_shape"] + shapes[box.local_shape] + pickle.SETITEMS

    def _flat_range(self, place: _Place) -> bytes:
        _, box, start, stop = place
        is_flat = stop - start != self._table.boxes[box].numel
        written = self._texts["is_flattened"] + (pickle.NEWTRUE if is_flat else pickle.NEWFALSE) + self._texts["flattened_range"]
        return written + (self._shapes[start, stop] if is_flat else pickle.NONE)


def _distinct_pieces(table: PieceTable) -> Integers:
    """Return the positions of the pieces, those of a key in the order of the files; of equal ones of a key only the first."""
    keys, files = table.key_numbers, table.files
    order = np.lexsort((files, table.stops, table.box_numbers, table.starts, keys))
    is_new = np.arange(len(order)) == 0
    for one in (keys, table.starts, table.box_numbers, table.stops):
        is_new[1:] |= np.diff(one[order]) != 0
    distinct = order[is_new]
    return distinct[np.lexsort((files[distinct], keys[distinct]))]


def _get(number: int) -> bytes:
    return pickle.BINGET + number.to_bytes(1, "little") if number < 1 << 8 else pickle.LONG_BINGET + number.to_bytes(4, "little")


def _text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) < len(_SHORT_TEXTS):
        return _SHORT_TEXTS[len(encoded)] + encoded
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


def _integers(numbers: tuple[int, ...]) -> bytes:
    written = b"".join(map(_integer, numbers))
    if len(numbers) > len(_SHORT_TUPLES) - 1:
        return pickle.MARK + written + pickle.TUPLE
    return written + _SHORT_TUPLES[len(numbers)]


def _integer(number: int) -> bytes:
    """Return what makes an integer from 0 on."""
    if number < 1 << 8:
        return pickle.BININT1 + number.to_bytes(1, "little")
    if number < 1 << 16:
        return pickle.BININT2 + number.to_bytes(2, "little")
    if number < 1 << 31:
        return pickle.BININT + number.to_bytes(4, "little")
    return pickle.LONG1 + bytes([8]) + number.to_bytes(8, "little", signed=True)
