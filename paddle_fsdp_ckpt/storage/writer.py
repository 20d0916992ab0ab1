"""Write one rank's file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..pieces import Piece, check_piece
from .buffers import as_bytes, write_all
from .format import DTYPE_NBYTES, FileRecord
from .header import encode_header, in_file_order


def write_rank_file(path: Path, pieces: Sequence[tuple[Piece, memoryview]]) -> FileRecord:
    """Write the pieces into a new file and wait until it is on the disk.

    The data is handed to the system as it lies in memory, without a copy. Pieces without elements are not stored.

    Args:
        path: the file, whose directory exists; it must not exist itself. Its permissions follow the umask.
        pieces: each with its C-contiguous bytes in row-major order, ``numel`` times the dtype's size. Any object with the
            buffer protocol will do. Each key at most once.

    Raises:
        ValueError: a piece that is no part of its tensor, an unknown dtype, a wrong number of bytes, or a key twice. No file
            was made.
        FileExistsError: the file is there already; it was not touched.
        OSError: the system refused, e.g. the disk is full. The file was removed.
    """
    for piece, _ in pieces:
        if piece.dtype not in DTYPE_NBYTES:
            raise ValueError(f"'{piece.key}' has dtype '{piece.dtype}', and a checkpoint holds only {', '.join(DTYPE_NBYTES)}")
        check_piece(piece)
    order = in_file_order([piece for piece, _ in pieces])
    buffers = [memoryview(encode_header([pieces[i][0] for i in order]))]
    for i in order:
        piece, data = pieces[i]
        buffer = as_bytes(data, f"'{piece.key}'")
        if len(buffer) != piece.numel * DTYPE_NBYTES[piece.dtype]:
            raise ValueError(
                f"'{piece.key}' has {len(buffer)} bytes, and {piece.numel} elements of {piece.dtype} are "
                f"{piece.numel * DTYPE_NBYTES[piece.dtype]}"
            )
        buffers.append(buffer)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            write_all(descriptor, buffers)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        os.unlink(path)
        raise
    return FileRecord(path.name, sum(map(len, buffers)), len(order))
