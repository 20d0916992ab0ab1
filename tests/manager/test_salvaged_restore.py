"""Of a damaged step what is intact is restored, and what is lost of what the manager keeps beside the model is said, never passed over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import salvaged_restore_cases as cases
from harness import RankPool
from manager_runs import call

from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.reserved_keys import COMMON_KEY, METRICS_KEY, rank_key, sharded_key

Ranks = Callable[[int], RankPool]
STEP = "step_00000010"
BOTH = pytest.mark.parametrize("world_size", [1, 2])


class Saved(NamedTuple):
    """A root, the weights that were saved to it, and the random numbers that each rank drew next."""

    root: Path
    values: dict[str, np.ndarray]
    random: list[tuple[float, float, float]]


def on(pool: RankPool, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Run a function on all ranks, with arguments by name too."""
    return pool.run(call, function, arguments, options)


def saved_by(pool: RankPool, root: Path, big_extra: bool) -> Saved:
    found = pool.run(cases.save, str(root), big_extra)
    return Saved(root, found[0][0], [numbers for _, numbers in found])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pools: Any) -> Saved:
    return saved_by(rank_pools.pool(2), tmp_path_factory.mktemp("salvaged") / "root", True)


@pytest.fixture
def root(saved: Saved, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(saved.root, tmp_path / "root")
    return tmp_path / "root"


def flip(root: Path, key: str, number: int = 0) -> None:
    """Flip a bit in the middle of one of the pieces of a key."""
    piece, name, offset = list(read_index(root / STEP).pieces(key))[number]
    flip_at(root / STEP / name, offset + piece.numel // 2)


def flip_at(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def assert_weights(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert found.keys() == right.keys()
    for key, value in right.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def assert_told(results: list[cases.Restored], *beginnings: str) -> None:
    """Check that all ranks know what is lost, that the first one warned of it, and that the report says it."""
    for number, one in enumerate(results):
        assert len(one.report.lost) == len(beginnings)
        for text, beginning in zip(one.report.lost, beginnings, strict=True):
            assert text.startswith(beginning)
            assert text in str(one.report)
            assert sum(text in line for line in one.said) == (number == 0)
        assert not one.report.is_exact


@BOTH
def test_of_an_intact_step_all_is_restored(saved: Saved, ranks: Ranks, world_size: int) -> None:
    for number, one in enumerate(on(ranks(world_size), cases.restore, str(saved.root), sharded=cases.AVERAGES)):
        assert one.report.is_exact and not one.report.lost
        assert one.epochs == (1, 1) and one.random == saved.random[number] and one.sharded == {"long": 5.0, "longer": 7.0}
        assert_weights(one.values, saved.values)


@BOTH
def test_what_is_the_same_on_all_ranks_is_damaged(saved: Saved, root: Path, ranks: Ranks, world_size: int) -> None:
    flip(root, COMMON_KEY)
    kind, text, is_same = on(ranks(world_size), cases.restore_badly, str(root))[0]
    assert kind == "CorruptCheckpointError" and "what the manager kept beside the model" in text and is_same
    found = on(ranks(world_size), cases.restore, str(root))
    assert_told(found, "what the manager kept beside the model (extra_state, schedulers, scaler) can't be read")
    for number, one in enumerate(found):
        assert "extra_state is None" in one.report.lost[0] and one.report.extra_state is None
        assert one.epochs == (1, 0)  # that of the optimizer is in the manifest too
        assert one.random == saved.random[number] and len(one.report.metrics) == len(cases.METRICS)
        assert list(one.report.load.damaged) == [COMMON_KEY]
        assert_weights(one.values, saved.values)


def test_an_extra_state_that_the_manifest_has_comes_from_there(tmp_path: Path, ranks: Ranks) -> None:
    saved_by(ranks(2), tmp_path / "root", False)
    flip(tmp_path / "root", COMMON_KEY)
    for one in on(ranks(2), cases.restore, str(tmp_path / "root")):
        assert one.report.extra_state == cases.EXTRA
        assert "extra_state is taken from the manifest" in one.report.lost[0]


@BOTH
def test_metrics_are_damaged(saved: Saved, root: Path, ranks: Ranks, world_size: int) -> None:
    flip(root, METRICS_KEY)
    found = on(ranks(world_size), cases.restore, str(root))
    assert_told(found, "the metrics can't be read")
    for one in found:
        assert one.report.metrics == {} and one.report.extra_state["epoch"] == 3 and one.epochs == (1, 1)
        assert_weights(one.values, saved.values)


@pytest.mark.parametrize("damaged", [0, 1])
def test_what_a_rank_kept_is_damaged(saved: Saved, root: Path, ranks: Ranks, damaged: int) -> None:
    """What its generators were is made from what is left: alike where all are, and never that of another rank where not."""
    flip(root, rank_key(damaged))
    found = on(ranks(2), cases.restore, str(root))
    again = on(ranks(2), cases.restore, str(root))
    assert_told(found, f"what the manager kept of rank {damaged} alone (random numbers, rank_state) can't be read")
    for number, one in enumerate(found):
        assert "random number generators go on from what other ranks kept" in one.report.lost[0]
        assert one.report.extra_state["epoch"] == 3 and one.epochs == (1, 1)
        assert_weights(one.values, saved.values)
        assert one.random[:2] == saved.random[number][:2]
        assert one.random == again[number].random
    whole, other = found[1 - damaged], found[damaged]
    assert whole.random == saved.random[1 - damaged] and other.random[2] not in {numbers[2] for numbers in saved.random}
    assert {rank: state["rank"] for rank, state in whole.report.rank_states.items()} == {1 - damaged: 1 - damaged}
    assert other.report.rank_states == {}


def test_what_ranks_kept_is_damaged_for_other_ranks(saved: Saved, root: Path, ranks: Ranks) -> None:
    flip(root, rank_key(0))
    found = on(ranks(1), cases.restore, str(root))
    assert_told(found, "what the manager kept of rank 0 alone")
    assert list(found[0].report.rank_states) == [1] and found[0].random[:2] == saved.random[0][:2]
    flip(root, rank_key(1))
    for world_size in (1, 2):
        both = on(ranks(world_size), cases.restore, str(root))
        assert_told(both, "what the manager kept of rank 0 alone", "what the manager kept of rank 1 alone")
        for one in both:
            assert "its random number generators stay as they are" in one.report.lost[0] and one.report.rank_states == {}
            assert one.random[0] != saved.random[0][0]
            assert_weights(one.values, saved.values)


def test_random_numbers_that_are_not_wanted_are_not_spoken_of(root: Path, ranks: Ranks) -> None:
    flip(root, rank_key(0))
    for one in on(ranks(2), cases.restore, str(root), random_state=False):
        assert one.report.lost[0].endswith("; its rank_state is lost")


@BOTH
def test_the_header_of_the_first_file_is_damaged(saved: Saved, root: Path, ranks: Ranks, world_size: int) -> None:
    flip_at(root / STEP / "0_0.safetensors", 30)
    for kind, text, is_same in on(ranks(world_size), cases.restore_badly, str(root), salvage=True):
        assert kind == "MismatchError" and "'first.weight'" in text and is_same
        assert "1 key or file of it is damaged" in text and "@paddle_fsdp_ckpt" not in text
    found = on(ranks(world_size), cases.restore, str(root), allow_missing=["first.*"])
    assert_told(found, "what the manager kept beside the model", "the metrics", "what the manager kept of rank 0 alone")
    for one in found:
        assert one.report.load.missing == ["first.weight"] and one.report.load.unexpected == []
        np.testing.assert_array_equal(one.values["first.weight"], saved.values["first.weight"] + 100.0)
        np.testing.assert_array_equal(one.values["second.weight"], saved.values["second.weight"])


@BOTH
def test_a_file_is_missing(saved: Saved, root: Path, ranks: Ranks, world_size: int) -> None:
    (root / STEP / "1_0.safetensors").unlink()
    found = on(ranks(world_size), cases.restore, str(root), allow_missing=["second.*"])
    assert_told(found, "what the manager kept of rank 1 alone")
    for one in found:
        assert one.report.load.missing == ["second.weight"] and one.report.extra_state["epoch"] == 3
        np.testing.assert_array_equal(one.values["first.weight"], saved.values["first.weight"])


@BOTH
def test_a_file_is_cut(saved: Saved, root: Path, ranks: Ranks, world_size: int) -> None:
    path = root / STEP / "1_0.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    found = on(ranks(world_size), cases.restore, str(root), sharded=cases.AVERAGES)
    assert_told(found, "what the manager kept of rank 1 alone")
    for one in found:
        assert one.sharded == {"long": 5.0, "longer": 7.0}
        assert_weights(one.values, saved.values)


@BOTH
def test_tensors_of_the_users_own_are_damaged(saved: Saved, root: Path, ranks: Ranks, world_size: int) -> None:
    """They are never left at old values: the caller must leave them out."""
    flip(root, sharded_key("longer"), 1)
    for kind, text, is_same in on(ranks(world_size), cases.restore_badly, str(root), sharded=cases.AVERAGES, salvage=True):
        assert kind == "MismatchError" and "'longer' (damaged in 1_0.safetensors)" in text and is_same
        assert "Leave these out of sharded=" in text
    found = on(ranks(world_size), cases.restore, str(root), sharded=("long",))
    assert_told(found, "key 'longer' of the tensors given by sharded= is lost")
    for one in found:
        assert one.sharded == {"long": 5.0}
    for one in on(ranks(world_size), cases.restore, str(root)):
        assert list(one.report.load.damaged) == [sharded_key("longer")] and not one.report.is_exact
        assert_weights(one.values, saved.values)


@BOTH
def test_a_damaged_manifest_may_say_another_step(saved: Saved, root: Path, ranks: Ranks, world_size: int) -> None:
    path = root / STEP / MANIFEST_NAME
    text = path.read_text()
    path.write_text(text.replace('"step": 10', '"step": 11'))
    assert path.read_text() != text
    found = on(ranks(world_size), cases.restore, str(root))
    assert_told(found, "step, extra_state and settings may be wrong")
    for one in found:
        assert one.report.step == 10 and MANIFEST_NAME in one.report.load.damaged
        assert_weights(one.values, saved.values)
    path.write_text(text[: len(text) // 2])
    for kind, said, is_same in on(ranks(world_size), cases.restore_badly, str(root), salvage=True):
        assert kind == "CorruptCheckpointError" and MANIFEST_NAME in said and is_same


@BOTH
@pytest.mark.parametrize("verify_first", [False, True])
def test_a_load_of_a_step_leaves_the_managers_own_keys_out(
    saved: Saved, root: Path, ranks: Ranks, world_size: int, verify_first: bool
) -> None:
    step = str(root / STEP)
    for parts in (None, {"model"}, {"model", "optimizer"}):
        options = {"parts": parts, "salvage": True, "verify_first": verify_first}
        for report, values in on(ranks(world_size), cases.load, step, **options):
            assert report.unexpected == [] and report.damaged == {}
            assert_weights(values, saved.values)
        other = ("one", "two")
        key_map = {"one": "first", "two": "second"}
        for report, values in on(ranks(world_size), cases.load, step, other, key_map=key_map, **options):
            assert report.unexpected == [] and report.mapped == {"one.weight": "first.weight", "two.weight": "second.weight"}
            np.testing.assert_array_equal(values["two.weight"], saved.values["second.weight"])
    flip(root, rank_key(1))
    for report, values in on(ranks(world_size), cases.load, step, salvage=True, verify_first=verify_first):
        assert list(report.damaged) == [rank_key(1)] and not report.is_exact
        assert report.missing == report.unexpected == report.started_afresh == []
        assert_weights(values, saved.values)


@BOTH
@pytest.mark.parametrize("lost", [0, 1])
def test_a_load_of_a_step_that_lacks_a_file(saved: Saved, root: Path, ranks: Ranks, world_size: int, lost: int) -> None:
    flip_at(root / STEP / f"{lost}_0.safetensors", 30)
    names = ("first.weight", "second.weight")
    step = str(root / STEP)
    for report, values in on(ranks(world_size), cases.load, step, salvage=True, allow_missing=["*"], parts={"model"}):
        assert report.missing == [names[lost]] and report.unexpected == []
        np.testing.assert_array_equal(values[names[1 - lost]], saved.values[names[1 - lost]])
        np.testing.assert_array_equal(values[names[lost]], saved.values[names[lost]] + 100.0)
