"""Whole tensors from one rank into a sharded model: strict, and as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

import gather_cases as cases
import pytest
from harness import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("kind", ["dict", "numpy", "iterator", "backwards", "one name"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_model_takes_what_one_rank_has(ranks: Ranks, world_size: int, kind: str) -> None:
    ranks(world_size).run(cases.scatter, kind)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "'head.bias' is missing, 'steps' is missing"),
        ("unexpected", "'head.skew' is no tensor of the model"),
        ("shape", "'conv.weight' is given as float32 [72], and the model wants float32 [4, 6, 3]"),
        ("dtype", "'scale' is given as float64 [1], and the model wants float32 [1]"),
        ("tied", "'out.weight' differs from what was given under another name of it: embed.weight = out.weight"),
        ("twice", "'scale' is given twice"),
        ("raises", "OSError: the pipe broke"),
    ],
)
def test_what_does_not_fit_changes_nothing_on_any_rank(ranks: Ranks, kind: str, words: str) -> None:
    first, second = ranks(2).run(cases.scatter_badly, kind)
    assert words in first
    assert "RankFailedError: load_full_state_dict: rank 0 of the group failed" in second


def test_master_weights_follow(ranks: Ranks) -> None:
    ranks(2).run(cases.masters_follow)
