"""The adapter for the development version's manual-mode context, on an object of its shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import manual_cases as cases
import numpy as np
import pytest
from fused_cases import assert_goes_on_alike, whole
from harness import RankPool, assert_equal_states

Ranks = Callable[[int], RankPool]


def test_buffers_of_experts_and_of_what_does_not_decay_are_apart(ranks: Ranks) -> None:
    for groups in ranks(2).run(cases.groups_of_buffers):
        assert (True, False, ["blocks.1.up.weight", "blocks.1.down.weight"]) in groups
        assert (False, True, [f"blocks.1.{name}" for name in ("norm.weight", "norm.bias", "up.bias", "down.bias")]) in groups
        assert len(groups) == 2 + 3 * 2


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_steps_states_and_resume_are_those_of_an_unfused_run(optimizer: str, tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    path = str(tmp_path / "checkpoint")
    results = ranks(2).run(cases.save_manual, optimizer, path)
    saved, uninterrupted = whole([one for one, _ in results]), [after for _, after in results]
    right = whole(single.run(cases.run_plain, optimizer, 3))
    assert saved.keys() == right.keys()
    for key, values in right.items():
        np.testing.assert_allclose(saved[key], values, rtol=1e-6, atol=1e-7, err_msg=key)
    loaded = ranks(2).run(cases.load_manual, optimizer, path)
    assert_equal_states(whole([one for one, _ in loaded]), saved)
    assert_goes_on_alike([after for _, after in loaded], uninterrupted)
    on_three = ranks(3).run(cases.load_manual, optimizer, path)
    assert_equal_states(whole([one for one, _ in on_three]), saved)
    assert_equal_states(whole([after for _, after in on_three]), whole(uninterrupted))
    assert_equal_states(whole(single.run(cases.load_plain, optimizer, path)), saved)


def test_in_a_world_of_one_pieces_are_whole(single: RankPool) -> None:
    for shape, is_flattened in single.run(cases.one_rank)[0].values():
        assert not is_flattened
        assert shape != (0,)


def test_a_load_lets_go_of_gathered_copies(tmp_path: Path, ranks: Ranks) -> None:
    for statuses in ranks(2).run(cases.gathered_copies, str(tmp_path / "checkpoint")):
        assert set(statuses) == {"FREED"}


def test_what_this_runtime_gets_wrong_is_repaired(ranks: Ranks) -> None:
    for actions in ranks(2).run(cases.repaired):
        assert len(actions) == 4


def test_a_missing_attribute_is_named(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.missing_attributes):
        assert said.keys() == set(cases.MISSING)
        for name, text in said.items():
            assert f"its Manual lacks {name}; use Paddle 3.4 (development" in text


def test_experts_on_other_ranks_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.other_ranks_for_experts):
        assert "cut 2 parameters over other ranks than the rest" in said


def test_weight_decay_of_mixed_buffers_is_refused_and_split(ranks: Ranks, single: RankPool) -> None:
    results = ranks(2).run(cases.decay)
    right = whole(single.run(cases.decay_plain))
    for of_one_kind, mixed, _ in results:
        assert of_one_kind == "nothing was raised"
        assert "weight decay is wrong for" in mixed
        assert "call split_weight_decay(model, optimizer)" in mixed
    mine = whole([held for _, _, held in results])
    for key, values in right.items():
        np.testing.assert_allclose(mine[key], values, rtol=1e-6, atol=1e-7, err_msg=key)


def test_frozen_buffers_have_no_states(tmp_path: Path, ranks: Ranks) -> None:
    for names in ranks(2).run(cases.frozen, str(tmp_path / "checkpoint")):
        assert names
        assert "embed.weight" not in names
