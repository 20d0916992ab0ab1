"""Checkpoints of every format version so far can be read, for ever. ``make.py`` made them; they are never changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golden_cases import KINDS, STEPS, load
from harness import RankPool

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.storage.format import FORMAT_VERSION
from paddle_fsdp_ckpt.storage.index import read_index

HERE = Path(__file__).parent
GOLDEN = sorted(path for path in HERE.glob("v*_*") if path.is_dir())


def expected(path: Path) -> dict[str, np.ndarray]:
    with np.load(HERE / f"{path.name.partition('_')[0]}_expected.npz") as values:
        return dict(values)


def test_each_format_version_is_here_in_each_kind() -> None:
    assert {path.name for path in GOLDEN} == {f"v{version}_{kind}" for version in range(1, FORMAT_VERSION + 1) for kind in KINDS}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_its_files_hold_what_was_trained(path: Path) -> None:
    report = ckpt.verify(path)
    assert report.is_good, str(report)
    assert (report.step, report.world_size) == (STEPS, 2)
    index = read_index(path)
    values = expected(path)
    assert values.keys() <= set(index.keys())
    for key, whole in values.items():
        read = np.full(whole.size, np.nan, np.float32)
        for stored in index.pieces(key):
            # Written by hand on purpose: no function of the package that reads values is used here.
            piece = stored.piece
            assert piece.local_shape == piece.global_shape == whole.shape
            data = (path / stored.file_name).read_bytes()[stored.byte_offset :][: 4 * piece.numel]
            read[piece.box_range.start : piece.box_range.stop] = np.frombuffer(data, np.float32)
        np.testing.assert_allclose(read.reshape(whole.shape), whole, rtol=1e-5, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_it_is_loaded(path: Path, world_size: int, ranks: Callable[[int], RankPool]) -> None:
    values = expected(path)
    seen = dict.fromkeys(values, 0)
    for step, extra_state, pieces in ranks(world_size).run(load, str(path)):
        assert step == STEPS
        assert extra_state == {"kind": path.name.partition("_")[2], "loss": float("inf")}
        for key, (start, stop, held) in pieces.items():
            np.testing.assert_allclose(held, values[key].reshape(-1)[start:stop], rtol=1e-5, atol=1e-7, err_msg=key)
            seen[key] += stop - start
    assert all(count >= values[key].size for key, count in seen.items())
