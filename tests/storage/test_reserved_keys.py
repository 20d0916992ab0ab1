"""Bytes under keys of our own, which anyone may have written."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_checkpoint

from paddle_fsdp_ckpt.errors import CorruptCheckpointError
from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.index import read_manifest
from paddle_fsdp_ckpt.storage.reserved_keys import COMMON_KEY, METRICS_KEY, bytes_piece, read_bytes


def test_bytes_come_back(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step", [[(bytes_piece(COMMON_KEY, 3), memoryview(b"abc"))]])
    assert read_bytes(path, read_manifest(path), 0, [COMMON_KEY, METRICS_KEY]) == {COMMON_KEY: bytearray(b"abc")}


@pytest.mark.parametrize(
    "piece",
    [
        Piece(COMMON_KEY, "uint8", (1 << 40,), (0,), (1 << 40,), Range(0, 4)),
        Piece(COMMON_KEY, "uint8", (1 << 40,), (7,), (4,)),
        Piece(COMMON_KEY, "uint8", (2, 2), (0, 0), (2, 2)),
        Piece(COMMON_KEY, "float32", (1,), (0,), (1,)),
    ],
)
def test_anything_else_is_refused_before_memory_is_taken_for_it(tmp_path: Path, piece: Piece) -> None:
    path = write_checkpoint(tmp_path / "step", [[(piece, memoryview(b"abcd"))]])
    with pytest.raises(CorruptCheckpointError, match="holds something else than bytes"):
        read_bytes(path, read_manifest(path), 0, [COMMON_KEY])
