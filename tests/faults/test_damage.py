"""Promise 8 and case 20: every damage to a checkpoint is found and named, by ``verify`` and by a load, and nothing is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import damage
import pytest
from harness import RankPool
from training_cases import save_trained

FLIPS = 250
TRUNCATIONS = 30
"""``ci/faults.sh`` makes 1,000 and 100."""


@pytest.fixture(scope="module")
def saved(rank_pools, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    """A checkpoint that two ranks saved."""
    pool: RankPool = rank_pools.pool(2)
    path = tmp_path_factory.mktemp("saved") / "step"
    pool.run(save_trained, str(path))
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "step"))


def test_flipped_bits(checkpoint: Path) -> None:
    assert damage.check_everybody_notices(checkpoint, damage.flip_bits(checkpoint, FLIPS, seed=1)) == FLIPS


def test_truncations(checkpoint: Path) -> None:
    assert damage.check_everybody_notices(checkpoint, damage.truncate(checkpoint, TRUNCATIONS, seed=2)) == TRUNCATIONS


@pytest.mark.parametrize("kind", [damage.append, damage.swap_files, damage.remove, damage.edit_manifest])
def test_other_damage(checkpoint: Path, kind: Callable[[Path], damage.Damage]) -> None:
    assert damage.check_everybody_notices(checkpoint, kind(checkpoint)) >= 1
