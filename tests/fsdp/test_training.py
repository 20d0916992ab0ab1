"""A sharded model trains like one unfused process on the same global batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import RankPool
from training_runs import compare
from training_scenarios import FLOAT32, SCENARIOS

EVERYWHERE = {
    "attention_blocks",
    "blocks_12",
    "convolutions_adamw",
    "everything_frozen_but_adapters",
    "experts_missed_by_a_rank",
    "optimizer_groups",
    "parameters_smaller_than_the_world",
    "parameters_unused_on_one_rank",
    "tied_by_matmul_in_the_root",
    "two_optimizers_over_halves_of_a_model",
}
"""Tried at every world size; the others at 1 and 2 ranks and, in turn, at 3 or 4; optimizers at 2 and 3."""


def world_sizes(number: int, name: str) -> tuple[int, ...]:
    if name in EVERYWHERE:
        return 1, 2, 3, 4
    return (2, 3) if name.startswith("optimizer_") else (1, 2, (3, 4)[number % 2])


CASES = [(name, world_size) for number, name in enumerate(SCENARIOS) for world_size in world_sizes(number, name)]


def train(name: str) -> None:
    compare(SCENARIOS[name], "float32" if name in FLOAT32 else "float64")


@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_trains_like_one_process(ranks: Callable[[int], RankPool], name: str, world_size: int) -> None:
    ranks(world_size).run(train, name, timeout=30)


@pytest.mark.parametrize("name", sorted(EVERYWHERE))
def test_trains_without_a_process_group(single: RankPool, name: str) -> None:
    single.run(train, name, timeout=30)
