"""Of a damaged checkpoint, what is intact is loaded where that is said, and what is not is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import salvage_cases as cases
from harness import RankPool

from paddle_fsdp_ckpt.storage.format import DTYPE_NBYTES
from paddle_fsdp_ckpt.storage.index import read_index

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pools: object) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("salvage") / "saved"
    values = rank_pools.pool(2).run(cases.save, str(path))[0]  # type: ignore[attr-defined]
    return path, values


def damaged(saved: Path, target: Path, key: str) -> str:
    """Copy a checkpoint, and flip a bit in the middle of the first piece of ``key``."""
    shutil.copytree(saved, target)
    piece, name, offset = next(iter(read_index(target).pieces(key)))
    data = bytearray((target / name).read_bytes())
    data[offset + DTYPE_NBYTES[piece.dtype] * piece.numel // 2] ^= 4
    (target / name).write_bytes(data)
    return str(target)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_state_starts_afresh(saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, ranks: Ranks, world_size: int) -> None:
    path = damaged(saved[0], tmp_path / "damaged", "second.weight.moment1_0")
    pool = ranks(world_size)
    for said in pool.run(cases.load_badly_unsalvaged, path):
        assert "is damaged between bytes" in said
    for said in pool.run(cases.load_badly_salvaged, path, []):
        assert said.startswith("MismatchError")
        assert "1 missing from the checkpoint: 'second.weight.moment1_0'" in said
    for said in pool.run(cases.load_badly_salvaged, path, ["*.moment1_0"]):
        assert "half a state is of no use" in said
    for report, values in pool.run(cases.load_intact, path, ["second.weight.*"]):
        assert list(report.damaged) == ["second.weight.moment1_0"]
        assert report.started_afresh == ["second.weight"]
        assert not report.missing
        assert not report.is_exact
        assert report.step == 5
        right = {key: value for key, value in saved[1].items() if not key.startswith("second.weight.")}
        assert values.keys() == right.keys()
        for key, value in right.items():
            np.testing.assert_array_equal(values[key], value, err_msg=key)


def test_a_damaged_weight_is_left_as_it_was(saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, ranks: Ranks) -> None:
    path = damaged(saved[0], tmp_path / "damaged", "first.weight")
    for report, values in ranks(2).run(cases.load_intact, path, ["first.weight"]):
        assert report.missing == ["first.weight"]
        assert list(report.damaged) == ["first.weight"]
        np.testing.assert_array_equal(values["second.weight"], saved[1]["second.weight"])
        np.testing.assert_array_equal(values["first.weight"], saved[1]["first.weight"] + 100.0)
        np.testing.assert_array_equal(values["first.weight.moment2_0"], saved[1]["first.weight.moment2_0"])


def test_a_file_that_is_lost_takes_states_with_it_that_nobody_can_name(
    saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, ranks: Ranks
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(saved[0], path)
    (path / "1_0.safetensors").unlink()
    for said in ranks(2).run(cases.load_badly_salvaged, str(path), ["second.weight"]):
        assert "have no states in it" in said or "'second.weight." in said
    for report, values in ranks(2).run(cases.load_intact, str(path), ["*"]):
        assert "1_0.safetensors" in report.damaged
        assert "second.weight" in report.started_afresh
        assert not any(key.startswith("second.weight.") for key in values)


def test_of_an_intact_one_everything_is_loaded(saved: tuple[Path, dict[str, np.ndarray]], ranks: Ranks) -> None:
    for report, values in ranks(2).run(cases.load_intact, str(saved[0]), []):
        assert report.is_exact
        for key, value in saved[1].items():
            np.testing.assert_array_equal(values[key], value, err_msg=key)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_master_weight_stands_for_a_damaged_weight(tmp_path: Path, ranks: Ranks, world_size: int) -> None:
    """Where the weight itself would be taken from it too, that of a low-precision model."""
    masters = ranks(2).run(cases.save_low, str(tmp_path / "saved"))[0]
    path = damaged(tmp_path / "saved", tmp_path / "damaged", "first.weight")
    for report, values in ranks(world_size).run(cases.load_as_float32, path, []):
        assert list(report.damaged) == ["first.weight"] and report.missing == []
        assert ("first.weight", "first.weight.w_0") in {(one.key, one.source) for one in report.casts}
        np.testing.assert_array_equal(values["first.weight"], masters)
    path = damaged(Path(path), tmp_path / "both", "first.weight.w_0")
    for report, values in ranks(world_size).run(cases.load_as_float32, path, ["first.weight"]):
        assert report.missing == ["first.weight"]
        assert values["first.weight"].min() >= 100.0


def test_where_all_lies_in_damage_the_error_says_so(saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(saved[0], path)
    for name in ("0_0.safetensors", "1_0.safetensors"):
        (path / name).write_bytes((path / name).read_bytes()[:100])
    for allowed in ([], ["*"]):
        for said in ranks(2).run(cases.load_badly_salvaged, str(path), allowed):
            assert said.startswith("CorruptCheckpointError")
            assert "all of it that could match is damaged: " in said and "0_0.safetensors" in said
            assert "load another checkpoint" in said
            assert "not one key matches" not in said and "allow_missing" not in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_manifest_values_are_taken_unchecked_where_that_is_said(
    saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, ranks: Ranks, world_size: int
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(saved[0], path)
    (path / "manifest.json").unlink()
    for said in ranks(world_size).run(cases.load_badly_salvaged, str(path), []):
        assert "load(..., salvage=True, check_digests=False) takes them unchecked" in said
    for report, values in ranks(world_size).run(cases.load_unchecked, str(path)):
        assert list(report.damaged) == ["manifest.json"]
        assert report.step is None
        assert not report.is_exact
        assert any("manifest is lost" in one for one in report.differences)
        assert values.keys() == saved[1].keys()
        for key, value in saved[1].items():
            np.testing.assert_array_equal(values[key], value, err_msg=key)
