"""Whole tensors in another dtype: still copies, never infinite in silence, and an error on all ranks where there is no such dtype."""

from __future__ import annotations

from collections.abc import Callable

import dtype_cases as cases
import pytest
from harness import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_they_are_copies_in_the_weights_own_dtype_too(ranks: Ranks, world_size: int, sharded: bool) -> None:
    ranks(world_size).run(cases.stay_as_they_are, sharded)


def test_no_such_dtype_or_device(ranks: Ranks) -> None:
    for said in (ranks(1).run(cases.refused, False)[0], *ranks(2).run(cases.refused, True)):
        for one, dtype in zip(said, ("bf16", "single", "int8"), strict=False):
            assert f"dtype is '{dtype}', and one of bfloat16, float16, float32, float64 is needed" in one
        for one, rank in zip(said[3:], ("'0'", "0.5"), strict=False):
            assert f"to_rank is {rank}, and the ranks that train the model are 0 to" in one
        for one in said[5:]:
            assert "tensors can't go to device 'nowhere'" in one or "rank 0 refused" in one


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (1, True), (2, True), (3, True)])
def test_values_too_large_for_the_dtype(ranks: Ranks, world_size: int, sharded: bool) -> None:
    every = ranks(world_size).run(cases.too_large, sharded)
    named = [said for said in every if "of which other ranks keep them" not in said[0]]
    assert named == [["values of weight are too large for float16, and would become infinite; ask for another dtype"] * 2]
    assert all("are too large for float16" in one for said in every for one in said)
