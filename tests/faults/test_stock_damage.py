"""``verify`` on directories that stock Paddle wrote, which have no digests: what can be found is found, and the rest is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import RankPool
from training_cases import save_with_stock_paddle

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


@pytest.fixture(params=[False, True], ids=["distcp", "safetensors"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, ranks: Ranks) -> Path:
    path = tmp_path / "stock"
    ranks(2).run(save_with_stock_paddle, str(path), request.param)
    return path


def test_a_whole_directory(checkpoint: Path) -> None:
    report = ckpt.verify(checkpoint)
    assert report.is_good, str(report)
    assert (report.kind, report.world_size) == ("a checkpoint of stock Paddle", 2)
    assert report.not_checked == ("the values: stock Paddle keeps no digests",)


def test_files_that_are_missing_or_cut(checkpoint: Path) -> None:
    data = next(path for path in sorted(checkpoint.iterdir()) if path.name.startswith("1_0."))
    content = data.read_bytes()
    os.truncate(data, len(content) - 5)
    assert data.name in str(ckpt.verify(checkpoint).findings)
    data.unlink()
    assert data.name in str(ckpt.verify(checkpoint).findings)
    data.write_bytes(content)
    assert ckpt.verify(checkpoint).is_good
    (checkpoint / "0.metadata.lock").touch()
    assert "0.metadata.lock" in str(ckpt.verify(checkpoint).findings)
