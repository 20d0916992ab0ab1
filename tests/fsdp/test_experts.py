"""Mixtures of experts with routers, and ordinary trouble, train like one unfused process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from expert_scenarios import SCENARIOS
from harness import RankPool
from training_runs import compare


def train(name: str) -> None:
    compare(SCENARIOS[name], "float64")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_like_one_process(name: str, world_size: int, ranks: Callable[[int], RankPool]) -> None:
    ranks(world_size).run(train, name, timeout=30)
