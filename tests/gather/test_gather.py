"""Whole tensors: right, owned, one buffer at a time, and no rank left waiting."""

from __future__ import annotations

from collections.abc import Callable

import gather_cases as cases
import numpy as np
import pytest
from harness import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_parameters_and_buffers_under_all_names(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(cases.gather_everything)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_buffer_is_gathered_once_and_only_where_something_of_it_is_wanted(ranks: Ranks, world_size: int) -> None:
    for of_adapters, of_all, buffers, of_nothing in ranks(world_size).run(cases.gather_some):
        # Four adapted layers, each a unit with one buffer of adapters and one of frozen weights.
        assert of_adapters == (4 if world_size > 1 else 0)
        assert of_all == (buffers if world_size > 1 else [])
        assert of_nothing == 0


@pytest.mark.parametrize("is_sharded", [True, False])
def test_patterns_of_no_name_are_warned_of(is_sharded: bool, ranks: Ranks) -> None:
    for include, exclude, state in ranks(2).run(cases.patterns_of_no_name, is_sharded):
        assert include.startswith("include: nothing is called as 'nope.*'; the names are ") and include.endswith(" more)")
        assert exclude.startswith("exclude: nothing is called as 'hed.*'; the names are ")
        assert state.startswith("exclude: nothing is called as 'stps'; ")


def test_one_buffer_is_whole_at_a_time(ranks: Ranks) -> None:
    for found in ranks(2).run(cases.peaks):
        for what, (allowed, needed) in found.items():
            assert needed <= allowed + 2_000, what


@pytest.mark.parametrize("when", [0, 1, 5])
def test_a_rank_that_leaves_early_is_an_error_on_the_others(ranks: Ranks, when: int) -> None:
    said = ranks(3).run(cases.leave_early, when)
    assert said[2] == ""
    assert all("another rank left iter_full_parameters before its end" in one for one in said[:2])


@pytest.mark.parametrize("kind", ["step", "load", "set_value", "plain"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_of_two_moments_are_an_error(ranks: Ranks, world_size: int, kind: str) -> None:
    for everything, head, one in ranks(world_size).run(cases.change_in_the_middle, kind):
        assert "the weights changed while iter_full_parameters ran" in everything
        # Two tensors that came out of one gathered buffer are of one moment; a single rank has no copy of it. And set_value was of another.
        is_old = kind == "set_value" or (world_size > 1 and kind != "plain")
        assert (head == "2") is is_old
        assert is_old or "the weights changed" in head
        assert one == "1"


def test_ranks_that_ask_for_different_things_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.ask_for_different_things):
        assert "what is asked of iter_full_parameters differs between ranks" in said


def test_a_step_after_a_gather_is_bit_for_bit_the_step_without(ranks: Ranks) -> None:
    pool = ranks(2)
    for with_gather, without in zip(pool.run(cases.step_after_a_gather, True), pool.run(cases.step_after_a_gather, False), strict=True):
        assert with_gather[0] == without[0]
        for key, value in without[1].items():
            np.testing.assert_array_equal(with_gather[1][key], value, err_msg=key)


@pytest.mark.parametrize("optimizer", list(cases.OPTIMIZERS))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whole_states_are_those_of_the_plain_optimizer(ranks: Ranks, single: RankPool, world_size: int, optimizer: str) -> None:
    (right,) = single.run(cases.states_of, optimizer, False)
    for found in ranks(world_size).run(cases.states_of, optimizer, True):
        assert found.keys() == right.keys()
        for key, value in right.items():
            assert found[key].dtype == value.dtype, key
            assert found[key].shape == value.shape, key
            np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_a_plain_model_gives_what_it_has(ranks: Ranks) -> None:
    ranks(2).run(cases.plain_model)
