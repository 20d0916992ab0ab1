"""Promise 6 and 7: whatever happens to a rank at any moment, the target holds the old or the new checkpoint, and no rank hangs."""

from __future__ import annotations

import errno
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from processes import Fault, Ranks, step_at

from paddle_fsdp_ckpt.storage.format import rank_file_name, replaced_name, staging_name

NONCE = "0123456789abcdef"
KILLS = 6
"""How many saves are killed at a random moment here; ``ci/faults.py`` kills 200."""


def check_survivors(results: list[str], victim: int) -> None:
    """All ranks but the victim have the same to say, and name it where the save failed."""
    others = [result for rank, result in enumerate(results) if rank != victim]
    assert set(results) == {"saved"} or all(result == "saved" or f"rank {victim}" in result for result in others), results


def save_again(tmp_path: Path, target: Path, step: int, world_size: int = 2) -> None:
    """The next save works, whatever the dead one left, and leaves nothing but the checkpoint."""
    assert Ranks(tmp_path / f"again-{step}", target, world_size, step=step, overwrite=True).results() == ["saved"] * world_size
    assert step_at(target) == step
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [None, errno.EIO], ids=["killed", "failing"])
def test_after_each_single_operation(tmp_path: Path, rank: int, error: int | None) -> None:
    target = tmp_path / "root" / "step"
    target.parent.mkdir()
    Ranks(tmp_path / "first", target, 2, step=1).results()
    old = 1
    for nth in range(100):
        new = nth + 2
        ranks = Ranks(tmp_path / f"save-{nth}", target, 2, step=new, overwrite=True, fault=Fault(rank, nth, error))
        results = ranks.results()
        check_survivors(results, rank)
        found = step_at(target)
        assert found in (old, new)
        assert found == new or results != ["saved"] * 2
        if not ranks.struck:
            break
        old = found
    assert nth > (10 if rank == 0 else 3)
    save_again(tmp_path, target, 1000)


def test_at_a_random_moment(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, KILLS)


def kill_at_random_moments(tmp_path: Path, kills: int) -> Counter[str]:
    """Kill each rank in turn while it saves 2 MiB; return how many saves ended how, for the rank and for the target."""
    target = tmp_path / "root" / "step"
    target.parent.mkdir()
    old, ended, longest = None, Counter[str](), 0.02
    for number in range(kills):
        victim = number % 2
        ranks = Ranks(tmp_path / f"save-{number}", target, 2, step=number, elements=1 << 19, overwrite=True)
        ranks.wait_until_they_begin()
        time.sleep(random.uniform(0, longest))
        ranks.kill(victim)
        results = ranks.results()
        check_survivors(results, victim)
        found = step_at(target)
        assert found in (old, number)
        # So that about as many are killed after the new one is visible as before.
        longest *= 0.8 if found == number else 1.25
        ended[f"{results[victim].split(':')[0]}, {'new' if found == number else 'old'}"] += 1
        old = found
    save_again(tmp_path, target, kills + 1)
    return ended


def test_left_overs_of_a_dead_save_of_another_world_size_are_cleared(tmp_path: Path) -> None:
    """Case 14."""
    target = tmp_path / "root" / "step"
    for name in (staging_name("step", NONCE), replaced_name("step", NONCE)):
        left = target.parent / name
        left.mkdir(parents=True)
        for rank in range(5):
            (left / rank_file_name(rank)).write_bytes(b"half")
        (left / "0.metadata").write_bytes(b"half")
        (left / "0.metadata.lock").touch()
    save_again(tmp_path, target, 3)
    assert sorted(path.name for path in target.iterdir()) == ["0.metadata", "0_0.safetensors", "1_0.safetensors", "manifest.json"]
    save_again(tmp_path, target, 4, world_size=3)
    save_again(tmp_path, target, 5, world_size=1)
    assert sorted(path.name for path in target.iterdir()) == ["0.metadata", "0_0.safetensors", "manifest.json"]
