"""Other layouts of the same values: plain models, other units, other groups, several optimizers, master weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import whole
from harness import RankPool, assert_equal_states
from whole_cases import (
    fresh_optimizer,
    frozen_later,
    grouped,
    inside_local_parameters,
    load_plain,
    load_sharded,
    masters,
    odd_tensors,
    optimizer_alone,
    refuse_given_of_others,
    reordered,
    save_given,
    save_plain,
    strange_names,
    truth_on_ranks,
    two_models,
    two_optimizers,
)

Ranks = Callable[[int], RankPool]


def flat(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: array.reshape(-1) for key, array in arrays.items()}


def is_state(key: str) -> bool:
    return key.endswith("_0")


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("model", ["tied", "convolutions"])
@pytest.mark.parametrize("source", ["single", "ranks"])
def test_saved_plain_loaded_sharded(source: str, model: str, weights_only: bool, tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    path = str(tmp_path / "plain")
    results = (single if source == "single" else ranks(2)).run(save_plain, model, path)
    truth, states, losses = results[0]
    for world_size in (1, 2, 3):
        loaded = ranks(world_size).run(load_sharded, model, path, weights_only)
        found = whole([outcome for outcome, _ in loaded])
        assert_equal_states({key: array for key, array in found.items() if not is_state(key)}, flat(truth))
        if weights_only:
            assert all(sorted(outcome.report.not_asked_for) == sorted(states) for outcome, _ in loaded)
        else:
            assert_equal_states({key: array for key, array in found.items() if is_state(key)}, flat(states))
            if model != "convolutions":  # BatchNorm sees another batch on each rank.
                np.testing.assert_allclose(loaded[0][1], losses, rtol=2e-5)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_saved_sharded_loaded_plain(world_size: int, weights_only: bool, tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    path = str(tmp_path / "sharded")
    saved = ranks(world_size).run(truth_on_ranks, "partly", path)
    truth = whole(saved)
    for pool in (single, ranks(2)):
        for weights, states, losses, report in pool.run(load_plain, "partly", path, weights_only):
            assert_equal_states(flat(weights), {key: array for key, array in truth.items() if not is_state(key)})
            if weights_only:
                assert report.not_asked_for
            else:
                assert_equal_states(flat(states), {key: array for key, array in truth.items() if is_state(key)})
                np.testing.assert_allclose(losses, saved[0].losses, rtol=2e-5)


def test_plain_resume_is_bit_for_bit(tmp_path: Path, single: RankPool) -> None:
    path = str(tmp_path / "plain")
    _, states, losses = single.run(save_plain, "fading", path)[0]
    _, loaded, resumed, _ = single.run(load_plain, "fading", path, False)[0]
    assert_equal_states(loaded, states)
    assert resumed == losses


@pytest.mark.parametrize(("saved_units", "loaded_units"), [(None, ["Tied"]), (["Linear", "LayerNorm", "Embedding"], None)])
def test_other_units(saved_units: list[str] | None, loaded_units: list[str] | None, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "units")
    saved = ranks(2).run(grouped, saved_units, path, True)
    assert_equal_states(whole(ranks(3).run(grouped, loaded_units, path, False)), whole(saved))


def test_frozen_later(tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(2).run(frozen_later, str(tmp_path / "frozen"))
    assert_equal_states(whole([loaded for _, loaded in results]), whole([saved for saved, _ in results]))


def test_param_groups_in_another_order(tmp_path: Path, ranks: Ranks) -> None:
    for uninterrupted, resumed, same in ranks(2).run(reordered, str(tmp_path / "groups")):
        assert resumed == uninterrupted
        assert same


def test_two_optimizers_over_halves(tmp_path: Path, ranks: Ranks) -> None:
    for uninterrupted, resumed, message in ranks(2).run(two_optimizers, str(tmp_path / "halves")):
        assert resumed == uninterrupted
        assert "velocity_0" in message and "not in the objects" in message


def test_two_models(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(two_models, [str(tmp_path / "one"), str(tmp_path / "other")]) == [True, True]


@pytest.mark.parametrize("world_size", [1, 2])
def test_master_weights(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    for found in ranks(world_size).run(masters, str(tmp_path / "masters")):
        assert len(found) == 8 and all(found.values()), found


def test_an_optimizer_that_has_not_stepped(tmp_path: Path, ranks: Ranks) -> None:
    for changed, without_state, uninterrupted, resumed in ranks(2).run(fresh_optimizer, str(tmp_path / "fresh")):
        assert changed == []
        assert without_state > 0
        assert resumed == uninterrupted


@pytest.mark.parametrize("sharded", [True, False])
def test_odd_tensors(sharded: bool, tmp_path: Path, ranks: Ranks) -> None:
    for saved, loaded, wrong in ranks(2).run(odd_tensors, str(tmp_path / "odd"), sharded):
        assert wrong == []
        assert_equal_states(loaded, saved)


@pytest.mark.parametrize("model", ["partly", "tiny"])
def test_the_optimizer_alone(model: str, tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(optimizer_alone, model, str(tmp_path / "alone")) == [(True, True, True)] * 2


def test_inside_local_parameters(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(inside_local_parameters, str(tmp_path / "local")) == [True, True]


def test_strange_names(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(strange_names, str(tmp_path / "names")) == [True, True]


def test_states_given_by_set_state_dict(tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    path = str(tmp_path / "given")
    losses, resumed = single.run(save_given, path)[0]
    assert resumed == losses
    np.testing.assert_allclose(ranks(2).run(load_sharded, "tied", path, False)[0][1], losses, rtol=2e-5)


def test_states_of_others_given_by_set_state_dict_are_refused(tmp_path: Path, single: RankPool) -> None:
    said, *left = single.run(refuse_given_of_others, str(tmp_path / "refused"))[0]
    assert "AdamW was given states by set_state_dict of parameters that it doesn't hold: " in said
    assert "make first the model" in said
    assert left == []
