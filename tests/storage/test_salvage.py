from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import cut, write_checkpoint

from paddle_fsdp_ckpt.errors import CorruptCheckpointError, IncompleteCheckpointError
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.plan import plan_read
from paddle_fsdp_ckpt.storage.reader import check_duplicates, execute_read
from paddle_fsdp_ckpt.storage.salvage import SalvageReport, salvage
from paddle_fsdp_ckpt.storage.verify import verify

LARGE = np.arange(1 << 19, dtype=np.float32)
WHOLE = {"a": LARGE, "b": LARGE + 0.5, "c": np.arange(7, dtype=np.float32), "beta": np.array(0.9, np.float32)}
NAMES = ("0_0.safetensors", "1_0.safetensors")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two files, each with half of ``a``; ``b`` and ``c`` in one of them; and ``beta`` in both."""
    half = 1 << 18
    first = [cut("a", LARGE, flat=(0, half)), cut("b", WHOLE["b"]), cut("beta", WHOLE["beta"])]
    second = [cut("a", LARGE, flat=(half, 2 * half)), cut("c", WHOLE["c"]), cut("beta", WHOLE["beta"])]
    return write_checkpoint(tmp_path / "step", [first, second])


def offset_of(path: Path, key: str, file: str) -> int:
    return next(stored.byte_offset for stored in read_index(path).pieces(key) if stored.file_name == file)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def check_values(report: SalvageReport) -> None:
    """Read all that is said to be intact; it must be what was saved."""
    targets = [Piece(key, "float32", WHOLE[key].shape, (0,) * WHOLE[key].ndim, WHOLE[key].shape) for key in report.intact]
    plan = plan_read(report.index, targets, report.intact)
    plan.problems.raise_if_any()
    check_duplicates(plan)
    read = [np.zeros(target.numel, np.float32) for target in targets]
    execute_read(plan, [values.data for values in read])
    for target, values in zip(targets, read, strict=True):
        np.testing.assert_array_equal(values, WHOLE[target.key].reshape(-1))


def test_what_has_no_damaged_chunk_is_intact(checkpoint: Path) -> None:
    flip(checkpoint / NAMES[0], offset_of(checkpoint, "b", NAMES[0]) + (3 << 19))
    report = salvage(checkpoint)
    assert set(report.intact) == {"a", "c", "beta"}
    assert report.damaged == {"b": "damaged in 0_0.safetensors"}
    assert (report.unreadable, report.manifest_problem) == ({}, None)
    check_values(report)
    assert "lost: 'b'" in str(report)


def test_a_copy_elsewhere_saves_a_key(checkpoint: Path) -> None:
    flip(checkpoint / NAMES[1], offset_of(checkpoint, "beta", NAMES[1]))
    report = salvage(checkpoint)
    assert "beta" in report.intact
    check_values(report)


@pytest.mark.parametrize("left", [0, 100, 500_000, 1 << 20, 3 << 20])
def test_the_front_of_a_file_that_was_cut_is_read(checkpoint: Path, left: int) -> None:
    path = checkpoint / NAMES[0]
    path.write_bytes(path.read_bytes()[:left])
    report = salvage(checkpoint)
    assert {"c", "beta"} <= set(report.intact)
    assert set(report.intact) | report.damaged.keys() >= {"a", "c", "beta"}
    assert (NAMES[0] in report.unreadable) == (left < 400)
    check_values(report)


def test_of_a_missing_file_only_what_others_hold_is_left(checkpoint: Path) -> None:
    (checkpoint / NAMES[1]).unlink()
    report = salvage(checkpoint)
    assert set(report.intact) == {"b", "beta"}
    assert set(report.damaged) == {"a"}
    assert "lacks the file 1_0.safetensors" in report.unreadable[NAMES[1]]
    check_values(report)


def test_a_damaged_manifest_leaves_the_values(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"epoch": 3', '"epoch": 2'))
    report = salvage(checkpoint)
    assert set(report.intact) == set(WHOLE)
    assert "damaged or edited" in (report.manifest_problem or "")
    assert not report.is_whole
    check_values(report)
    manifest.write_text(manifest.read_text()[:100])
    with pytest.raises(CorruptCheckpointError, match="malformed"):
        salvage(checkpoint)


def test_a_file_that_something_was_appended_to_is_not_read(checkpoint: Path) -> None:
    with open(checkpoint / NAMES[0], "ab") as file:
        file.write(b"x" * 10)
    report = salvage(checkpoint)
    assert set(report.intact) == {"c", "beta"}
    check_values(report)
    os.truncate(checkpoint / NAMES[0], (checkpoint / NAMES[0]).stat().st_size - 10)
    assert salvage(checkpoint).is_whole


@pytest.mark.parametrize("left", [None, "", '{"format_version": 1, "st'])
def test_without_a_manifest_the_headers_say_what_there_is(checkpoint: Path, left: str | None) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.unlink()
    if left is not None:
        manifest.write_text(left)
    with pytest.raises((CorruptCheckpointError, IncompleteCheckpointError), match="salvage --without-manifest DIR"):
        salvage(checkpoint)
    if left is not None:
        assert "salvage --without-manifest DIR" in str(verify(checkpoint))
    report = salvage(checkpoint, without_manifest=True)
    assert set(report.intact) == set(WHOLE)
    assert not report.is_whole
    assert "4 keys are there, and not checked, 0 are not" in str(report)
    assert "lost are all digests" in str(report)
    check_values(report)
    (checkpoint / NAMES[0]).rename(checkpoint / "2_0.safetensors")
    report = salvage(checkpoint, without_manifest=True)
    assert list(report.unreadable) == [NAMES[0]]  # that it is missing is known from what is there
    check_values(report)


def test_without_a_manifest_what_is_missing_or_cut_is_said(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "00_0.safetensors").write_bytes((checkpoint / NAMES[0]).read_bytes())
    with open(checkpoint / NAMES[0], "r+b") as file:
        file.truncate(1 << 20)
    report = salvage(checkpoint, without_manifest=True)
    assert set(report.intact) == {"c", "beta"}
    assert set(report.damaged) == {"a"}  # of which the other file holds half
    assert NAMES[0] in report.unreadable
    check_values(report)


def test_a_file_of_a_huge_rank_does_not_make_it_search_for_all_before(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    (checkpoint / NAMES[1]).rename(checkpoint / "999999999_0.safetensors")
    report = salvage(checkpoint, without_manifest=True)
    assert set(report.intact) == set(WHOLE)
    assert len(report.unreadable) < 10


def test_an_intact_manifest_is_used_all_the_same(checkpoint: Path) -> None:
    flip(checkpoint / NAMES[0], offset_of(checkpoint, "b", NAMES[0]) + (3 << 19))
    report = salvage(checkpoint, without_manifest=True)
    assert set(report.damaged) == {"b"}
    assert not report.are_digests_lost


def test_without_a_manifest_what_a_save_left_behind_is_refused(checkpoint: Path) -> None:
    left = checkpoint.with_name(".step.staging-0123456789abcdef")
    checkpoint.rename(left)
    (left / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match="unfinished save"):
        salvage(left, without_manifest=True)
    with pytest.raises(IncompleteCheckpointError, match="there is no checkpoint"):
        salvage(checkpoint, without_manifest=True)


def test_the_home_directory_has_its_short_name(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert salvage("~/step").is_whole
    assert verify("~/step").is_good
