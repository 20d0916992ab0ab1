"""Models cut by Paddle's own fully_shard: a resumed run is bit for bit the uninterrupted one, at parity with unfused, at any world size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fused_cases import (
    DECAYED,
    EVERY,
    OPTIMIZERS,
    STATES,
    Held,
    assert_goes_on_alike,
    fresh_state,
    load_and_train,
    load_into_ours,
    load_into_plain,
    train_and_save,
    train_unsharded,
    whole,
)
from harness import RankPool, assert_equal_states

Ranks = Callable[[int], RankPool]

UNNAMED = [name for name in EVERY if not name.endswith(" named")]
"""One of each; an optimizer's name changes nothing but what its states are called."""


class Saves:
    """Checkpoints of this session, each made once."""

    def __init__(self, root: Path, ranks: Ranks) -> None:
        self._root = root
        self._ranks = ranks
        self.get = cache(self._make)

    def _make(self, world_size: int, optimizer: str) -> tuple[str, list[Held], list[Held]]:
        path = str(self._root / f"{optimizer} {world_size}")
        results = self._ranks(world_size).run(train_and_save, optimizer, path)
        return path, [saved for saved, _ in results], [after for _, after in results]


@pytest.fixture(scope="session")
def fused_saves(tmp_path_factory: pytest.TempPathFactory, rank_pools: object) -> Saves:
    return Saves(tmp_path_factory.mktemp("fused"), rank_pools.pool)  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", EVERY)
def test_resume_on_2_ranks_is_bit_for_bit(optimizer: str, fused_saves: Saves, ranks: Ranks) -> None:
    path, saved, uninterrupted = fused_saves.get(2, optimizer)
    results = ranks(2).run(load_and_train, optimizer, path)
    assert_equal_states(whole([loaded for loaded, _ in results]), whole(saved))
    assert_goes_on_alike([after for _, after in results], uninterrupted)


def test_fresh_processes_resume_bit_for_bit(fused_saves: Saves, fresh_ranks: Ranks) -> None:
    path, _, uninterrupted = fused_saves.get(2, "adamw amsgrad named")
    results = fresh_ranks(2).run(load_and_train, "adamw amsgrad named", path)
    assert_goes_on_alike([after for _, after in results], uninterrupted)


@pytest.mark.parametrize("stop_in", ["step", "forward", "backward"])
def test_a_load_in_a_running_process_leaves_nothing_of_before(stop_in: str, tmp_path: Path, ranks: Ranks) -> None:
    # With one block, the copies that the forward gathered are still there for the next one.
    path = str(tmp_path / "checkpoint")
    uninterrupted = [after for _, after in ranks(2).run(train_and_save, "adamw clipped", path, False, 1)]
    results = ranks(2).run(load_and_train, "adamw clipped", path, 2, stop_in, 1)
    assert_goes_on_alike([after for _, after in results], uninterrupted)


@pytest.mark.parametrize("optimizer", UNNAMED)
def test_parity_with_an_unfused_run(optimizer: str, fused_saves: Saves, single: RankPool) -> None:
    _, saved, _ = fused_saves.get(2, optimizer)
    right = single.run(train_unsharded, optimizer, 3)[0]
    np.testing.assert_allclose(saved[0].losses, right.losses, rtol=2e-5)
    mine, other = whole(saved), whole([right])
    assert mine.keys() == other.keys()
    for key, values in other.items():
        np.testing.assert_allclose(mine[key], values, rtol=1e-3, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("optimizer", ["nadam", "radam"])
def test_numbers_that_lie_in_padding_come_back_too(optimizer: str, tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    # With this width, rank 1's shard of each block starts in padding; RAdam reads its three numbers there.
    path = str(tmp_path / "checkpoint")
    results = ranks(4).run(train_and_save, optimizer, path, False, 3, 8)
    right = single.run(train_unsharded, optimizer, 6, 8)[0]
    np.testing.assert_allclose([*results[0][0].losses, *results[0][1].losses], right.losses, rtol=1e-4)
    resumed = ranks(4).run(load_and_train, optimizer, path, 0, "step", 3, 8)
    assert_goes_on_alike([after for _, after in resumed], [after for _, after in results])


@pytest.mark.parametrize("optimizer", EVERY)
def test_3_ranks_load_what_2_saved(optimizer: str, fused_saves: Saves, ranks: Ranks) -> None:
    path, saved, uninterrupted = fused_saves.get(2, optimizer)
    results = ranks(3).run(load_and_train, optimizer, path)
    assert_equal_states(whole([loaded for loaded, _ in results]), whole(saved))
    for _, after in results:
        np.testing.assert_allclose(after.losses, uninterrupted[0].losses, rtol=1e-4)


@pytest.mark.parametrize("optimizer", EVERY)
def test_an_unsharded_run_loads_it(optimizer: str, fused_saves: Saves, single: RankPool) -> None:
    path, saved, _ = fused_saves.get(2, optimizer)
    assert_equal_states(whole(single.run(load_into_plain, optimizer, path)), whole(saved))


@pytest.mark.parametrize("optimizer", UNNAMED)
def test_our_runtime_loads_it_and_goes_on(optimizer: str, fused_saves: Saves, ranks: Ranks) -> None:
    path, _, uninterrupted = fused_saves.get(2, optimizer)
    for losses in ranks(3).run(load_into_ours, optimizer, path):
        np.testing.assert_allclose(losses, uninterrupted[0].losses, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", *DECAYED])
def test_an_optimizer_made_before_fully_shard_is_the_same(optimizer: str, tmp_path: Path, fused_saves: Saves, ranks: Ranks) -> None:
    _, saved, uninterrupted = fused_saves.get(2, optimizer)
    results = ranks(2).run(train_and_save, optimizer, str(tmp_path / "checkpoint"), True)
    assert_equal_states(whole([one for one, _ in results]), whole(saved))
    assert_goes_on_alike([after for _, after in results], uninterrupted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_are_there_before_the_first_step(optimizer: str, fused_saves: Saves, ranks: Ranks) -> None:
    _, saved, _ = fused_saves.get(2, optimizer)
    for rank, keys in enumerate(ranks(2).run(fresh_state, optimizer)):
        stepped = {key: piece.global_shape for key, piece in saved[rank].state.items() if key.endswith("_0")}
        assert keys == stepped
        cls = next(name for name in STATES if name.lower() == optimizer.split()[0])
        amsgrad = {"moment2_max_0"} if "amsgrad" in optimizer else set()
        assert {key.rpartition(".")[2] for key in keys} == STATES[cls] | amsgrad
