"""Random models train like one unfused process. A failing seed is a test case: run it alone by ``-k "[2-17]"``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from harness import RankPool
from random_models import random_training
from training_runs import compare

SEEDS = {1: range(20), 2: range(20, 36), 3: range(36, 44)}


def train(seed: int) -> None:
    compare(functools.partial(random_training, seed), "float64")


@pytest.mark.parametrize(("world_size", "seed"), [(world_size, seed) for world_size, seeds in SEEDS.items() for seed in seeds])
def test_random_model_trains_like_one_process(ranks: Callable[[int], RankPool], world_size: int, seed: int) -> None:
    ranks(world_size).run(train, seed, timeout=30)
