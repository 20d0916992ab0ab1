"""The header of a rank's file: a valid safetensors header that also describes the pieces.

One page of format. A rank's file is

    8 bytes: length of the header, little-endian;  the header: JSON, padded with spaces to a multiple of 8 bytes;  the data.

The header maps each key to ``{"dtype", "shape", "data_offsets"}``, as safetensors wants it, in the order of the data: without
holes, larger element sizes first, so that every tensor is aligned to its element size. A tensor's shape is the piece's local
shape, or ``[numel]`` where the piece is a flat range. ``__metadata__`` holds three strings: the format version, the columns, and
JSON that maps each key to the description of its piece, which is one of

    [global_shape]                                       the whole tensor
    [global_shape, [start, stop]]                        a flat range of the whole tensor
    [global_shape, offset, local_shape]                  a box
    [global_shape, offset, local_shape, [start, stop]]   a flat range of a box

A piece without elements is never stored.

The columns say the same once more, for whoever has many keys to read, see :mod:`.columns`: the digest of all that follows them in the
header, and a text for each 2,048 pieces, all joined by dots. They count only where they stand first, behind the version, and the
digest is right; a header without them, or that somebody changed, is read as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import TypeVar

import numpy as np

from ..errors import CorruptCheckpointError, UnsafeCheckpointError, listing
from ..pieces import Piece
from .columns import FileColumns, Integers, decode_columns, encode_columns
from .digests import DIGEST_LENGTH, digest, digest_of_parts
from .entries import MAX_DIMENSIONS, Box, Entry, box_of
from .format import DTYPE_CODES, DTYPE_NAMES, DTYPE_NBYTES, FORMAT_VERSION, LENGTH_NBYTES, MAX_HEADER_NBYTES, check_format_version
from .json_values import JsonValue, cut_text, parse_json

Written = TypeVar("Written")
Encoded = TypeVar("Encoded")

METADATA_KEY = "__metadata__"
_VERSION_KEY = "paddle_fsdp_ckpt.format_version"
_COLUMNS_KEY = "paddle_fsdp_ckpt.columns"
_PIECES_KEY = "paddle_fsdp_ckpt.pieces"
_BEFORE_COLUMNS = f'{{"{METADATA_KEY}":{{"{_VERSION_KEY}":"{FORMAT_VERSION}","{_COLUMNS_KEY}":"'.encode()
BEGINNING = f'{{"{METADATA_KEY}":{{"{_VERSION_KEY}":'.encode()
"""How the header of each file of ours begins, of whatever version."""
_ALIGNMENT = 8
_BLOCK_LENGTH = 2048  # pieces in one text of columns


def in_file_order(pieces: Sequence[Piece]) -> list[int]:
    """Return the positions of the pieces that a file stores, in the order of its data."""
    stored = [i for i, piece in enumerate(pieces) if piece.numel]
    return sorted(stored, key=lambda i: place_in_file(pieces[i].dtype))


def place_in_file(dtype: str) -> int:
    """Return what pieces of a dtype are sorted by: those of larger elements come first, so that each is aligned."""
    return -DTYPE_NBYTES[dtype]


@dataclass(frozen=True)
class HeaderPart:
    """What a header says about pieces whose data lie one after another. Made once, it serves every file that they are in at this place.

    Attributes:
        key_hashes: of the pieces' keys, as this process hashes them, sorted.
        start: where their data begin, in bytes behind the header.
        stop: where they end.
        entries: the fields that safetensors wants, without braces, in texts that a comma joins.
        descriptions: the fields of our own, as they stand inside of a JSON string, in such texts.
        blocks: the columns of all pieces but the last few, so many a text.
        left: those last few, which will share a text with what comes behind them.
    """

    key_hashes: Integers = field(repr=False)
    start: int
    stop: int
    entries: Sequence[bytes] = field(repr=False)
    descriptions: Sequence[bytes] = field(repr=False)
    blocks: Sequence[str] = field(repr=False)
    left: Sequence[Piece] = field(repr=False)


def encode_part(pieces: Iterable[Piece], start: int = 0) -> HeaderPart:
    """Return what a header says about ``pieces``, in the order of :func:`in_file_order`, whose data begin at ``start``.

    Raises:
        ValueError: a key twice, or a key that the format can't hold.
    """
    entries, descriptions = _Texts(), _Texts(_inside_string)
    blocks: list[str] = []
    left: list[Piece] = []
    keys: set[str] = set()
    shapes = _ShapeTexts()
    position = start
    for piece in pieces:
        key = piece.key
        if key == METADATA_KEY:
            raise ValueError(f"'{METADATA_KEY}' can't be stored: safetensors keeps that name for itself; rename the tensor")
        if key in keys:
            raise ValueError(f"'{key}' can't be stored twice in one file; a rank must give each key one piece")
        if len(piece.global_shape) > MAX_DIMENSIONS:
            raise ValueError(f"'{key}' has {len(piece.global_shape)} dimensions, and a checkpoint holds at most {MAX_DIMENSIONS}")
        keys.add(key)
        numel, flat, name = piece.numel, piece.flat_range, encode_basestring(key)
        stop = position + numel * DTYPE_NBYTES[piece.dtype]
        shape = shapes[piece.local_shape] if flat is None else f"[{numel}]"
        entries.add(f'{name}:{{"dtype":"{DTYPE_CODES[piece.dtype]}","shape":{shape},"data_offsets":[{position},{stop}]}}')
        box = shapes[piece.global_shape]
        if piece.local_shape != piece.global_shape:
            box = f"{box},{shapes[piece.global_offset]},{shapes[piece.local_shape]}"
        descriptions.add(f"{name}:[{box}]" if flat is None else f"{name}:[{box},[{flat.start},{flat.stop}]]")
        position = stop
        left.append(piece)
        if len(left) == _BLOCK_LENGTH:
            blocks.append(_in_unicode(encode_columns, left))
            left = []
    key_hashes = np.sort(np.fromiter(map(hash, keys), np.int64, len(keys)))
    return HeaderPart(key_hashes, start, position, entries.encoded(), descriptions.encoded(), blocks, left)


class _Texts:
    """Texts that a comma will join, encoded a few thousand at a time, since as many by themselves take much memory.

    Args:
        change: what is done to some of them that are joined, before they are encoded.
    """

    def __init__(self, change: Callable[[str], str] = str) -> None:
        self._change = change
        self._few: list[str] = []
        self._encoded: list[bytes] = []

    def add(self, text: str) -> None:
        """Add a text.

        Raises:
            ValueError: one is not valid Unicode.
        """
        self._few.append(text)
        if len(self._few) == _BLOCK_LENGTH:
            self._encode()

    def encoded(self) -> list[bytes]:
        """Return all of them.

        Raises:
            ValueError: one is not valid Unicode.
        """
        if self._few:
            self._encode()
        return self._encoded

    def _encode(self) -> None:
        self._encoded.append(_in_unicode(str.encode, self._change(",".join(self._few))))
        self._few = []


def _blocks_behind(first: HeaderPart, second: HeaderPart, pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield the columns of all that is not in whole blocks of the first part."""
    blocks, left = second.blocks, second.left
    if first.left:  # all blocks begin elsewhere
        left = [*first.left, *pieces]
        blocks = []
    yield from blocks
    for start in range(0, len(left), _BLOCK_LENGTH):
        yield _in_unicode(encode_columns, left[start : start + _BLOCK_LENGTH])


def _in_unicode(encode: Callable[[Written], Encoded], written: Written) -> Encoded:
    try:
        return encode(written)
    except UnicodeEncodeError as error:
        raise ValueError(f"a key is not valid Unicode and can't be stored: {error}") from None


def _inside_string(text: str) -> str:
    """Return a text as it stands inside of a JSON string."""
    return encode_basestring(text)[1:-1]


class _ShapeTexts(dict[tuple[int, ...], str]):
    """Shapes as JSON; most pieces share a few."""

    def __missing__(self, shape: tuple[int, ...]) -> str:
        text = self[shape] = f"[{','.join(map(str, shape))}]"
        return text


def encode_header(pieces: Sequence[Piece], before: HeaderPart | None = None) -> bytes:
    """Return everything in a file before its data; see :func:`encode_header_parts`."""
    return b"".join(encode_header_parts(pieces, before))


def encode_header_parts(pieces: Sequence[Piece], before: HeaderPart | None = None) -> list[bytes]:
    """Return everything in a file before its data, in parts, since a copy of what is said of many pieces takes time and memory.

    Args:
        pieces: in the order of :func:`in_file_order`.
        before: what is known already of the pieces that come before these, from the first byte of the data on.

    Raises:
        ValueError: a key twice, a key that the format can't hold, or more keys than it can hold.
    """
    first = encode_part([]) if before is None else before
    second = encode_part(pieces, first.stop)
    begins, ends = (np.searchsorted(first.key_hashes, second.key_hashes, side) for side in ("left", "right"))
    if (begins < ends).any():
        twice = {piece.key for piece in pieces_of(first)} & {piece.key for piece in pieces}
        if twice:
            raise ValueError(f"'{min(twice)}' can't be stored twice in one file; a rank must give each key one piece")
    columns = ".".join([*first.blocks, *_blocks_behind(first, second, pieces)]).encode()
    rest = [f'","{_PIECES_KEY}":"{{'.encode(), *_joined([*first.descriptions, *second.descriptions]), b'}"}']
    entries = [*first.entries, *second.entries]
    rest += [b"," if entries else b"", *_joined(entries), b"}"]
    length = len(_BEFORE_COLUMNS) + DIGEST_LENGTH + len(".") + len(columns) + sum(map(len, rest))
    rest.append(b" " * (-length % _ALIGNMENT))
    length += len(rest[-1])
    if length > MAX_HEADER_NBYTES:
        raise ValueError(
            f"{len(first.key_hashes) + len(second.key_hashes)} pieces in one file need a header of {length} bytes, and safetensors allows "
            f"{MAX_HEADER_NBYTES}; save from more ranks, or with shorter parameter names"
        )
    own = digest_of_parts(map(memoryview, rest)).encode()
    return [length.to_bytes(LENGTH_NBYTES, "little"), _BEFORE_COLUMNS, own, b".", columns, *rest]


def _joined(texts: Sequence[bytes]) -> list[bytes]:
    """Return texts with commas between them."""
    return [part for text in texts for part in (b",", text)][1:]


def pieces_of(part: HeaderPart) -> Iterator[Piece]:
    """Return the pieces that a part describes, in their order."""
    texts = [*part.blocks, *([encode_columns(part.left)] if part.left else [])]
    columns = decode_columns(texts, part.start, part.stop, sys.maxsize)
    return (box.part(key, dtype, start, stop) for key, dtype, box, start, stop, _ in columns.entries())


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


def decode_header_columns(encoded: bytes, file_size: int, where: str) -> FileColumns | None:
    """Return what a file stores, by the columns in its header, everything checked; None where it has none, or none of what it says else.

    Args:
        encoded: as for :func:`decode_header`; so is the rest.
        file_size: in bytes.
        where: names the file.

    Raises:
        CorruptCheckpointError: they are not what :func:`encode_header` writes, or don't fit the file.
    """
    start, stop = len(_BEFORE_COLUMNS), encoded.find(b'"', len(_BEFORE_COLUMNS))
    if not encoded.startswith(_BEFORE_COLUMNS) or stop < start + DIGEST_LENGTH:
        return None
    expected, *texts = encoded[start:stop].split(b".")
    if expected != digest(memoryview(encoded)[stop:]).encode():
        return None
    try:
        columns = decode_columns(list(filter(None, texts)), LENGTH_NBYTES + len(encoded), file_size, len(encoded))
        if METADATA_KEY in columns.keys:
            raise ValueError(f"a piece '{METADATA_KEY}'")
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the columns in the header of {where} are malformed: {cut_text(error)}; {_WAY_OUT}") from error
    return columns


def decode_header(encoded: bytes, file_size: int, where: str) -> Iterator[Entry]:
    """Yield what a file stores, in the order of its data, by the JSON of its header, everything checked.

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
                    box = whole[global_shape] = box_of((global_shape,), key)
            else:
                outline = tuple(map(tuple, description[:-1] if is_flat else description))
                box = parts.get(outline)
                if box is None:
                    box = parts[outline] = box_of(outline, key)
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


def _data_start(item: tuple[str, JsonValue]) -> int:
    start = item[1]["data_offsets"][0]
    if type(start) is not int:
        raise ValueError(f"data_offsets of '{item[0]}' are not whole numbers")
    return start


def _text(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, KeyError) else cut_text(error)
