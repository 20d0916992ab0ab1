"""The lines of the section "What happens when" of the README, one test each, on ranks of a real job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import RankPool
from training_cases import (
    SHORT,
    die_while_saving,
    fail_and_go_on,
    load_damaged,
    load_into_another_model,
    reference_loss,
    resume,
    save_trained,
)

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.storage.index import read_index, read_manifest

Ranks = Callable[[int], RankPool]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_dies(tmp_path: Path, fresh_ranks: Ranks, victim: int) -> None:
    path = tmp_path / "step"
    outcomes = fresh_ranks(2).outcomes(die_while_saving, str(path), victim, may_die=[victim], grace=30.0)
    assert outcomes[victim].exit_code is not None
    text, seconds = outcomes[1 - victim].value
    assert re.search(rf"rank {victim}\b.*killed", text)
    assert seconds < 2 * SHORT if victim == 0 else SHORT <= seconds < 10 * SHORT, "the store ends with the first rank"
    assert read_manifest(path).step == 1, "the old checkpoint is untouched"
    assert ckpt.verify(path).is_good
    if victim != 0:
        assert [one.name for one in tmp_path.iterdir()] == ["step"]
    fresh_ranks(1).run(save_trained, str(tmp_path / "next"))
    assert (tmp_path / "next" / "manifest.json").exists()


@pytest.mark.parametrize("failing", [0, 1])
def test_the_disk_is_full_and_training_goes_on(tmp_path: Path, ranks: Ranks, failing: int) -> None:
    path = tmp_path / "step"
    for text, losses, without in ranks(2).run(fail_and_go_on, str(path), failing):
        assert text.startswith(f"rank {failing} failed: OSError: [Errno 28] No space left on device: '")
        assert text.endswith(f"{failing}_0.safetensors'; the disk is full: make room there, or save elsewhere")
        assert losses == without
    assert [one.name for one in tmp_path.iterdir()] == ["step"]
    assert read_manifest(path).step == 4
    assert ckpt.verify(path).is_good


@pytest.fixture
def checkpoint(tmp_path: Path, ranks: Ranks) -> Path:
    path = tmp_path / "step"
    ranks(2).run(save_trained, str(path))
    return path


@pytest.mark.parametrize("verify_first", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bit_rots(checkpoint: Path, ranks: Ranks, world_size: int, verify_first: bool) -> None:
    index = read_index(checkpoint)
    pieces = [one for key in index.stored for one in index.pieces(key)]
    stored = next(one for one in pieces if one.file_name == "1_0.safetensors" and one.piece.key.endswith(".moment1_0"))
    flip(checkpoint / "1_0.safetensors", stored.byte_offset)
    results = ranks(world_size).run(load_damaged, str(checkpoint), verify_first)
    assert "CorruptCheckpointError" in [kind for kind, _, _ in results]
    for kind, text, changed in results:
        assert kind in ("CorruptCheckpointError", "RankFailedError")
        assert "1_0.safetensors' is damaged between bytes" in text
        assert ("nothing was changed" in text) == verify_first
        assert ("must be loaded again" in text) != verify_first
        assert not (verify_first and changed)
    (finding,) = ckpt.verify(checkpoint).findings
    assert finding.where == "1_0.safetensors"
    left = ckpt.salvage(checkpoint)
    assert stored.piece.key in left.damaged
    assert left.unreadable == {}


def test_the_model_is_another(checkpoint: Path, ranks: Ranks) -> None:
    for kind, text, changed in ranks(2).run(load_into_another_model, str(checkpoint)):
        assert kind in ("MismatchError", "RankFailedError")
        assert "'0.weight'" in text and "[4, 6]" in text and "[4, 5]" in text
        assert not changed


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_number_of_ranks_is_another(checkpoint: Path, ranks: Ranks, single: RankPool, world_size: int) -> None:
    (expected,) = single.run(reference_loss)
    for step, loss in ranks(world_size).run(resume, str(checkpoint)):
        assert step == 2
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["0_0.safetensors", "1_0.safetensors", "manifest.json"])
def test_a_file_is_missing(checkpoint: Path, ranks: Ranks, name: str) -> None:
    (checkpoint / name).unlink()
    for kind, text, changed in ranks(2).run(load_damaged, str(checkpoint), False):
        assert kind in ("IncompleteCheckpointError", "RankFailedError")
        assert name in text
        assert not changed
    assert name in str(ckpt.verify(checkpoint))
