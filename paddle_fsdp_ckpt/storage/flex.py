"""The bridge to ``paddle.distributed.save_state_dict`` and ``load_state_dict``: Paddle's ShardedWeight, and its metadata file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import paddle
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..layout import Range
from ..pieces import Piece
from .columns import columns_of
from .entries import Box
from .index import CheckpointIndex
from .manifest import FileRecord
from .metadata_writer import metadata_blocks
from .table import table_of


def piece_of(key: str, weight: ShardedWeight) -> Piece:
    """Describe a ShardedWeight as a piece under ``key``; a flat range over all of its box is given as the box."""
    local_shape = tuple(weight.local_shape)
    flat = Range(weight.flattened_range.start, weight.flattened_range.stop) if weight.is_flattened else None
    return Piece(
        key,
        _name_of(weight.local_tensor.dtype),
        tuple(weight.global_shape),
        tuple(weight.global_offset),
        local_shape,
        None if flat is None or flat.numel == math.prod(local_shape) else flat,
    )


@lru_cache
def _name_of(dtype: paddle.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def paddle_metadata(index: CheckpointIndex) -> Iterable[bytes]:
    """Return ``0.metadata`` for a checkpoint's files, in blocks, so that stock ``load_state_dict(..., safetensors=True)`` reads them.

    Nothing of this package reads ``0.metadata``.
    """
    if index.table is not None and _are_classes_known():
        return metadata_blocks(index.table, [one.name for one in index.files])
    encoded = BytesIO()
    paddle.save(_as_objects(index), encoded)
    return [encoded.getvalue()]


def _are_classes_known() -> bool:
    """Tell whether Paddle loads from the blocks what it would have saved itself: its classes may be others in another version."""
    box, part = Box((2, 3), (0, 0), (2, 3), 6), Box((2, 3), (1, 0), (1, 3), 3)
    table = table_of([columns_of([("whole", "float32", box, 0, 6, 0), ("flat", "bfloat16", part, 1, 2, 24)])])
    assert table is not None
    sample = CheckpointIndex(Path(), (FileRecord("file", 26, 2, ""),), {}, {}).with_table(table)
    try:
        loaded = paddle.load(BytesIO(b"".join(metadata_blocks(table, ["file"]))))
    except Exception:  # noqa: BLE001 - whatever it is that they don't take
        return False
    return bool(loaded == _as_objects(sample))


def _as_objects(index: CheckpointIndex) -> Metadata:
    """Return what ``0.metadata`` says, as Paddle has it."""
    metadata = Metadata(state_dict_metadata={}, storage_metadata={}, flat_mapping={})
    for key, stored in index.walk():
        tensors: list[LocalTensorMetadata] = []
        for file, box, start, stop, _ in stored:
            flat = None if stop - start == box.numel else (start, stop)
            where = LocalTensorIndex(key, box.global_offset, bool(flat), flat, local_shape=box.local_shape)
            if where not in metadata.storage_metadata:
                tensors.append(
                    LocalTensorMetadata(box.global_offset, box.local_shape, index.dtypes[key], box.global_shape, bool(flat), flat)
                )
                metadata.storage_metadata[where] = index.files[file].name
        metadata.state_dict_metadata[key] = tensors
        metadata.flat_mapping[key] = (key,)
    return metadata
