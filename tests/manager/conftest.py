"""A root that tests of the manager may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import manager_runs
import pytest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pools: object) -> Path:
    """A root of 2 ranks with steps 1 to 3."""
    root = tmp_path_factory.mktemp("saved") / "root"
    rank_pools.pool(2).run(manager_runs.run, str(root), 0, 3)  # type: ignore[attr-defined]
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "root")
