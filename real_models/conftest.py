"""Fixtures of the tests with real models; see ``README.md``, "A real Qwen3-MoE". Nothing is downloaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import pytest
from harness import RankPool, RankPools
from harness.fixtures import rank_pools
from imports import import_paddleformers, import_torch

__all__ = ["rank_pools", "ranks", "single", "torch_process"]

# The ranks' processes inherit it. Whatever tries to download fails at once.
os.environ |= {"HF_HUB_OFFLINE": "1", "DOWNLOAD_SOURCE": "huggingface"}

PATIENCE_SECONDS = 300.0
"""For a run. Importing alone takes long on a busy machine, longer than one rank may keep another waiting; so all ranks do that first."""


@pytest.fixture(scope="session")
def warm_pools(rank_pools: RankPools) -> Callable[[int, bool], RankPool]:
    """``warm_pools(n, initialised)`` is the session's job of n ranks, PaddleFormers imported."""
    pools: dict[tuple[int, bool], RankPool] = {}

    def make(world_size: int, initialised: bool) -> RankPool:
        if (world_size, initialised) not in pools:
            pool = pools[world_size, initialised] = rank_pools.pool(world_size, initialised=initialised)
            pool.run = functools.partial(pool.run, timeout=PATIENCE_SECONDS)
            pool.run(import_paddleformers)
        return pools[world_size, initialised]

    return make


@pytest.fixture
def ranks(warm_pools: Callable[[int, bool], RankPool]) -> Callable[[int], RankPool]:
    """``ranks(n)`` is the session's job of n ranks."""
    return lambda world_size: warm_pools(world_size, True)


@pytest.fixture
def single(warm_pools: Callable[[int, bool], RankPool]) -> RankPool:
    """The session's one process outside any job."""
    return warm_pools(1, False)


@pytest.fixture(scope="session")
def torch_process() -> Iterator[RankPool]:
    """A process for PyTorch and transformers alone: where PaddleFormers is imported, it hides PyTorch from transformers."""
    pool = RankPool(1, initialised=False)
    pool.run(import_torch, timeout=PATIENCE_SECONDS)
    yield pool
    pool.close()
