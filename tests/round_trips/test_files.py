"""Promise 11 in the small: files hold the pieces and little more, loads read only what a rank wants, and nothing big is copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from file_cases import BIG_NBYTES, big_model_memory, bytes_read, save_many
from harness import RankPool

from paddle_fsdp_ckpt.storage.digests import CHUNK_NBYTES
from paddle_fsdp_ckpt.storage.index import read_index

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("world_size", [1, 3])
def test_sizes_of_files(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    """Case 18: one large and 1,000 tiny parameters."""
    path = tmp_path / "many"
    ranks(world_size).run(save_many, str(path))
    index = read_index(path)
    pieces = [
        (stored.file_name, stored.piece.numel * np.dtype(stored.piece.dtype).itemsize)
        for key in index.stored
        for stored in index.pieces(key)
    ]
    for record in index.files:
        nbytes = sum(size for name, size in pieces if name == record.name)
        assert nbytes <= (path / record.name).stat().st_size <= nbytes + 1000 + 250 * record.pieces
    assert sum(size for _, size in pieces) == 4 * (1000 * 3 + 3000 * 1001)


@pytest.mark.parametrize(("source", "target"), [(2, 2), (2, 3), (3, 2), (1, 3)])
def test_a_rank_reads_what_it_wants(source: int, target: int, tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "many"
    ranks(source).run(save_many, str(path))
    for read, wanted, kept in ranks(target).run(bytes_read, str(path)):
        assert wanted == kept
        # Files are read in whole chunks: at most one at either end of what lies together.
        assert wanted <= read <= wanted + 3 * CHUNK_NBYTES


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_big_is_copied(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    for grown, traced in ranks(world_size).run(big_model_memory, str(tmp_path / "big")):
        assert grown < BIG_NBYTES // 3
        assert traced < BIG_NBYTES // 6
