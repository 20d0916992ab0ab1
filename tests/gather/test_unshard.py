"""``unshard`` gives everything back: the model, its optimizers, and the memory."""

from __future__ import annotations

from collections.abc import Callable

import gather_cases
import numpy as np
import pytest
import unshard_cases as cases
from harness import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("name", list(cases.CASES))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unshard(ranks: Ranks, world_size: int, name: str) -> None:
    assert ranks(world_size).run(cases.run_case, name) == list(range(world_size))


@pytest.mark.parametrize("optimizer", list(gather_cases.OPTIMIZERS))
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_goes_on_as_the_plain_one_that_it_always_was(ranks: Ranks, single: RankPool, world_size: int, optimizer: str) -> None:
    ((weights, states),) = single.run(cases.trains_on, optimizer, "plain")
    for found_weights, found_states in ranks(world_size).run(cases.trains_on, optimizer, "unsharded"):
        for found, right in ((found_weights, weights), (found_states, states)):
            assert found.keys() == right.keys()
            for key, value in right.items():
                assert found[key].shape == value.shape, key
                np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_the_shards_are_freed(ranks: Ranks) -> None:
    matrix = 256 * 256 * 4
    for cut, whole, nothing in ranks(2).run(cases.frees_the_shards):
        assert cut < 2 * matrix  # half of the weight and of two moments
        assert 3 * matrix <= whole < 3 * matrix + 10_000
        assert nothing < 10_000
