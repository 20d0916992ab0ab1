"""Read the index of a checkpoint directory that stock Paddle's ``save_state_dict`` wrote, so that it is read like one of ours.

From ``python/paddle/distributed/flex_checkpoint/dcp/save_state_dict.py`` and ``load_state_dict.py`` of Paddle 3.3: a save writes
``{rank}_{id}.distcp`` or ``{rank}_{id}.safetensors`` for each rank, and one ``{id}.metadata``, which it never rewrites. So a second
save into the same directory leaves the old metadata, and perhaps old files; Paddle's own load mixes them. Here metadata and
files must agree in every key, dtype and size.

What can't be told from such a directory: whether a second save that had the same layout was killed half way.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError, listing
from .entries import Stored
from .format import DTYPE_NAMES, DTYPE_NBYTES, LENGTH_NBYTES, MANIFEST_NAME, parse_left_over
from .header import METADATA_KEY, header_nbytes
from .index import CheckpointIndex, open_inside, read_index, say_lost_manifest, without_garbage_collection
from .json_values import JsonValue, cut_text, parse_json
from .manifest import FileRecord
from .metadata import StockPiece, read_metadata
from .pickled import PickledArray
from .pickles import read_arrays
from .reserved_keys import without_reserved
from .system_errors import read_file

_METADATA_NAME = re.compile(r"(0|[1-9][0-9]{0,8})\.metadata", re.ASCII)
_DATA_NAME = re.compile(r"(?P<rank>0|[1-9][0-9]{0,8})_(?P<id>0|[1-9][0-9]{0,8})\.(?P<kind>distcp|safetensors)", re.ASCII)
_MAX_METADATA_NBYTES = 1 << 32
_NAME_TABLE = "StructuredToParameterName@@"
"""What ``paddle.save`` adds to a ``.distcp`` file: key -> the tensor's name in its process. Not needed."""

_NUMPY_CODES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "u2": "bfloat16",  # NumPy has none; Paddle hands out the bits
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u1": "uint8",
    "b1": "bool",
}
_SAFETENSORS_CODES = {**DTYPE_NAMES, "U16": "bfloat16"}  # as in Paddle's create_hf_ckpt_metadata


class _DataFile(NamedTuple):
    """A file that a rank wrote."""

    rank: int
    save_id: int
    kind: str
    name: str


class _Found(NamedTuple):
    """What a file really has under a key."""

    dtype: str
    shape: tuple[int, ...]
    byte_offset: int


def open_index(path: Path, *, reserved: bool = False) -> CheckpointIndex:
    """Read the index of a checkpoint directory: of ours where it has a manifest, else of one that stock Paddle wrote.

    Args:
        path: the directory.
        reserved: with what belongs to no model or optimizer, under reserved keys.

    Raises:
        CheckpointError: as :func:`~.index.read_index` and :func:`read_stock_index`.
    """
    if is_stock(path):
        return read_stock_index(path)
    index = read_index(path)
    return index if reserved else without_reserved(index)


def read_stock_index(path: Path) -> CheckpointIndex:
    """Read the index of a directory that ``paddle.distributed.save_state_dict`` wrote; its ``manifest`` is None.

    The values themselves are not read. Of several saves in one directory it is the one that stock Paddle loads.

    Raises:
        IncompleteCheckpointError: a file is missing, or a save wasn't finished.
        CorruptCheckpointError: metadata and files are not of one save, or one of them is malformed.
        UnsafeCheckpointError: a file asks for what reading must never do: nothing of it was run, and no other file opened.
    """
    with without_garbage_collection():
        return _read_index(path)


def is_stock(path: Path) -> bool:
    """Tell whether a directory looks like one that stock Paddle wrote: it has a ``{id}.metadata`` and no manifest of ours."""
    if not path.is_dir() or parse_left_over(Path(os.path.abspath(path)).name) is not None:
        return False
    names = os.listdir(path)
    return MANIFEST_NAME not in names and any(_METADATA_NAME.fullmatch(name) for name in names)


def _read_index(path: Path) -> CheckpointIndex:
    names = sorted(os.listdir(path))
    data_files = _choose_save(path, names)
    metadata_name = f"{data_files[0].save_id}.metadata"
    if f"{metadata_name}.lock" in names:
        raise IncompleteCheckpointError(
            f"'{path}' has a file {metadata_name}.lock: a save is under way, or was killed, and its files may be of two saves; load "
            "another checkpoint. If you know that they are of one, delete the lock"
        )
    if metadata_name not in names:
        raise IncompleteCheckpointError(f"'{path}' has {data_files[0].name} and no {metadata_name}; load another checkpoint")
    by_file: dict[str, dict[str, StockPiece]] = {one.name: {} for one in data_files}
    for piece in read_file(path / metadata_name, partial(_read_metadata, path, metadata_name)):
        # Only names that a save gives its files can be keys of by_file, so none can lead out of the directory.
        if not _DATA_NAME.fullmatch(piece.file_name):
            raise UnsafeCheckpointError(
                f"'{path / metadata_name}' names a file {piece.file_name[:100]!r}, which may lead out of its directory; it was not opened. "
                "Don't use this checkpoint"
            )
        pieces = by_file.get(piece.file_name)
        if pieces is None:
            raise IncompleteCheckpointError(
                f"'{path}' lacks the file {piece.file_name}; restore it from a copy, or load another checkpoint"
            )
        if piece.key in pieces:
            raise CorruptCheckpointError(f"'{path / metadata_name}' gives {piece.file_name} the key '{piece.key}' twice; {_WAY_OUT}")
        pieces[piece.key] = piece
    return _match(path, metadata_name, by_file)


def _choose_save(path: Path, names: list[str]) -> list[_DataFile]:
    """Return the files of the save that stock Paddle loads: of ``.distcp`` files those with the highest id."""
    matches = [match for match in map(_DATA_NAME.fullmatch, names) if match]
    found = [_DataFile(int(match["rank"]), int(match["id"]), match["kind"], match[0]) for match in matches]
    if not found:
        raise IncompleteCheckpointError(f"'{path}' has no files with values beside its metadata. It holds {listing(names)}")
    ids = sorted({one.save_id for one in found})
    if len({one.kind for one in found}) > 1:
        raise CorruptCheckpointError(
            f"'{path}' has both .distcp and .safetensors files, which Paddle doesn't load either; move the files of one save, with their "
            ".metadata, into a directory of their own"
        )
    if len(ids) > 1 and found[0].kind == "safetensors":
        raise CorruptCheckpointError(
            f"'{path}' holds several saves, {listing(f'*_{one}.safetensors' for one in ids)}, and which is meant can't be told; move the "
            "files of one, with their .metadata, into a directory of their own"
        )
    return sorted(one for one in found if one.save_id == ids[-1])


def _read_metadata(path: Path, name: str) -> list[StockPiece]:
    descriptor, size = open_inside(path, name)
    with open(descriptor, "rb") as file:
        if size > _MAX_METADATA_NBYTES:
            raise UnsafeCheckpointError(f"'{path / name}' has {size} bytes, more than any metadata needs; it was not read")
        return list(read_metadata(file, size, f"'{path / name}'"))


def _match(path: Path, metadata_name: str, by_file: dict[str, dict[str, StockPiece]]) -> CheckpointIndex:
    """Look up in the files what the metadata says, which must be just what they hold."""
    records: list[FileRecord] = []
    dtypes: dict[str, str] = {}
    stored: dict[str, list[Stored]] = {}
    for number, (name, pieces) in enumerate(by_file.items()):
        size, found = read_file(path / name, partial(_read_file, path, name))
        if found.keys() != pieces.keys():
            only = listing(f"'{key}'" for key in sorted(found.keys() ^ pieces.keys()))
            raise _two_saves(path, metadata_name, f"{name} and the metadata don't have the same keys: {only}")
        records.append(FileRecord(name, size, sum(not one.is_replica and one.stop > one.start for one in pieces.values())))
        for key, piece in pieces.items():
            there = found[key]
            shapes = [piece.box.local_shape] if piece.stop - piece.start == piece.box.numel else []
            one_number = piece.stop - piece.start == 1 == math.prod(there.shape)
            if piece.dtype not in (None, there.dtype) or not (there.shape in [*shapes, (piece.stop - piece.start,)] or one_number):
                raise _two_saves(
                    path,
                    metadata_name,
                    f"'{key}': {name} has {there.dtype} {list(there.shape)}, and the metadata says {piece.dtype} "
                    f"{list(piece.box.local_shape)}, elements [{piece.start}, {piece.stop})",
                )
            if piece.is_replica or piece.start == piece.stop:
                continue
            others = stored.setdefault(key, [])
            if others and (dtypes[key] != there.dtype or others[0][1].global_shape != piece.box.global_shape):
                raise CorruptCheckpointError(_say_contradiction(path, key, others[0], dtypes[key], piece, there.dtype))
            dtypes[key] = there.dtype
            others.append((number, piece.box, piece.start, piece.stop, there.byte_offset))
    return CheckpointIndex(path, tuple(records), dtypes, stored)


def _two_saves(path: Path, metadata_name: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"'{path}': {what}. The files are not of one save: Paddle doesn't rewrite {metadata_name} when it saves again into the same "
        "directory. Load another checkpoint; save each into a directory of its own"
    )


def _say_contradiction(path: Path, key: str, other: Stored, other_dtype: str, piece: StockPiece, dtype: str) -> str:
    shapes = [other[1].global_shape, piece.box.global_shape]
    hint = "the ranks did not save one tensor"
    if (1,) in shapes:
        # dygraph_sharding_optimizer.py, _create_sharded_weight: "if int(tensor.numel()) == 1: # Handle scalar parameters"
        hint = "Paddle's sharding optimizer wrote a piece of one element as if it were a tensor, so that its place is lost"
    return f"'{path}', key '{key}': both {other_dtype} {list(shapes[0])} and {dtype} {list(shapes[1])}; {hint}. Load another checkpoint"


def _read_file(path: Path, name: str) -> tuple[int, dict[str, _Found]]:
    """Return a file's size, and what it has under each key."""
    descriptor, size = open_inside(path, name)
    where = f"'{path / name}'"
    with open(descriptor, "rb") as file:
        try:
            if name.endswith(".distcp"):
                return size, dict(_pickled_tensors(read_arrays(file, size, where), where))
            length = header_nbytes(file.read(LENGTH_NBYTES), size, where)
            return size, dict(_safetensors(parse_json(file.read(length).decode()), LENGTH_NBYTES + length, size))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"{where} is malformed: {cut_text(error)}; {_WAY_OUT}") from error
        except _OursError:
            raise IncompleteCheckpointError(say_lost_manifest(where)) from None


def _pickled_tensors(value: object, where: str) -> Iterator[tuple[str, _Found]]:
    if type(value) is not dict:
        raise ValueError("it is no state dict")
    for key, array in value.items():
        if key == _NAME_TABLE:
            continue
        if type(key) is not str or type(array) is not PickledArray or array.payload is None:
            raise ValueError(f"{str(key)[:100]!r} is not a tensor")
        dtype = _dtype(_NUMPY_CODES, array.code, key)
        numel = math.prod(array.shape)
        if numel * DTYPE_NBYTES[dtype] != array.payload.nbytes:
            raise ValueError(f"'{key}' has {array.payload.nbytes} bytes, which are not {dtype} {list(array.shape)}")
        if array.is_fortran:
            raise CheckpointError(
                f"{where}, key '{key}': it was saved from a transposed view, and its elements lie column by column, which this can't read; "
                "load it with paddle.load, and save a contiguous() copy"
            )
        yield key, _Found(dtype, array.shape, array.payload.offset)


class _OursError(Exception):
    """A file is one of ours."""


def _safetensors(header: JsonValue, data_start: int, size: int) -> Iterator[tuple[str, _Found]]:
    """Yield what the header of any safetensors file says, checked as that format wants it: no holes, and nothing twice."""
    notes = header.pop(METADATA_KEY, {})
    if any(name.startswith("paddle_fsdp_ckpt.") for name in notes):
        raise _OursError
    position = data_start
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = _dtype(_SAFETENSORS_CODES, entry["dtype"], key)
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if any(type(one) is not int or one < 0 for one in (*shape, start, stop)):
            raise ValueError(f"'{key}' has a shape or a place that is not of whole numbers")
        if data_start + start != position or stop - start != math.prod(shape) * DTYPE_NBYTES[dtype]:
            raise ValueError(f"'{key}' is {dtype} {shape}, and said to be at bytes [{start}, {stop}) of the data, which doesn't fit")
        yield key, _Found(dtype, tuple(shape), position)
        position = data_start + stop
    if position != size:
        raise ValueError(f"it has {size} bytes, and describes {position}")


def _dtype(codes: dict[str, str], code: JsonValue, key: str) -> str:
    dtype = codes.get(code)
    if dtype is None:
        raise ValueError(f"'{key}' has the dtype {code!r}, which this doesn't know")
    return dtype


_WAY_OUT = "restore the file from a copy, or load another checkpoint"
