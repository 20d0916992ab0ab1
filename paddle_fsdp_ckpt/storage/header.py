"""The header of a rank's file: a valid safetensors header that also describes the pieces.

One page of format. A rank's file is

    8 bytes: length of the header, little-endian;  the header: JSON, padded with spaces to a multiple of 8 bytes;  the data.

The header maps each key to ``{"dtype", "shape", "data_offsets"}``, as safetensors wants it, in the order of the data: without
holes, larger element sizes first, so that every tensor is aligned to its element size. A tensor's shape is the piece's local
shape, or ``[numel]`` where the piece is a flat range. ``__metadata__`` holds two strings: the format version, and JSON
that maps each key to the description of its piece, which is one of

    [global_shape]                                       the whole tensor
    [global_shape, [start, stop]]                        a flat range of the whole tensor
    [global_shape, offset, local_shape]                  a box
    [global_shape, offset, local_shape, [start, stop]]   a flat range of a box

A piece without elements is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import NamedTuple, TypeAlias

from ..errors import CorruptCheckpointError, UnsafeCheckpointError, listing
from ..layout import Range
from ..pieces import Piece, check_piece
from .format import (
    DTYPE_CODES,
    DTYPE_NAMES,
    DTYPE_NBYTES,
    FORMAT_VERSION,
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    JsonValue,
    check_format_version,
    cut_text,
    parse_json,
)

METADATA_KEY = "__metadata__"
_VERSION_KEY = "paddle_fsdp_ckpt.format_version"
_PIECES_KEY = "paddle_fsdp_ckpt.pieces"
_ALIGNMENT = 8
_MAX_DIMENSIONS = 64
_MAX_NUMEL = 1 << 62


class Box(NamedTuple):
    """The part of a tensor that a piece, or the flat range of one, is taken from; see :class:`~paddle_fsdp_ckpt.pieces.Piece`."""

    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    numel: int


Entry: TypeAlias = "tuple[str, str, Box, int, int, int]"
"""One stored piece, light enough to make a million of: key, dtype, box, first and past-the-last element of the box (0 and
``box.numel`` for the whole of it, which is also how a flat range over all of it reads), and first byte in the file."""


def in_file_order(pieces: Sequence[Piece]) -> list[int]:
    """Return the positions of the pieces that a file stores, in the order of its data."""
    stored = [i for i, piece in enumerate(pieces) if piece.numel]
    return sorted(stored, key=lambda i: -DTYPE_NBYTES[pieces[i].dtype])


@dataclass(frozen=True)
class HeaderPart:
    """What a header says about pieces whose data lie one after another. Made once, it serves every file that they are in at this place.

    Attributes:
        keys: of the pieces.
        start: where their data begin, in bytes behind the header.
        stop: where they end.
        entries: the fields that safetensors wants, without braces.
        descriptions: the fields of our own, as they stand inside of a JSON string, without braces.
    """

    keys: frozenset[str] = field(repr=False)
    start: int
    stop: int
    entries: str = field(repr=False)
    descriptions: str = field(repr=False)


def encode_part(pieces: Sequence[Piece], start: int = 0) -> HeaderPart:
    """Return what a header says about ``pieces``, in the order of :func:`in_file_order`, whose data begin at ``start``.

    Raises:
        ValueError: a key twice, or a key that the format can't hold.
    """
    entries: list[str] = []
    descriptions: list[str] = []
    keys: set[str] = set()
    shapes = _ShapeTexts()
    position = start
    for piece in pieces:
        key = piece.key
        if key == METADATA_KEY:
            raise ValueError(f"'{METADATA_KEY}' can't be stored: safetensors keeps that name for itself; rename the tensor")
        if key in keys:
            raise ValueError(f"'{key}' can't be stored twice in one file; a rank must give each key one piece")
        if len(piece.global_shape) > _MAX_DIMENSIONS:
            raise ValueError(f"'{key}' has {len(piece.global_shape)} dimensions, and a checkpoint holds at most {_MAX_DIMENSIONS}")
        keys.add(key)
        numel, flat, name = piece.numel, piece.flat_range, encode_basestring(key)
        stop = position + numel * DTYPE_NBYTES[piece.dtype]
        shape = shapes[piece.local_shape] if flat is None else f"[{numel}]"
        entries.append(f'{name}:{{"dtype":"{DTYPE_CODES[piece.dtype]}","shape":{shape},"data_offsets":[{position},{stop}]}}')
        box = shapes[piece.global_shape]
        if piece.local_shape != piece.global_shape:
            box = f"{box},{shapes[piece.global_offset]},{shapes[piece.local_shape]}"
        descriptions.append(f"{name}:[{box}]" if flat is None else f"{name}:[{box},[{flat.start},{flat.stop}]]")
        position = stop
    return HeaderPart(frozenset(keys), start, position, ",".join(entries), encode_basestring(",".join(descriptions))[1:-1])


class _ShapeTexts(dict[tuple[int, ...], str]):
    """Shapes as JSON; most pieces share a few."""

    def __missing__(self, shape: tuple[int, ...]) -> str:
        text = self[shape] = f"[{','.join(map(str, shape))}]"
        return text


def encode_header(pieces: Sequence[Piece], before: HeaderPart | None = None) -> bytes:
    """Return everything in a file before its data.

    Args:
        pieces: in the order of :func:`in_file_order`.
        before: what is known already of the pieces that come before these, from the first byte of the data on.

    Raises:
        ValueError: a key twice, a key that the format can't hold, or more keys than it can hold.
    """
    first = encode_part([]) if before is None else before
    second = encode_part(pieces, first.stop)
    twice = first.keys & second.keys
    if twice:
        raise ValueError(f"'{min(twice)}' can't be stored twice in one file; a rank must give each key one piece")
    descriptions = ",".join(filter(None, (first.descriptions, second.descriptions)))
    metadata = f'"{METADATA_KEY}":{{"{_VERSION_KEY}":"{FORMAT_VERSION}","{_PIECES_KEY}":"{{{descriptions}}}"}}'
    try:
        encoded = f"{{{','.join(filter(None, (metadata, first.entries, second.entries)))}}}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a key is not valid Unicode and can't be stored: {error}") from None
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    if len(encoded) > MAX_HEADER_NBYTES:
        raise ValueError(
            f"{len(first.keys) + len(second.keys)} pieces in one file need a header of {len(encoded)} bytes, and safetensors allows "
            f"{MAX_HEADER_NBYTES}; save from more ranks, or with shorter parameter names"
        )
    return len(encoded).to_bytes(LENGTH_NBYTES, "little") + encoded


def header_nbytes(length_field: bytes, file_size: int, where: str) -> int:
    """Return the length of a header from the file's first bytes; ``where`` names the file for the messages.

    Raises:
        CorruptCheckpointError: the file is too short to hold its header.
        UnsafeCheckpointError: the header is larger than any that we wrote.
    """
    length = int.from_bytes(length_field, "little")
    if len(length_field) < LENGTH_NBYTES:
        raise CorruptCheckpointError(f"{where} has {file_size} bytes and is too short for a safetensors file; {_WAY_OUT}")
    if length > MAX_HEADER_NBYTES:
        raise UnsafeCheckpointError(
            f"{where} asks for a header of {length} bytes, and at most {MAX_HEADER_NBYTES} are allowed; it was not read. {_WAY_OUT}"
        )
    if length > file_size - LENGTH_NBYTES:
        raise CorruptCheckpointError(f"{where} has {file_size} bytes and is too short for its header of {length} bytes; {_WAY_OUT}")
    return length


def decode_header(encoded: bytes, file_size: int, where: str) -> Iterator[Entry]:
    """Yield what a file stores, in the order of its data, everything checked.

    Args:
        encoded: the header, without its length.
        file_size: of the whole file, in bytes.
        where: names the file for the messages.

    Raises:
        CorruptCheckpointError: the header is not what :func:`encode_header` writes, or doesn't fit the file.
        NewerFormatError: it is of a newer format version.
    """
    try:
        header = parse_json(encoded.decode())
        metadata = header.pop(METADATA_KEY)
        check_format_version(int(metadata[_VERSION_KEY]), where)
        descriptions = parse_json(metadata[_PIECES_KEY])
        if header.keys() != descriptions.keys():
            raise ValueError(
                f"keys with values or with a description, but not both: {listing(sorted(header.keys() ^ descriptions.keys()))}"
            )
        "".join(header).encode()  # Raises for half a surrogate pair, which no message could show.
        entries = sorted(header.items(), key=_data_start)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CorruptCheckpointError(f"the header of {where} is malformed: {_text(error)}; {_WAY_OUT}") from error
    whole: dict[tuple[int, ...], Box] = {}
    parts: dict[tuple[tuple[int, ...], ...], Box] = {}
    data_start = position = LENGTH_NBYTES + len(encoded)
    for key, entry in entries:
        try:
            dtype = DTYPE_NAMES.get(entry["dtype"])
            if dtype is None:
                raise ValueError(f"unknown dtype {entry['dtype']!r}")
            description = descriptions[key]
            is_flat = len(description) in (2, 4)
            # Lists that are equal to known ones get the known one's integers, so 1.0 or true can't slip in as 1.
            if len(description) in (1, 2):  # nearly all
                global_shape = tuple(description[0])
                box = whole.get(global_shape)
                if box is None:
                    box = whole[global_shape] = _box(key, dtype, (global_shape,))
            else:
                outline = tuple(map(tuple, description[:-1] if is_flat else description))
                box = parts.get(outline)
                if box is None:
                    box = parts[outline] = _box(key, dtype, outline)
            start, stop = description[-1] if is_flat else (0, box.numel)
            if not (type(start) is int and type(stop) is int and 0 <= start < stop <= box.numel):
                raise ValueError(f"[{start}, {stop}) is no range of the {box.numel} elements of {list(box.local_shape)}")
            shape = [stop - start] if is_flat else list(box.local_shape)
            end = position + (stop - start) * DTYPE_NBYTES[dtype]
            begin, finish = entry["data_offsets"]
            if begin != position - data_start or finish != end - data_start or entry["shape"] != shape or len(entry) != 3:
                raise ValueError(
                    f"the description wants {dtype} {shape} at bytes {[position - data_start, end - data_start]}, which leaves no hole, "
                    f"and the header has {entry}"
                )
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptCheckpointError(f"{where}, key '{key:.500}': {_text(error)}; {_WAY_OUT}") from error
        yield key, dtype, box, start, stop, position
        position = end
    if position != file_size:
        raise CorruptCheckpointError(f"{where} has {file_size} bytes, and its header describes {position}; {_WAY_OUT}")


_WAY_OUT = "restore the file from a copy, or load another checkpoint"


def _box(key: str, dtype: str, outline: tuple[tuple[int, ...], ...]) -> Box:
    if len(outline) not in (1, 3):
        raise ValueError(f"{[list(part) for part in outline]} is not the description of a piece")
    if max(map(len, outline)) > _MAX_DIMENSIONS:
        raise ValueError(f"a shape has {max(map(len, outline))} dimensions, and at most {_MAX_DIMENSIONS} are allowed")
    if not all(type(number) is int for part in outline for number in part):
        raise ValueError(f"{[list(part) for part in outline]} holds something else than whole numbers")
    global_shape = outline[0]
    if max(global_shape, default=0) > _MAX_NUMEL or math.prod(global_shape) > _MAX_NUMEL:
        raise ValueError(f"a tensor of more than {_MAX_NUMEL} elements")
    _, offset, local_shape = outline if len(outline) == 3 else (global_shape, (0,) * len(global_shape), global_shape)
    check_piece(Piece(key, dtype, global_shape, offset, local_shape, Range(0, 0)))
    return Box(global_shape, offset, local_shape, math.prod(local_shape))


def _data_start(item: tuple[str, JsonValue]) -> int:
    start = item[1]["data_offsets"][0]
    if type(start) is not int:
        raise ValueError(f"data_offsets of '{item[0]}' are not whole numbers")
    return start


def _text(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, KeyError) else cut_text(error)
