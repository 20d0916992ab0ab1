"""The bridge to ``paddle.distributed.save_state_dict`` and ``load_state_dict``: Paddle's ShardedWeight, and its metadata file."""

from __future__ import annotations

import math
from functools import lru_cache
from io import BytesIO

import paddle
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..layout import Range
from ..pieces import Piece
from .index import CheckpointIndex


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


def paddle_metadata(index: CheckpointIndex) -> bytes:
    """Return ``0.metadata`` for a checkpoint's files, so that stock ``load_state_dict(..., safetensors=True)`` reads them.

    Nothing of this package reads ``0.metadata``.
    """
    metadata = Metadata(state_dict_metadata={}, storage_metadata={}, flat_mapping={})
    # Many keys share a description; they can't be changed.
    alike: dict[tuple[object, ...], LocalTensorMetadata] = {}
    for key, stored in index.walk():
        tensors: list[LocalTensorMetadata] = []
        described: set[int] = set()
        dtype = index.dtypes[key]
        for file, box, start, stop, _ in stored:
            flat = None if stop - start == box.numel else (start, stop)
            # Equal boxes of one file are one object, and to hash it takes as long as all else.
            tensor = alike.get((id(box), dtype, flat))
            if tensor is None:
                tensor = LocalTensorMetadata(box.global_offset, box.local_shape, dtype, box.global_shape, bool(flat), flat)
                tensor = alike[id(box), dtype, flat] = alike.setdefault((tensor,), tensor)
            if id(tensor) in described:
                continue
            described.add(id(tensor))
            tensors.append(tensor)
            where = LocalTensorIndex(key, box.global_offset, bool(flat), flat, local_shape=box.local_shape)
            metadata.storage_metadata[where] = index.files[file].name
        metadata.state_dict_metadata[key] = tensors
        metadata.flat_mapping[key] = (key,)
    encoded = BytesIO()
    paddle.save(metadata, encoded)
    return encoded.getvalue()
