"""Compare the values that a checkpoint has under several keys, a chunk at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from ..errors import CorruptCheckpointError
from ..pieces import overlaps
from .format import DTYPE_NBYTES
from .index import CheckpointIndex, StoredPiece, open_rank_file
from .system_errors import read_file

_CHUNK_NBYTES = 4 << 20


def have_same_values(index: CheckpointIndex, keys: Sequence[str]) -> bool:
    """Tell whether the tensors under these keys have the same dtype, shape and bytes, wherever they are stored.

    Raises:
        CorruptCheckpointError: a file is shorter than it was.
        IncompleteCheckpointError: a file vanished.
    """
    first, *others = keys
    return all(_are_same(index, first, other) for other in others)


def _are_same(index: CheckpointIndex, key: str, other: str) -> bool:
    if index.dtypes[key] != index.dtypes[other] or index.global_shape(key) != index.global_shape(other):
        return False
    return all(_overlap_is_same(index, one, another) for one in index.pieces(key) for another in index.pieces(other))


def _overlap_is_same(index: CheckpointIndex, one: StoredPiece, other: StoredPiece) -> bool:
    itemsize = DTYPE_NBYTES[one.piece.dtype]
    records = {record.name: record for record in index.files}
    descriptors = [open_rank_file(index.path, records[piece.file_name]) for piece in (one, other)]
    try:
        for start, other_start, numel in overlaps(one.piece, other.piece):
            offset, other_offset = one.byte_offset + start * itemsize, other.byte_offset + other_start * itemsize
            for done in range(0, numel * itemsize, _CHUNK_NBYTES):
                nbytes = min(_CHUNK_NBYTES, numel * itemsize - done)
                chunk = read_file(index.path / one.file_name, partial(os.pread, descriptors[0], nbytes, offset + done))
                other_chunk = read_file(index.path / other.file_name, partial(os.pread, descriptors[1], nbytes, other_offset + done))
                if len(chunk) != nbytes or len(other_chunk) != nbytes:
                    raise CorruptCheckpointError(
                        f"'{index.path}': {one.file_name} or {other.file_name} was cut while it was read; nothing was changed"
                    )
                if chunk != other_chunk:
                    return False
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True
