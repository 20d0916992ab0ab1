"""With ``prefetch``, a sharded model trains as without: the scenarios once more, with collectives that end as late as they may."""

from __future__ import annotations

from collections.abc import Callable

import overlap_cases
import pytest
from harness import RankPool
from training_scenarios import SCENARIOS

Ranks = Callable[[int], RankPool]

NAMES = [name for name in SCENARIOS if not name.startswith("optimizer_")]
"""Optimizers see reduced gradients, however these came about."""

BATCHES = 4


@pytest.mark.parametrize("batch", range(BATCHES))
def test_scenarios_train_like_one_process(ranks: Ranks, batch: int) -> None:
    for began, finished in ranks(2).run(overlap_cases.train_ahead, NAMES[batch::BATCHES], 1 + batch % 2, timeout=200):
        assert 100 < 0.95 * began < finished <= began  # a unit may have been fetched at the end of a scenario


def test_replicas_train_like_one_process(ranks: Ranks) -> None:
    for began, finished in ranks(4).run(overlap_cases.train_replicas, "attention_blocks"):
        assert 0 < finished == began


def test_most_units_are_fetched_before_they_are_needed(ranks: Ranks) -> None:
    waited, ahead = ranks(2).run(overlap_cases.gathers_of_a_step, 0)[0]
    assert ahead == 0
    # The first of the forward, and of the backward.
    assert ranks(2).run(overlap_cases.gathers_of_a_step, 1) == [(2, waited - 2)] * 2
