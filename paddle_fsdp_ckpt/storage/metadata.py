"""Stock Paddle's ``{id}.metadata``: which file holds which part of which tensor.

What it holds is from ``python/paddle/distributed/flex_checkpoint/dcp/metadata.py`` and ``save_state_dict.py`` of Paddle 3.3, and
``python/paddle/distributed/checkpoint/metadata.py`` of Paddle 2.6 to 3.1, which had fewer attributes:

- ``Metadata.state_dict_metadata``: key -> a ``LocalTensorMetadata`` for each distinct part that some rank had: global offset and
  local shape, later also dtype, global shape, and whether it is a range of the flattened local shape, and which;
- ``Metadata.storage_metadata``: ``LocalTensorIndex`` -> file name: which rank's file got that part. With ``save_replicas=True`` the
  same part is in several files, numbered by ``replica_id``;
- ``Metadata.flat_mapping``: how keys were nested. Not needed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from ..errors import CorruptCheckpointError
from ..layout import Range
from ..pieces import Piece, check_piece
from .entries import Box
from .json_values import cut_text
from .pickled import PickledObject, as_shape
from .pickles import read_objects

_MODULES = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")
_CLASSES = [(module, name) for module in _MODULES for name in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")]


class StockPiece(NamedTuple):
    """A part of a tensor, and the file that has it.

    Attributes:
        key: the state dict key.
        dtype: Paddle's dtype name; None where Paddle was too old to say.
        box: the part of the tensor.
        start: first element of the flattened box; 0 for all of it.
        stop: past its last element; equal to ``start`` where the part has no elements.
        file_name: of the file in the same directory; may be any text.
        is_replica: whether the same part is in another file too, which is to be read.
    """

    key: str
    dtype: str | None
    box: Box
    start: int
    stop: int
    file_name: str
    is_replica: bool


class _Part(NamedTuple):
    """What identifies a part of one tensor."""

    offset: tuple[int, ...]
    flat_range: tuple[int, int] | None


class _Description(NamedTuple):
    """A ``LocalTensorMetadata``."""

    part: _Part
    local_shape: tuple[int, ...]
    dtype: str | None
    global_shape: tuple[int, ...] | None


def read_metadata(file: BinaryIO, size: int, where: str) -> Iterator[StockPiece]:
    """Yield what a ``{id}.metadata`` file says, in its order.

    Args:
        file: at its start.
        size: in bytes.
        where: names the file for the messages.

    Raises:
        UnsafeCheckpointError: the file asks for something that no metadata needs. Nothing of it was run.
        CorruptCheckpointError: it is malformed, or contradicts itself.
    """
    metadata = read_objects(file, size, where, _CLASSES)
    try:
        yield from _pieces(metadata)
    except ValueError as error:
        raise CorruptCheckpointError(f"{where} is malformed: {cut_text(error)}; load another checkpoint") from error


def _pieces(metadata: object) -> Iterator[StockPiece]:
    fields = _fields(metadata, "Metadata")
    storage, described = fields.get("storage_metadata"), fields.get("state_dict_metadata")
    if type(storage) is not dict or type(described) is not dict:
        raise ValueError("it lacks its tables of tensors and files")
    tensors = _tensors(described, len(storage))
    for index, file_name in storage.items():
        key, part, local_shape, is_replica = _index(index)
        if type(file_name) is not str:
            raise ValueError(f"'{key}' is in a file whose name is not a text")
        found = tensors[key].at.get((part, local_shape), []) if key in tensors else []
        if len(found) != 1:
            raise ValueError(f"{len(found)} descriptions of '{key}' at {list(part.offset)}, {part.flat_range or 'whole'}, instead of one")
        tensors[key].unplaced.discard(found[0])
        yield _piece(key, found[0], tensors[key].global_shape, file_name, is_replica)
    unplaced = [key for key, tensor in tensors.items() if tensor.unplaced]
    if unplaced:
        raise ValueError(f"no file is said to hold '{unplaced[0]}', or a part of it")


class _Tensor:
    """All that is said about one key.

    Attributes:
        at: place, and local shape or None -> the descriptions that fit them.
        unplaced: the descriptions to which no file belongs, so far.
        global_shape: of the whole tensor, where a description doesn't say itself: as far as its parts reach, as in Paddle's
            ``compute_global_shape``. None where no description needs it.
    """

    def __init__(self, descriptions: list[_Description]) -> None:
        self.at: dict[tuple[_Part, tuple[int, ...] | None], list[_Description]] = {}
        for one in descriptions:
            for shape in (one.local_shape, None):
                self.at.setdefault((one.part, shape), []).append(one)
        self.unplaced = set(descriptions)
        self.global_shape: tuple[int, ...] | None = None
        if any(one.global_shape is None for one in descriptions):
            ends = [tuple(o + n for o, n in zip(one.part.offset, one.local_shape, strict=True)) for one in descriptions]
            self.global_shape = tuple(max(reaches) for reaches in zip(*ends, strict=True))


def _tensors(described: dict[object, object], most: int) -> dict[str, _Tensor]:
    """Return what is said about each key; never more parts than places for them, or a small file would make us do endless work."""
    tensors: dict[str, _Tensor] = {}
    count = 0
    for key, several in described.items():
        if type(key) is not str or type(several) is not list:
            raise ValueError("its table of tensors is none")
        count += len(several)
        if count > most:
            raise ValueError(f"it describes more parts of tensors than the {most} that files hold")
        tensors[key] = _Tensor([_description(one) for one in several])
    return tensors


def _description(value: object) -> _Description:
    fields = _fields(value, "LocalTensorMetadata")
    dtype, shape = fields.get("dtype"), fields.get("global_shape")
    if dtype is not None and type(dtype) is not str:
        raise ValueError("a dtype is not a text")
    return _Description(_part(fields), as_shape(fields.get("local_shape")), dtype, None if shape is None else as_shape(shape))


def _index(value: object) -> tuple[str, _Part, tuple[int, ...] | None, bool]:
    fields = _fields(value, "LocalTensorIndex")
    key, shape, replica = fields.get("tensor_key"), fields.get("local_shape"), fields.get("replica_id")
    if type(key) is not str or (replica is not None and type(replica) is not int):
        raise ValueError("the place of a tensor is malformed")
    return key, _part(fields), None if shape is None else as_shape(shape), replica not in (None, 0)


def _part(fields: dict[object, object]) -> _Part:
    is_flattened = fields.get("is_flattened", False)
    if type(is_flattened) is not bool:
        raise ValueError("is_flattened is neither true nor false")
    offset = as_shape(fields.get("global_offset"))
    if not is_flattened:
        return _Part(offset, None)
    flat = as_shape(fields.get("flattened_range"))
    if len(flat) != 2:
        raise ValueError("a flattened range is not a pair")
    return _Part(offset, (flat[0], flat[1]))


def _fields(value: object, cls: str) -> dict[object, object]:
    if type(value) is not PickledObject or value.cls != cls:
        raise ValueError(f"it has something else where a {cls} should be")
    return value.fields


def _piece(key: str, one: _Description, reach: tuple[int, ...] | None, file_name: str, is_replica: bool) -> StockPiece:
    numel = math.prod(one.local_shape)
    start, stop = one.part.flat_range or (0, numel)
    global_shape = one.global_shape if one.global_shape is not None else reach
    assert global_shape is not None
    check_piece(Piece(key, one.dtype or "", global_shape, one.part.offset, one.local_shape, Range(start, stop)))
    return StockPiece(key, one.dtype, Box(global_shape, one.part.offset, one.local_shape, numel), start, stop, file_name, is_replica)
