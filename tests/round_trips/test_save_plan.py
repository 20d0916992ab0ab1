"""A save uses what the one before it worked out, and never where it isn't true any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import RankPool
from save_plan_cases import CHANGES, keeps_no_state_alive, other_choices, save_after_changes

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_save_plans_nothing_unless_something_changed(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    outcomes = ranks(world_size).run(save_after_changes, str(tmp_path))
    for name in CHANGES:
        assert all(outcome[name][1] for outcome in outcomes), f"{name}: the files differ"
    for name in ("nothing", "set_a_weight"):
        assert not any(outcome[name][0] for outcome in outcomes), name
    for name in CHANGES.keys() - {"nothing", "set_a_weight"}:
        assert outcomes[0][name][0], f"{name}: nothing was planned anew"


def test_with_an_optimizer_and_without(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(other_choices, str(tmp_path)) == [[True, True, True]] * 2


def test_a_plan_keeps_no_state_alive(ranks: Ranks) -> None:
    assert ranks(1).run(keeps_no_state_alive) == [True]
