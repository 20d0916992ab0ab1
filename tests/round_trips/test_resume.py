"""Promises 1 to 3: a resumed run is bit for bit the uninterrupted one; any world size loads any other's; saving changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import (
    MODELS,
    Outcome,
    load_and_train,
    train_and_save,
    whole,
)
from harness import RankPool, assert_equal_states
from zero_cases import steps_around_a_load

Ranks = Callable[[int], RankPool]
STEPS, MORE = 3, 3
OPTIMIZERS = ["adamw", "adamw groups", "adam amsgrad named", "momentum"]
"""A few with their settings; all of them are in test_every_optimizer.py."""


class Saves:
    """Checkpoints of this session, each made once."""

    def __init__(self, root: Path, ranks: Callable[[int], RankPool]) -> None:
        self._root = root
        self._ranks = ranks
        self.get = cache(self._make)

    def _make(self, world_size: int, model: str, optimizer: str) -> tuple[Path, list[Outcome], list[Outcome]]:
        path = self._root / f"{model} {optimizer} {world_size}"
        results = self._ranks(world_size).run(train_and_save, model, optimizer, str(path), STEPS, MORE)
        return path, [saved for saved, _ in results], [after for _, after in results]


@pytest.fixture(scope="session")
def saves(tmp_path_factory: pytest.TempPathFactory, rank_pools: object) -> Saves:
    return Saves(tmp_path_factory.mktemp("saves"), rank_pools.pool)  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_on_2_ranks_is_bit_for_bit(optimizer: str, saves: Saves, ranks: Ranks) -> None:
    path, saved, uninterrupted = saves.get(2, "tied", optimizer)
    results = ranks(2).run(load_and_train, "tied", optimizer, str(path), STEPS, MORE)
    assert_equal_states(whole([loaded for loaded, _ in results]), whole(saved))
    for (_, resumed), right in zip(results, uninterrupted, strict=True):
        assert resumed.losses == right.losses
        assert resumed.state.keys() == right.state.keys()
        for key, piece in right.state.items():
            np.testing.assert_array_equal(resumed.state[key].values, piece.values, err_msg=key)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "tied"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_resume_is_bit_for_bit_for_other_models(model: str, world_size: int, saves: Saves, ranks: Ranks) -> None:
    path, _, uninterrupted = saves.get(world_size, model, "adamw")
    results = ranks(world_size).run(load_and_train, model, "adamw", str(path), STEPS, MORE, 2)
    for (_, resumed), right in zip(results, uninterrupted, strict=True):
        assert resumed.losses == right.losses
        for key, piece in right.state.items():
            np.testing.assert_array_equal(resumed.state[key].values, piece.values, err_msg=key)


@pytest.mark.parametrize(("source", "target"), [(2, 3), (3, 2), (4, 3), (2, 4), (1, 2), (2, 1), (1, 4), (4, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_any_world_size_loads_any_other(model: str, source: int, target: int, saves: Saves, ranks: Ranks) -> None:
    path, saved, uninterrupted = saves.get(source, model, "adamw")
    results = ranks(target).run(load_and_train, model, "adamw", str(path), STEPS, MORE)
    assert_equal_states(whole([loaded for loaded, _ in results]), whole(saved))
    for _, resumed in results:
        # BatchNorm's statistics are of each rank's own part of the batch, so its runs differ between world sizes.
        if model != "convolutions":
            np.testing.assert_allclose(resumed.losses, uninterrupted[0].losses, rtol=2e-5)


def test_fresh_processes_resume_bit_for_bit(tmp_path: Path, fresh_ranks: Ranks, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    uninterrupted = [after for _, after in ranks(2).run(train_and_save, "partly", "adamw groups", path, STEPS, MORE)]
    results = fresh_ranks(2).run(load_and_train, "partly", "adamw groups", path, STEPS, MORE)
    for (_, resumed), right in zip(results, uninterrupted, strict=True):
        assert resumed.losses == right.losses
        for key, piece in right.state.items():
            np.testing.assert_array_equal(resumed.state[key].values, piece.values, err_msg=key)


def test_the_report_tells_what_was_loaded(saves: Saves, ranks: Ranks) -> None:
    path, _, _ = saves.get(2, "partly", "adamw")
    for loaded, _ in ranks(3).run(load_and_train, "partly", "adamw", str(path), STEPS, 1):
        assert loaded.report.step == STEPS
        assert loaded.report.world_size == 2
        assert loaded.report.extra_state == {"epoch": 3, "nested": [1.5, None, "x"]}
        # The layer that no step used has no state in the checkpoint, and has none now.
        assert sorted(loaded.report.without_state) == ["unused.bias", "unused.weight"]
        assert not any(key.startswith("unused.weight.") for key in loaded.state)
        assert loaded.report.not_asked_for == []


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (1, True), (2, True)])
def test_zeros_keep_their_sign(world_size: int, sharded: bool, tmp_path: Path, ranks: Ranks) -> None:
    for first, went_on, resumed in ranks(world_size).run(steps_around_a_load, str(tmp_path / "zeros"), sharded):
        assert first == went_on == resumed
        assert world_size > 1 or first[0] == np.full(4, -0.0, "float32").tobytes()
