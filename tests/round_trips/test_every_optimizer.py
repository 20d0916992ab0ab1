"""Promises 1, 2 and 5 for every optimizer: parity with a plain run, resumed bit for bit, and the same states at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from harness import RankPool, RankPools, assert_equal_states
from optimizer_cases import VARIANTS, State, assert_same_pieces, load_and_save, load_and_train, train_and_save, whole

from paddle_fsdp_ckpt.optim import CATALOG
from paddle_fsdp_ckpt.storage.index import read_index

Ranks = Callable[[int], RankPool]
Saved = tuple[Path, list[State], list[list[float]], list[State]]

WORLD_SIZES = (3, 2, 1, 2)
"""Where the checkpoint of 2 ranks goes, one after the other: 2 -> 3, 3 -> 2, 2 -> 1 and 1 -> 2."""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, rank_pools: RankPools) -> Callable[[str], Saved]:
    """For each variant a checkpoint of 2 ranks, what was in it, and where the uninterrupted run got to; made once."""
    root = tmp_path_factory.mktemp("every")

    @cache
    def make(variant: str) -> Saved:
        path = root / variant
        saved, losses, after = zip(*rank_pools.pool(2).run(train_and_save, variant, str(path)), strict=True)
        return path, list(saved), list(losses), list(after)

    return make


def test_every_optimizer_is_here() -> None:
    assert {variant.cls for variant in VARIANTS.values()} == CATALOG.keys()
    assert all({"", "named"} <= {variant.option for variant in VARIANTS.values() if variant.cls == cls} for cls in CATALOG)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_trains_as_one_process_and_resumes_bit_for_bit(variant: str, trained: Callable[[str], Saved], ranks: Ranks) -> None:
    path, saved, losses, after = trained(variant)
    for rank, (loaded, resumed_losses, resumed) in enumerate(ranks(2).run(load_and_train, variant, str(path))):
        assert_same_pieces(loaded, saved[rank])
        assert resumed_losses == losses[rank]
        assert_same_pieces(resumed, after[rank])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_element_is_stored_just_once(variant: str, trained: Callable[[str], Saved]) -> None:
    path, saved, _, _ = trained(variant)
    index = read_index(path)
    pieces = {key: [one.piece.numel for one in index.pieces(key)] for key in index.stored}
    assert {key: sum(numels) for key, numels in pieces.items()} == {key: math.prod(shape) for key, shape in whole(saved)[1].items()}
    assert len(pieces["down.weight"]) == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_states_go_to_other_world_sizes(variant: str, trained: Callable[[str], Saved], tmp_path: Path, ranks: Ranks) -> None:
    path, saved, _, _ = trained(variant)
    right, shapes = whole(saved)
    for number, world_size in enumerate(WORLD_SIZES):
        target = tmp_path / str(number)
        found, found_shapes = whole(ranks(world_size).run(load_and_save, variant, str(path), str(target)))
        assert_equal_states(found, right)
        assert found_shapes == shapes
        path = target


SHAPES = {
    "Adam": {"beta1_pow_acc_0": (1,), "beta2_pow_acc_0": (1,)},
    "AdamW": {"beta1_pow_acc_0": (1,), "beta2_pow_acc_0": (1,)},
    "Adamax": {"beta1_pow_acc_0": (1,)},
    "ASGD": {"m_0": (1,), "y_0": (2, 225)},
}
"""What is not of its parameter's shape, as a plain run of Paddle 3.3.1 has it; of stacked states in two dimensions."""


@pytest.mark.parametrize("cls", CATALOG)
def test_states_have_their_exact_shapes(cls: str, trained: Callable[[str], Saved]) -> None:
    _, saved, _, _ = trained(cls)
    shapes = {key.removeprefix("up.weight."): shape for key, shape in whole(saved)[1].items() if key.startswith("up.weight.")}
    others = {key: shape for key, shape in shapes.items() if shape != (3, 75)}
    assert others == SHAPES.get(cls, {})
