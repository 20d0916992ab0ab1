"""The bridge to ``paddle.distributed.save_state_dict`` and ``load_state_dict``: Paddle's ShardedWeight, and its metadata file."""

from __future__ import annotations

import math
from pathlib import Path

import paddle
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..layout import Range
from ..pieces import Piece
from .format import PADDLE_METADATA_NAME
from .index import CheckpointIndex


def piece_of(key: str, weight: ShardedWeight) -> Piece:
    """Describe a ShardedWeight as a piece under ``key``; a flat range over all of its box is given as the box."""
    local_shape = tuple(weight.local_shape)
    flat = Range(weight.flattened_range.start, weight.flattened_range.stop) if weight.is_flattened else None
    return Piece(
        key,
        str(weight.local_tensor.dtype).rpartition(".")[2],
        tuple(weight.global_shape),
        tuple(weight.global_offset),
        local_shape,
        None if flat is None or flat.numel == math.prod(local_shape) else flat,
    )


def write_paddle_metadata(directory: Path, index: CheckpointIndex) -> None:
    """Write ``0.metadata`` for the files in ``directory``, so that stock ``load_state_dict(..., safetensors=True)`` reads them.

    Nothing of this package reads ``0.metadata``.
    """
    metadata = Metadata(state_dict_metadata={}, storage_metadata={}, flat_mapping={})
    for key in index.stored:
        tensors: list[LocalTensorMetadata] = []
        for file, box, start, stop, _ in index.stored[key]:
            flat = None if stop - start == box.numel else (start, stop)
            tensor = LocalTensorMetadata(box.global_offset, box.local_shape, index.dtypes[key], box.global_shape, flat is not None, flat)
            where = LocalTensorIndex(key, box.global_offset, flat is not None, flat, local_shape=box.local_shape)
            if where not in metadata.storage_metadata:
                metadata.storage_metadata[where] = index.files[file].name
                tensors.append(tensor)
        metadata.state_dict_metadata[key] = tensors
        metadata.flat_mapping[key] = (key,)
    paddle.save(metadata, str(directory / PADDLE_METADATA_NAME))
