"""Checkpoints that several files' tests load."""

from __future__ import annotations

import pytest
from harness import RankPools
from loaded_bases import Saved


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pools: RankPools) -> Saved:
    return Saved(tmp_path_factory.mktemp("bases"), rank_pools.pool(2))
