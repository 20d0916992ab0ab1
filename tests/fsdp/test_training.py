"""A sharded model trains like one unfused process on the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import RankPool

pytest.importorskip("paddle")

from training_runs import compare  # noqa: E402
from training_scenarios import FLOAT32, SCENARIOS  # noqa: E402


def train(name: str) -> None:
    compare(SCENARIOS[name], "float32" if name in FLOAT32 else "float64")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_like_one_process(ranks: Callable[[int], RankPool], name: str, world_size: int) -> None:
    ranks(world_size).run(train, name, timeout=30)
