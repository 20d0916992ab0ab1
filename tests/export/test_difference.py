"""In what two checkpoints differ: numpy knew it before."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import made_models
import numpy as np
import pytest
from harness import RankPool

from paddle_fsdp_ckpt.errors import CheckpointError
from paddle_fsdp_ckpt.export import values
from paddle_fsdp_ckpt.export.contents import MODEL, SHARDED, TRAINER
from paddle_fsdp_ckpt.export.difference import ValueDifference, compare
from paddle_fsdp_ckpt.export.facts import FactDifference
from paddle_fsdp_ckpt.export.inspection import inspect

Ranks = Callable[[int], RankPool]

RANDOM = np.random.RandomState(3)
ARRAYS = {
    "first.weight": RANDOM.standard_normal((7, 5)).astype(np.float32),
    "first.bias": RANDOM.standard_normal(5).astype(np.float32),
    "last.weight": RANDOM.standard_normal((3, 4, 2)).astype(np.float32),
}
SETTINGS = {"learning_rate": 0.1, "step": 3, "extra_state": {"epoch": 1, "loss": math.nan}}


@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 3), (3, 3)])
def test_no_difference_at_any_world_size_and_grouping(one: int, other: int, tmp_path: Path, ranks: Ranks) -> None:
    names = list(ARRAYS)
    ranks(one).run(made_models.save_groups, str(tmp_path / "one"), ARRAYS, [(names, {})], SETTINGS)
    ranks(other).run(made_models.save_groups, str(tmp_path / "other"), ARRAYS, [(names[1:], {}), (names[:1], {})], SETTINGS)
    found = compare(tmp_path / "one", tmp_path / "other")
    assert found.is_none, str(found)
    assert str(found) == "no difference: 15 keys, equal bit for bit"


def test_hyper_parameters(tmp_path: Path, ranks: Ranks) -> None:
    names = list(ARRAYS)
    ranks(2).run(made_models.save_groups, str(tmp_path / "one"), ARRAYS, [(names, {"weight_decay": 0.5})], SETTINGS)
    groups = [(names[:2], {"weight_decay": 0.25}), (names[2:], {"weight_decay": 0.5})]
    changed = {"learning_rate": 0.2, "step": 4, "extra_state": {"epoch": 2}}
    ranks(2).run(made_models.save_groups, str(tmp_path / "other"), ARRAYS, groups, changed)
    found = compare(tmp_path / "one", tmp_path / "other")
    assert not found.values and not found.is_none
    assert found.facts == (
        FactDifference("step", 3, 4),
        FactDifference("learning rate", {"value": 0.1}, {"value": 0.2}, 3),
        FactDifference("weight_decay", 0.5, 0.25, 2),
        found.facts[-1],
    )
    assert found.facts[-1].what == "extra_state"
    rows = [line.split() for line in str(found).splitlines()]
    for row in ("step 3 4", "learning rate.value 3 0.1 0.2", "weight_decay 2 0.5 0.25", "extra_state.epoch 1 2", "extra_state.loss nan -"):
        assert row.split() in rows


def test_values_keys_shapes(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "BATCH_NUMEL", 8)
    changed = {name: array.copy() for name, array in ARRAYS.items()}
    changed["first.weight"][6, 4] += 0.5
    changed["first.weight"][0, 0] = np.nan
    changed["first.bias"][2] = -changed["first.bias"][2]
    del changed["last.weight"]
    ranks(2).run(made_models.save_model, str(tmp_path / "one"), ARRAYS | {"only": ARRAYS["first.bias"], "shape": ARRAYS["first.bias"]})
    ranks(3).run(made_models.save_model, str(tmp_path / "other"), changed | {"new": ARRAYS["first.bias"], "shape": ARRAYS["first.weight"]})
    found = compare(tmp_path / "one", tmp_path / "other")
    assert (found.only_one, found.only_other, found.compared) == (("last.weight", "only"), ("new",), 2)
    assert found.shapes == (FactDifference("shape", [5], [7, 5]),)
    old, new = (float(array["first.weight"][6, 4]) for array in (ARRAYS, changed))
    assert found.values == (
        ValueDifference("first.weight", MODEL, 35, 2, abs(new - old), abs(new - old) / max(abs(old), abs(new)), 1),
        ValueDifference("first.bias", MODEL, 5, 1, 2 * abs(float(ARRAYS["first.bias"][2])), 2.0, 0),
    )
    assert "the values of 2 of 2 parameters and buffers differ" in str(found)
    assert "other key" not in str(found)


def test_what_a_manager_keeps(tmp_path: Path, ranks: Ranks) -> None:
    seen = np.arange(3)
    kept = {"a": (ARRAYS, 2.0, seen, 0.5, 0.9), "b": (ARRAYS, 2.0, seen, 0.5, 0.9), "c": (ARRAYS, 3.0, seen + 1, 0.25, 0.8)}
    for name, arguments in kept.items():
        ranks(3 if name == "c" else 2).run(made_models.save_by_manager, str(tmp_path / name), *arguments)
    a, b, c = (tmp_path / name / "step_00000003" for name in kept)
    same = compare(a, b)
    assert same.is_none and same.left_out == ("random number generators and rank_state",)
    assert str(same) == "no difference: 18 keys, equal bit for bit\n(not compared: random number generators and rank_state)"
    other = compare(a, c)
    assert [(one.key, one.kind, one.differing, one.largest) for one in other.values] == [
        (f"@paddle_fsdp_ckpt/sharded/{name}", SHARDED, array.size, 1.0) for name, array in sorted(ARRAYS.items())
    ]
    rows = [line.split() for line in str(other).splitlines()]
    for row in ("lr_schedulers.0.settings.gamma 0.9 0.8", "metrics.loss 0.5 0.25"):
        assert row.split() in rows, str(other)
    assert "arrays in extra_state" in str(other)
    assert str(other).splitlines()[-2].startswith("(largest: of all differences |a - b|; relative: ")
    assert "all 3 parameters and buffers are equal" in str(other)
    shutil.copytree(c, tmp_path / "a" / "step_00000004")
    rows = [line.split() for line in str(inspect(tmp_path / "a")).splitlines()[2:]]
    assert [(row[-2], row[-1]) for row in rows] == [("loss", "health"), ("0.5", "whole"), ("0.25", "whole")]
    assert "  metrics   loss 0.25\n" in str(inspect(c))
    amounts = {one.kind: (one.keys, one.elements) for one in inspect(a).amounts}  # type: ignore[union-attr]
    assert amounts[SHARDED] == (3, sum(array.size for array in ARRAYS.values()))
    assert amounts[TRAINER][0] == 4  # what is common, metrics, and each rank's own


def test_only_some_keys(tmp_path: Path, ranks: Ranks) -> None:
    changed = ARRAYS | {"first.bias": ARRAYS["first.bias"] + 100}
    for name, arrays, step in (("one", ARRAYS, 3), ("other", changed, 4)):
        settings = SETTINGS | {"step": step}
        ranks(2).run(made_models.save_groups, str(tmp_path / name), arrays, [(list(ARRAYS), {})], settings)
    ranks(2).run(made_models.save_model, str(tmp_path / "bare"), ARRAYS)
    one, other, bare = (tmp_path / name for name in ("one", "other", "bare"))
    found = compare(one, other, keys="*.weight")
    assert found.is_none and found.compared == 2
    assert [value.key for value in compare(one, other, keys="*.bias*").values] == ["first.bias"]
    assert compare(one, bare, weights_only=True).is_none
    assert len(compare(one, bare).only_one) == 12
    assert "no values were compared: no key is in both with one shape" in str(compare(one, bare, keys="*moment*"))
    with pytest.raises(CheckpointError, match="neither has a key of the form 'x'; .* has first.weight"):
        compare(one, other, keys="x")


def test_the_model_comes_first_and_what_moved_most(tmp_path: Path, ranks: Ranks) -> None:
    for name, factor in (("one", 1.0), ("other", 2.0)):
        arrays = {key: np.full(3, factor * size, np.float32) for key, size in (("a", 1.0), ("b", 5.0))}
        factors = {"moment1": 100.0}
        ranks(2).run(made_models.save_states, str(tmp_path / name), arrays, "AdamW", factors)
    found = compare(tmp_path / "one", tmp_path / "other")
    assert [one.key for one in found.values] == ["b", "a", "b.moment1_0", "a.moment1_0"]
    lines = str(found).splitlines()
    moments = str(compare(tmp_path / "one", tmp_path / "other", keys="*moment*"))
    assert "the values of 2 of 4 keys differ" in moments and "parameters and buffers" not in moments
    assert "the values of 2 of 2 parameters and buffers differ" in lines and "the values of 2 of 8 other keys differ" in lines


def test_other_dtypes_are_compared_by_value(tmp_path: Path, ranks: Ranks) -> None:
    exact = {"a": np.arange(20, dtype=np.float32).reshape(4, 5), "b": np.array([1.0, 2.0, 1 / 3], np.float32)}
    ranks(2).run(made_models.save_model, str(tmp_path / "one"), exact)
    ranks(1).run(made_models.save_model, str(tmp_path / "other"), exact, "bfloat16")
    found = compare(tmp_path / "one", tmp_path / "other")
    assert found.dtypes == (FactDifference("a", "float32", "bfloat16"), FactDifference("b", "float32", "bfloat16"))
    assert [(one.key, one.differing) for one in found.values] == [("b", 1)]
    assert 0 < found.values[0].largest_relative <= 2**-8


def test_differences_that_float64_cannot_tell_or_hold(tmp_path: Path, ranks: Ranks) -> None:
    """Of 64-bit integers differences are exact, also where they are larger than the type; those of float64 stay finite."""
    whole, real = np.array([2**60, -(2**63), 5], np.int64), np.array([-1.5e308], np.float64)
    ranks(1).run(made_models.save_buffers, str(tmp_path / "one"), {"whole": whole, "real": real})
    ranks(1).run(made_models.save_buffers, str(tmp_path / "other"), {"whole": whole + np.array([3, 0, 0]), "real": -real})
    ranks(1).run(made_models.save_buffers, str(tmp_path / "far"), {"whole": np.array([2**60, 2**63 - 1, 5], np.int64), "real": real})
    found = {one.key: one for one in compare(tmp_path / "one", tmp_path / "other").values}
    assert (found["whole"].differing, found["whole"].largest) == (1, 3.0)
    assert found["real"].largest == np.finfo(np.float64).max
    (far,) = compare(tmp_path / "one", tmp_path / "far").values
    assert (far.key, far.differing, far.largest) == ("whole", 1, 2.0**64)


def test_stock_paddle_and_ours(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(made_models.save_with_stock, str(tmp_path / "one"), ARRAYS, {})
    ranks(3).run(made_models.save_model, str(tmp_path / "other"), ARRAYS)
    assert compare(tmp_path / "one", tmp_path / "other").is_none


def test_a_damaged_one_is_an_error(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(made_models.save_model, str(tmp_path / "one"), ARRAYS)
    file = tmp_path / "one" / "0_0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        compare(tmp_path / "one", tmp_path / "one")
