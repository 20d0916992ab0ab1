"""Parameters that have grown or shrunk in one dimension: what both have is loaded, the rest is what it was, against numpy's slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import RankPool
from loaded_bases import Saved, is_state
from option_cases import LARGER, refused
from resize_cases import load_fresh, load_plain, load_several, load_typed, save_typed
from safetensors.numpy import load_file
from shape_cases import follow
from strict_cases import VOCABULARY
from test_strict import check

from paddle_fsdp_ckpt.storage.index import read_index

Ranks = Callable[[int], RankPool]
Arrays = dict[str, np.ndarray]

RESIZE: dict[str, Any] = {"resize": ["out.weight", "head.*"]}
GROWN = ("embed.weight", "out.weight", "head.weight")


def as_stored(path: str, values: Arrays) -> Arrays:
    """Give flattened values the shapes that they have in a checkpoint."""
    index = read_index(Path(path))
    return {key: array.reshape(index.global_shape(key)) for key, array in values.items()}


def wholes(outcomes: Sequence[Any]) -> Arrays:
    """What the ranks hold together, in its shapes."""
    found: Arrays = {}
    for one in outcomes:
        for key, piece in one.state.items():
            array = found.setdefault(key, np.zeros(piece.global_shape, piece.values.dtype))
            if piece.flat_range is None:
                box = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.local_shape, strict=True))
                array[box] = piece.values
            else:
                array.reshape(-1)[slice(*piece.flat_range)] = piece.values.reshape(-1)
    return found


def leading(saved: np.ndarray, before: np.ndarray) -> np.ndarray:
    """What was there, with what is saved where both have it."""
    box = tuple(slice(0, min(sizes)) for sizes in zip(saved.shape, before.shape, strict=True))
    result = before.copy()
    result[box] = saved[box]
    return result


def assert_leading(after: Arrays, saved: Arrays, before: Arrays, without: tuple[str, ...] = ()) -> None:
    assert after.keys() == {key for key in saved if not (key.startswith(without) and is_state(key))}
    for key, array in after.items():
        np.testing.assert_array_equal(array, leading(saved[key], before[key]), err_msg=key)


@pytest.mark.parametrize(
    ("optimizer", "world_size"),
    [("adamw", 1), ("adamw", 2), ("adamw", 3), ("adagrad", 2), ("momentum", 3), ("rmsprop centered named", 2), ("sgd", 2)],
)
def test_a_larger_vocabulary(optimizer: str, world_size: int, saved: Saved, ranks: Ranks) -> None:
    """Of a new optimizer the rest of the states is as it begins; an embedding grows by rows, a Linear's weight by columns."""
    path, values, _ = saved("base", optimizer)
    results = ranks(world_size).run(load_fresh, path, "grown", optimizer, {"resize": [*RESIZE["resize"], "blocks.*"]})
    before, after = (wholes([one[number] for one in results]) for number in (0, 1))
    assert before["embed.weight"].shape == (LARGER, 10) and before["head.weight"].shape == (10, LARGER)
    assert_leading(after, as_stored(path, values), before)
    for _, loaded, losses in results:
        report = loaded.report
        assert [tuple(one) for one in report.resized] == [
            ("embed.weight", "embed.weight", (VOCABULARY, 10), (LARGER, 10)),
            ("head.weight", "head.weight", (10, VOCABULARY), (10, LARGER)),
        ]
        assert (
            f"2 keys of another size, loaded as far as both have them: 'embed.weight': [{VOCABULARY}, 10] in it, [{LARGER}, 10] here"
            in str(report)
        )
        assert "here, 4 rows left as they were, 'head.weight'" in str(report) and "4 columns left as they were" in str(report)
        assert not report.is_exact and report.unused_options == ["resize='blocks.*'"]
        assert not (report.started_afresh or report.unexpected or report.missing or report.other_shape)
        assert len(losses) == 2 and np.isfinite(losses).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_smaller_vocabulary(world_size: int, saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved("grown")
    results = ranks(world_size).run(load_fresh, path, "base", "adamw", RESIZE)
    before, after = (wholes([one[number] for one in results]) for number in (0, 1))
    assert_leading(after, as_stored(path, values), before)
    for _, loaded, losses in results:
        assert "4 rows of it left out" in str(loaded.report) and "4 columns of it left out" in str(loaded.report)
        assert not loaded.report.is_exact and np.isfinite(losses).all()


def test_layers_of_a_state_grow_by_rows_only(saved: Saved, ranks: Ranks) -> None:
    """ASGD's ``y`` is one flattened layer a step: by columns it would be mixed up, so those states start afresh."""
    path, values, _ = saved("base", "asgd")
    stored = as_stored(path, values)
    results = ranks(2).run(load_fresh, path, "grown", "asgd", RESIZE)
    before, after = (wholes([one[number] for one in results]) for number in (0, 1))
    assert stored["embed.weight.y_0"].shape == (4, VOCABULARY * 10)
    assert_leading(after, stored, before, without=("head.weight",))
    for _, loaded, losses in results:
        assert loaded.report.started_afresh == ["head.weight"] and len(loaded.report.resized) == 2 and np.isfinite(losses).all()


@pytest.mark.parametrize("optimizer", ["nadam", "radam"])
def test_numbers_that_are_kept_by_element_are_not_mixed(optimizer: str, saved: Saved, ranks: Ranks) -> None:
    """RAdam's kernel reads the first of a rank's piece, which would be another step's on some: those parameters start afresh."""
    path, values, _ = saved("base", optimizer)
    results = ranks(3).run(load_fresh, path, "grown", optimizer, RESIZE)
    before, after = (wholes([one[number] for one in results]) for number in (0, 1))
    assert_leading(after, as_stored(path, values), before, without=("embed.weight", "head.weight"))
    for _, loaded, losses in results:
        assert loaded.report.started_afresh == ["embed.weight", "head.weight"] and len(loaded.report.resized) == 2
        assert np.isfinite(losses).all()


def test_with_other_options(saved: Saved, ranks: Ranks) -> None:
    """Other names, of which others come first, digests checked before, and what is intact of the checkpoint."""
    path, values, _ = saved()
    options = {"resize": ["aout.*", "head.*"], "key_map": {"zembed": "embed", "aout": "out"}, "verify_first": True, "salvage": True}
    results = ranks(3).run(load_fresh, path, "grown backwards", "adamw", options)
    before, after = (wholes([one[number] for one in results]) for number in (0, 1))
    names = {"embed.weight": "aout.weight", "out.weight": "zembed.weight"}
    stored = as_stored(path, values)
    renamed = {names.get(key, key.replace("embed.weight.", "aout.weight.")): array for key, array in stored.items()}
    assert_leading(after, renamed, before)
    for _, loaded, _ in results:
        assert [(one.key, one.source) for one in loaded.report.resized] == [
            ("aout.weight", "out.weight"),
            ("head.weight", "head.weight"),
        ]


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("saved_as", "now"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("models", [("base", "grown"), ("grown", "base")])
def test_low_precision(saved_as: str, now: str, models: tuple[str, str], tmp_path: Path, ranks: Ranks) -> None:
    """Master weights grow with their parameters; where they are taken for each other they do too."""
    path = str(tmp_path / "saved")
    stored = wholes(ranks(2).run(save_typed, path, models[0], saved_as))
    results = ranks(3).run(load_typed, path, models[1], now, {**RESIZE, "cast": True})
    before, after = (wholes([one[number] for one in results]) for number in (0, 1))
    if saved_as != now:
        owner = {"out.weight": "embed.weight"}
        names = [key for key in stored if not is_state(key)]
        names = [key for key in names if f"{owner.get(key, key)}.moment1_0" in stored]
        masters = {key: f"{owner.get(key, key)}.w_0" for key in names}
        if now == "float32":
            stored |= {key: stored[master] for key, master in masters.items()}
            stored = {key: array for key, array in stored.items() if not key.endswith(".w_0")}
        else:
            stored |= {master: stored[key] for key, master in masters.items()}
            stored |= {key: as_bfloat16(stored[key]) for key in names}
    assert_leading(after, stored, before)
    assert [one.key for one in results[0][1].report.resized] == ["embed.weight", "head.weight"]


def test_only_the_model_or_only_states(saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved()
    stored = as_stored(path, values)
    for parts in ("model", "optimizer"):
        results = ranks(2).run(load_typed, path, "grown", "float32", {**RESIZE, "parts": {parts}})
        before, after = (wholes([one[number] for one in results]) for number in (0, 1))
        for key, array in after.items():
            is_loaded = is_state(key) == (parts == "optimizer")
            np.testing.assert_array_equal(array, leading(stored[key], before[key]) if is_loaded else before[key], err_msg=key)
        keys = [f"{key}{state}" for key in ("embed.weight", "head.weight") for state in (".moment1_0", ".moment2_0")]
        found = [one.key for one in results[0][1].report.resized]
        assert found == (["embed.weight", "head.weight"] if parts == "model" else keys)


def test_masters_follow_a_model_that_is_loaded_alone(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "saved")
    stored = wholes(ranks(2).run(save_typed, path, "base", "bfloat16"))
    results = ranks(2).run(load_typed, path, "grown", "bfloat16", {**RESIZE, "parts": {"model"}})
    before, after = (wholes([one[number] for one in results]) for number in (0, 1))
    for key in ("embed.weight", "head.weight"):
        weights = leading(stored[key], before[key])
        np.testing.assert_array_equal(after[key], weights)
        np.testing.assert_array_equal(after[f"{key}.w_0"], (weights.astype(np.uint32) << 16).view(np.float32))


def test_a_plain_model(tmp_path: Path, saved: Saved, single: RankPool) -> None:
    path, values, _ = saved()
    stored = as_stored(path, values)
    before = single.run(load_plain, path, str(tmp_path / "out"), RESIZE)[0]
    after = load_file(tmp_path / "out" / "0_0.safetensors")
    for key, array in before.items():
        np.testing.assert_array_equal(after[key], leading(stored[key], array), err_msg=key)
    for key in ("embed.weight", "head.weight"):
        moments = after[f"{key}.moment1_0"]
        np.testing.assert_array_equal(moments, leading(stored[f"{key}.moment1_0"], np.zeros_like(moments)), err_msg=key)


def test_one_of_several_models(tmp_path: Path, ranks: Ranks) -> None:
    found = ranks(2).run(load_several, str(tmp_path / "both"))[0]
    assert found["keys"] == ["actor.embed.weight", "actor.head.weight"]
    for key, array in found["after"].items():
        np.testing.assert_array_equal(array, leading(found["saved"][key], found["before"][key]), err_msg=key)


def test_more_than_one_dimension_is_refused(saved: Saved, ranks: Ranks) -> None:
    path = saved()[0]
    results = ranks(2).run(refused, path, "wide", "adamw", [{"resize": ["*"]}])
    check(results, ["of another shape:", "'blocks.0.down.weight': checkpoint has shape ["])
    assert "'blocks.0.down.bias'" not in results[0][1] and "'head.weight'" not in results[0][1]
    check(ranks(2).run(refused, path, "grown", "adamw", [{}, {"resize": ["*"]}]), ["options must be the same"], "RankFailedError")
    for name, message, changed in ranks(2).run(refused, path, "grown", "adamw", [{"resize": "head.*"}]):
        assert name == "CheckpointError" and "resize is 'head.*'; give a list of patterns" in message and not changed


def test_what_the_error_offers_leads_out(saved: Saved, ranks: Ranks) -> None:
    """Of the two vocabularies, both ways round; followed by steps."""
    for source, model in (("base", "grown"), ("grown", "base")):
        for found in ranks(2).run(follow, saved(source)[0], model, "adamw"):
            ways = {name: (options, odd) for name, options, odd in found[1:]}
            assert ways["resize"] == ("{'resize': ['embed.weight', 'head.weight']}", []), found[0][1]
