"""Fixtures that run functions on the ranks of a real job; a ``conftest.py`` imports those that its tests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .pool import RankPool, RankPools


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """All pools of the session."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(rank_pools: RankPools) -> Callable[[int], RankPool]:
    """``ranks(n)`` is the session's job of n ranks: ``ranks(2).run(function, *args)`` returns one result a rank."""
    return rank_pools.pool


@pytest.fixture
def single(rank_pools: RankPools) -> RankPool:
    """The session's one process outside any job, where ``paddle.distributed`` is not initialised."""
    return rank_pools.pool(1, initialised=False)


@pytest.fixture
def fresh_ranks(rank_pools: RankPools) -> Iterator[Callable[[int], RankPool]]:
    """``fresh_ranks(n)`` is a job of n brand-new processes, ended after the test (or before, by its ``close()``)."""
    pools: list[RankPool] = []

    def make(world_size: int) -> RankPool:
        pools.append(RankPool(world_size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
