"""What a file stores, a column for each thing that is said of its pieces: how many thousand of them are written, read and kept.

Written, some pieces are one text: base64 of zlib of a line of JSON, ``[keys, dtypes, outlines]``, and behind it, little-endian and for each
piece, one column after the other: number of its dtype (1 byte), of its outline (4), first and past-the-last element of its box (8 each).
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..pieces import Piece
from .entries import MAX_NUMEL, Box, Entry, Outline, box_of
from .format import DTYPE_NBYTES
from .json_values import JsonValue, parse_json

Integers: TypeAlias = "NDArray[np.signedinteger[Any]]"
"""Sizes and places are of 64 bits; of 32, to take less memory, is what numbers things that are all in memory."""

Thing = TypeVar("Thing", bound=Hashable)

_COLUMNS = ("u1", "<u4", "<u8", "<u8")
_PIECE_NBYTES = sum(np.dtype(one).itemsize for one in _COLUMNS)
_LEVEL = 1  # the fastest; what lies beside it in a header is many times as long


@dataclass(frozen=True, eq=False)
class FileColumns:
    """What one file stores, in the order of its data; position ``i`` of each column is the same piece.

    Attributes:
        keys: of the pieces, each once.
        dtypes: the dtypes that there are: Paddle's names.
        dtype_numbers: which of these each piece has.
        boxes: the boxes that there are.
        box_numbers: which of these each piece is a part of.
        starts: first element of the box; as in :data:`~.entries.Entry`, and so is the rest.
        stops: past-the-last element.
        offsets: first byte in the file.
    """

    keys: Sequence[str]
    dtypes: Sequence[str]
    dtype_numbers: Integers
    boxes: Sequence[Box]
    box_numbers: Integers
    starts: Integers
    stops: Integers
    offsets: Integers

    def entries(self) -> Iterator[Entry]:
        """Yield the pieces one by one."""
        dtypes = map(self.dtypes.__getitem__, self.dtype_numbers.tolist())
        boxes = map(self.boxes.__getitem__, self.box_numbers.tolist())
        return zip(self.keys, dtypes, boxes, self.starts.tolist(), self.stops.tolist(), self.offsets.tolist(), strict=True)


def columns_of(entries: Iterable[Entry]) -> FileColumns:
    """Return the columns of pieces that are known one by one."""
    rows = list(entries)
    keys, dtypes, boxes, *places = zip(*rows, strict=True) if rows else ((),) * 6
    dtype_numbers, all_dtypes = numbered(dtypes)
    box_numbers, all_boxes = numbered(boxes)
    starts, stops, offsets = (np.array(one, np.int64) for one in places)
    return FileColumns(keys, all_dtypes, dtype_numbers, all_boxes, box_numbers, starts, stops, offsets)


def numbered(things: Iterable[Thing]) -> tuple[Integers, list[Thing]]:
    """Return a number for each thing, equal for equal ones, and the distinct things in the order of their numbers."""
    things = list(things)
    distinct = list(dict.fromkeys(things))
    return looked_up(numbers_of(distinct), things), distinct


def numbers_of(distinct: Iterable[Thing]) -> dict[Thing, int]:
    """Return the position of each of several things."""
    return {thing: number for number, thing in enumerate(distinct)}


def looked_up(numbers: dict[Thing, int], things: Sequence[Thing]) -> Integers:
    """Return the number that each thing has; -1 for those that have none."""
    return np.fromiter(map(numbers.get, things, repeat(-1)), np.int32, len(things))


def renumbered(known: dict[Thing, int], things: Iterable[Thing]) -> Integers:
    """Return the number of each thing among all that are known; those that weren't are from now on, with the next numbers."""
    things = list(things)
    for thing in things:
        known.setdefault(thing, len(known))
    return looked_up(known, things)


def merged(columns: Iterable[tuple[Sequence[Thing], Integers]]) -> tuple[Integers, list[Thing]]:
    """Return columns of numbers, each with what these stand for, as one: the numbers, and all that they stand for."""
    known: dict[Thing, int] = {}
    return concatenated([renumbered(known, things)[numbers] for things, numbers in columns]), list(known)


def concatenated(columns: Sequence[Integers]) -> Integers:
    """Return columns one behind the other; there may be none."""
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def encode_columns(pieces: Sequence[Piece]) -> str:
    """Return, as text, what :func:`decode_columns` makes of pieces that lie in a file one behind the other.

    Args:
        pieces: at least one, all with elements.

    Raises:
        UnicodeEncodeError: a key is not valid Unicode.
    """
    dtype_numbers, dtypes = numbered(piece.dtype for piece in pieces)
    outline_numbers, outlines = numbered(map(_outline_of, pieces))
    flats = [piece.flat_range for piece in pieces]
    starts = [0 if flat is None else flat.start for flat in flats]
    stops = [piece.numel if flat is None else flat.stop for piece, flat in zip(pieces, flats, strict=True)]
    text = json.dumps([[piece.key for piece in pieces], dtypes, outlines], ensure_ascii=False, separators=(",", ":"))
    columns = [np.array(one, dtype).tobytes() for one, dtype in zip((dtype_numbers, outline_numbers, starts, stops), _COLUMNS, strict=True)]
    return base64.b64encode(zlib.compress(b"".join([text.encode(), b"\n", *columns]), _LEVEL)).decode()


def _outline_of(piece: Piece) -> Outline:
    is_whole = piece.local_shape == piece.global_shape
    return (piece.global_shape,) if is_whole else (piece.global_shape, piece.global_offset, piece.local_shape)


def decode_columns(texts: Sequence[str | bytes], data_start: int, file_size: int, most_nbytes: int) -> FileColumns:
    """Return what a file stores, everything checked that is not for others to know.

    Args:
        texts: as :func:`encode_columns` made them, of pieces that follow each other.
        data_start: where the data of the first piece begin, in bytes from the begin of the file; those of the last end with the file.
        file_size: in bytes.
        most_nbytes: how long what they stand for may be in all.

    Raises:
        ValueError: they are something else.
    """
    parts = []
    for text in texts:
        data = _decompressed(text, most_nbytes)
        most_nbytes -= len(data)
        parts.append(_Part(data))
    keys = [key for part in parts for key in part.keys]
    if len(set(keys)) < len(keys):
        raise ValueError("a key twice")
    "".join(keys).encode()  # raises for half a surrogate pair, which no message could show
    dtype_numbers, dtypes = merged((part.dtypes, part.dtype_numbers) for part in parts)
    box_numbers, boxes = merged((part.boxes, part.box_numbers) for part in parts)
    starts = concatenated([part.starts for part in parts])
    stops = concatenated([part.stops for part in parts])
    numels = np.array([box.numel for box in boxes], np.int64)[box_numbers]
    if not ((starts < stops) & (stops <= numels)).all():
        raise ValueError("a range that lies not in its box")
    sizes = np.array([DTYPE_NBYTES[dtype] for dtype in dtypes], np.int64)[dtype_numbers]
    data_nbytes = file_size - data_start
    # Not by whole numbers before it is known that these are small enough.
    if ((stops - starts) * sizes.astype(np.float64)).sum() > 2.0 * data_nbytes or (nbytes := (stops - starts) * sizes).sum() != data_nbytes:
        raise ValueError(f"not {data_nbytes} bytes of data")
    return FileColumns(keys, dtypes, dtype_numbers, boxes, box_numbers, starts, stops, data_start + np.cumsum(nbytes) - nbytes)


class _Part:
    """What one text says. The attributes are those of :class:`FileColumns`.

    Raises:
        ValueError: it is malformed.
    """

    def __init__(self, data: bytes) -> None:
        head, _, body = data.partition(b"\n")
        fields = parse_json(head.decode())
        if type(fields) is not list or [type(one) for one in fields] != [list] * 3:
            raise ValueError("not three lists")
        self.keys, self.dtypes, outlines = fields
        if set(map(type, self.keys)) != {str}:
            raise ValueError("a key that is no text")
        if len(outlines) > len(self.keys):  # what is made of an outline takes many times its memory
            raise ValueError("more outlines than keys")
        if any(type(one) is not str or one not in DTYPE_NBYTES for one in self.dtypes):
            raise ValueError("an unknown dtype")
        self.boxes = [box_of(_outline(one)) for one in outlines]
        count = len(self.keys)
        if len(body) != count * _PIECE_NBYTES:
            raise ValueError("columns of other lengths")
        self.dtype_numbers, self.box_numbers, self.starts, self.stops = _cut(body, count)
        if self.dtype_numbers.max() >= len(self.dtypes) or self.box_numbers.max() >= len(self.boxes):
            raise ValueError("a number that stands for nothing")


def _outline(value: JsonValue) -> Outline:
    if type(value) is not list or any(type(part) is not list for part in value):
        raise ValueError("an outline that is no list of shapes")
    return tuple(map(tuple, value))


def _cut(body: bytes, count: int) -> Iterator[Integers]:
    position = 0
    for dtype in _COLUMNS:
        column = np.frombuffer(body, dtype, count, position)
        position += column.nbytes
        if int(column.max()) > MAX_NUMEL:
            raise ValueError(f"a number over {MAX_NUMEL}")
        yield column.astype(np.int64)


def _decompressed(text: str | bytes, most_nbytes: int) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(base64.b64decode(text, validate=True), max(1, most_nbytes))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("longer than it may be, or not whole")
    return data
