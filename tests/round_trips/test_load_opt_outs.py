"""Promise 4: what may differ must be said, is loaded as said, and is in the report; everything else is still refused, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_cases import VOCABULARY, whole
from harness import RankPool
from loaded_bases import Saved, assert_values, is_state, load_on
from option_cases import (
    backwards_name,
    constant_name,
    failing_name,
    halved_optimizers,
    load,
    load_parts,
    masters_follow,
    masters_of_tied_follow,
    number_name,
    one_of_a_model_and_its_average,
    refused,
)
from strict_cases import save_base
from test_strict import Held, check, rewrite

from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME
from paddle_fsdp_ckpt.storage.index import read_index, read_manifest

Ranks = Callable[[int], RankPool]


def test_a_plain_load_is_exact(saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved()
    _, after, report = load_on(ranks(2), path, "base", "adamw", 2)
    assert_values(after, values)
    assert report.is_exact and report.parts == ["model", "optimizer", "learning_rate"]
    assert "everything in it, as it was saved" in str(report)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_new_layer_keeps_its_values_and_starts_afresh(world_size: int, saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved()
    before, after, report = load_on(ranks(world_size), path, "more", "adamw", 1, allow_missing=["extra.*", "no such.*"])
    kept = {key: array for key, array in before.items() if key in ("extra.weight", "extra.bias")}
    assert_values(after, values | kept)
    assert report.missing == report.started_afresh == ["extra.bias", "extra.weight"]
    assert report.unused_options == ["allow_missing='no such.*'"]
    assert not report.is_exact and not report.unexpected and not report.without_state
    assert "2 keys missing, left as they were: extra.bias, extra.weight" in str(report)


def test_a_layer_that_is_gone(saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved()
    _, after, report = load_on(ranks(3), path, "short", "adamw", 0, allow_unexpected=["blocks.1.*"])
    gone = {key for key in values if key.startswith("blocks.1.")}
    assert_values(after, {key: array for key, array in values.items() if key not in gone})
    assert report.unexpected == sorted(gone) and not report.is_exact


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow_missing": ["extra.weight"]}, ["1 missing from the checkpoint: 'extra.bias'", "['extra.weight.*', ...]"]),
        ({"allow_missing": ["extra.weight", "extra.bias"]}, ["2 parameters of the optimizer have no states in it, or"]),
        ({"allow_missing": ["extra.*.moment*"], "parts": {"model", "optimizer"}}, ["2 missing"]),
        ({"allow_unexpected": ["*"]}, ["2 missing"]),
    ],
)
def test_what_is_not_allowed_is_still_refused(options: dict[str, Any], words: list[str], saved: Saved, ranks: Ranks) -> None:
    results = ranks(2).run(refused, saved()[0], "more", "adamw", [options])
    check(results, words)
    assert results[0] == results[1]


def test_everything_wrong_is_said_at_once(saved: Saved, tmp_path: Path, ranks: Ranks) -> None:
    first = next(stored.piece for stored in read_index(Path(saved()[0])).pieces("embed.weight"))

    def edit(held: Held) -> list[Held]:
        piece, _ = held
        return [] if piece == first or piece.key == "blocks.1.norm.bias" else [held]

    path = rewrite(Path(saved()[0]), tmp_path / "holes", edit)
    results = ranks(2).run(refused, path, "counting", "momentum", [{}])
    words = ["rank 0: 'embed.weight': ", "2 missing from the checkpoint: 'blocks.1.norm.bias', 'count'", "it holds the states of AdamW"]
    check(results, [*words, "the optimizer is Momentum"])
    assert results[0] == results[1]


def test_nothing_matching_has_no_opt_out(saved: Saved, ranks: Ranks) -> None:
    options = {"allow_missing": ["*"], "allow_unexpected": ["*"], "parts": {"model"}}
    check(ranks(2).run(refused, saved()[0], "other", "adamw", [options]), ["not one key matches"])


def test_half_a_state_is_refused_and_none_starts_afresh(saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved()
    results = ranks(2).run(refused, path, "base", "adamw amsgrad", [{"allow_missing": ["*.moment2_max_0"]}])
    check(results, ["half a state is of no use", "moment2_max_0"])
    before, after, report = load_on(ranks(2), path, "base", "adamw amsgrad", 1, allow_missing=["*_0"])
    assert any(key.endswith(".moment2_max_0") for key in before)
    states = {key for key in values if is_state(key)}
    names = sorted({key.rpartition(".")[0] for key in states})
    assert {key for key in after if not is_state(key)} == values.keys() - states
    assert report.started_afresh == names and report.unexpected == sorted(states) and report.missing == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_parameter_that_lacks_a_state_starts_afresh(world_size: int, saved: Saved, tmp_path: Path, ranks: Ranks) -> None:
    source, values, _ = saved()
    gone = "blocks.0.up.bias.moment2_0"
    path = rewrite(Path(source), tmp_path / "gone", lambda held: [] if held[0].key == gone else [held])
    _, after, report = load_on(ranks(world_size), path, "base", "adamw", 2, allow_missing=["blocks.0.up.bias.*"])
    dropped = {key for key in values if key.startswith("blocks.0.up.bias.")}
    assert_values(after, {key: array for key, array in values.items() if key not in dropped})
    assert report.started_afresh == ["blocks.0.up.bias"]
    assert report.unexpected == sorted(dropped - {gone})


KEY_MAPS: dict[str, tuple[str, str, Any]] = {
    "wrapped now": ("base", "wrapped", {"_layers.": ""}),
    "wrapped then": ("wrapped", "base", {"": "_layers."}),
    "a function": ("base", "backwards", backwards_name),
    "whole parts": ("base", "backwards", {"zembed": "embed", "aout.weight": "out.weight", "b": "x", "": ""}),
    "the reverse": ("backwards", "base", {"embed.": "zembed.", "out.": "aout."}),
}


def key_here(case: str, key: str) -> str:
    """The name in the model of a key of the checkpoint."""
    if case == "wrapped now":
        return f"_layers.{key}"
    if case == "wrapped then":
        return key.removeprefix("_layers.")
    there, here = ("embed", "out"), ("zembed", "aout")
    if case == "the reverse":
        there, here = here, there
    name, _, rest = key.partition(".")
    if is_state(key) and name in there:
        # Of tied names the first has the state, and which is first has changed.
        return f"{min(here)}.{rest}"
    return f"{dict(zip(there, here, strict=True)).get(name, name)}.{rest}"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", KEY_MAPS)
def test_names_that_differ(case: str, world_size: int, saved: Saved, ranks: Ranks) -> None:
    source, model, key_map = KEY_MAPS[case]
    path, values, later = saved(source)
    results = ranks(world_size).run(load, path, model, "adamw", 2, {"key_map": key_map})
    after = whole([found for _, found, _ in results])
    assert_values(after, {key_here(case, key): array for key, array in values.items()})
    if world_size == 2:
        # States, schedule and which parameters had gradients came along: the run goes on as the uninterrupted one.
        resumed = whole([going_on for _, _, going_on in results])
        assert_values(resumed, {key_here(case, key): array for key, array in later.items()})
    report = results[0][1].report
    assert report.mapped and all(key_here(case, other) == name for name, other in report.mapped.items())
    assert report.unused_options == (["key_map='b'"] if case == "whole parts" else [])
    assert not report.is_exact and not report.missing and not report.unexpected and not report.without_state and not report.differences


def test_the_error_names_the_key_map(saved: Saved, ranks: Ranks) -> None:
    for source, model, entry in (("base", "wrapped", "{'_layers.': ''}"), ("wrapped", "base", "{'': '_layers.'}")):
        check(ranks(2).run(refused, saved(source)[0], model, "adamw", [{}]), [f"load with key_map={entry}"])


@pytest.mark.parametrize(
    ("key_map", "kind", "words"),
    [
        (constant_name, "MismatchError", "key_map gives 14 names of the model a name in the checkpoint that another one has too"),
        ({"head.": "out."}, "MismatchError", "'head.weight' and 'out.weight' are both 'out.weight'"),
        (number_name, "CheckpointError", "key_map gave 3 for"),
        (failing_name, "RankFailedError", "LookupError"),
        ({"head.": 3}, "CheckpointError", "key_map is {'head.': 3}"),
        ("head.", "CheckpointError", "key_map is 'head.'"),
    ],
)
def test_wrong_key_maps(key_map: Any, kind: str, words: str, saved: Saved, ranks: Ranks) -> None:
    for name, message, changed in ranks(2).run(refused, saved()[0], "base", "adamw", [{"key_map": key_map}]):
        assert name == kind and words in message
        assert not changed


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("parts", [["model"], ["optimizer"], ["learning_rate"], ["model", "learning_rate"], ["optimizer", "model"]])
def test_parts(parts: list[str], world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    for changed, rate_changed, report in ranks(world_size).run(load_parts, str(tmp_path / "parts"), parts):
        assert changed == set(parts) - {"learning_rate"}
        assert rate_changed == ("learning_rate" in parts)
        assert sorted(report.parts) == sorted(parts)
        assert bool(report.not_asked_for) == (not {"model", "optimizer"} <= set(parts))


@pytest.mark.parametrize("sharded", [True, False])
def test_master_weights_follow_but_for_missing_parameters(sharded: bool, tmp_path: Path, ranks: Ranks) -> None:
    for found in ranks(2).run(masters_follow, str(tmp_path / "masters"), sharded):
        assert all(found.values()), found


@pytest.mark.parametrize("sharded", [True, False])
def test_master_weights_follow_a_tied_tensor_of_which_one_name_is_stored(sharded: bool, tmp_path: Path, ranks: Ranks) -> None:
    found = ranks(2).run(masters_of_tied_follow, str(tmp_path / "tied"), sharded)
    assert [value for one in found for value in one] == [0.5] * (VOCABULARY * 10) * (1 if sharded else 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_tied_checkpoint_into_an_untied_model(world_size: int, saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved()
    _, after, report = load_on(ranks(world_size), path, "untied", "adamw", 1, copy_tied=True)
    states = {key for key in values if key.startswith("embed.weight.")}
    copies = {key.replace("embed.", "out."): values[key] for key in states}
    assert_values(after, values | copies)
    assert len(report.copied_tied) == 1 and "embed.weight = out.weight is one tied parameter in the checkpoint" in report.copied_tied[0]
    assert not report.is_exact and not report.unexpected


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_untied_checkpoint_into_a_tied_model(world_size: int, saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved("untied")
    _, after, report = load_on(ranks(world_size), path, "base", "adamw", 1, copy_tied=True)
    left_out = {key for key in values if key.startswith("out.")}
    expected = {key: array for key, array in values.items() if key not in left_out} | {"out.weight": values["embed.weight"]}
    assert_values(after, expected)
    assert report.unexpected == sorted(left_out) and "is one tied parameter in the model" in report.copied_tied[0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("of", "model", "gone", "options"),
    [
        ("base", "by itself", "out.weight", {}),
        ("backwards", "backwards by itself", "aout.weight", {}),
        ("base", "backwards by itself", "out.weight", {"key_map": {"zembed.": "embed."}}),
    ],
)
def test_another_name_of_what_is_loaded_is_not_unexpected(
    of: str, model: str, gone: str, options: dict[str, Any], world_size: int, saved: Saved, ranks: Ranks
) -> None:
    path, values, _ = saved(of)
    _, after, report = load_on(ranks(world_size), path, model, "adamw", 1, **options)
    embedding = "embed.weight" if model == "by itself" else "zembed.weight"
    expected = {key: array for key, array in values.items() if not key.startswith((gone, "embed.weight"))}
    states = [key for key in values if is_state(key) and key.startswith((gone, embedding, "embed.weight"))]
    assert states
    expected |= {f"{embedding}.{key.rpartition('.')[2]}": values[key] for key in states} | {embedding: values[gone]}
    assert_values(after, expected)
    assert report.unexpected == [] and report.missing == []
    assert report.is_exact == (not options)


def test_only_the_tied_name_is_let_through(saved: Saved, ranks: Ranks) -> None:
    path, _, _ = saved("untied")
    check(ranks(2).run(refused, path, "by itself", "adamw", [{}]), ["not in the objects", "'out.weight'"])


def test_tied_names_of_which_one_is_stored(saved: Saved, tmp_path: Path, ranks: Ranks) -> None:
    source, values, _ = saved()
    path = rewrite(Path(source), tmp_path / "one name", lambda held: [] if held[0].key == "embed.weight" else [held])
    _, after, report = load_on(ranks(2), path, "base", "adamw", 1, allow_missing=["embed.weight"])
    assert_values(after, values)
    assert report.missing == ["embed.weight"]


@pytest.mark.parametrize("verify_first", [True, False])
def test_damaged_values(verify_first: bool, tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "damaged"
    ranks(2).run(save_base, str(path))
    file = path / "1_0.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    results = ranks(2).run(refused, str(path), "base", "adamw", [{"verify_first": verify_first}])
    for name, message, changed in results:
        assert name in ("CorruptCheckpointError", "RankFailedError") and "1_0.safetensors" in message
        assert bool(changed) is not verify_first
        assert ("must be loaded again" in message) is not verify_first
    assert "CorruptCheckpointError" in {name for name, _, _ in results}
    # Who asks for no check gets what the file holds.
    ranks(2).run(load, str(path), "base", "adamw", 0, {"check_digests": False}, 0)


def test_ranks_with_different_options(saved: Saved, ranks: Ranks) -> None:
    for one, other in (
        ({}, {"cast": True}),
        ({"allow_missing": ["a"]}, {}),
        ({"parts": ["model"]}, {}),
        ({"key_map": {"": ""}}, {"key_map": {"head": "x"}}),
    ):
        results = ranks(2).run(refused, saved()[0], "base", "adamw", [one, other])
        check(results, ["must be the same on all ranks", "nothing was changed"], "RankFailedError")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": {"weights"}}, "there is no part 'weights'; give a set of some of 'model', 'optimizer', 'learning_rate'"),
        ({"parts": "model"}, "parts is 'model'; give a set"),
        ({"parts": []}, "parts is []; give a set"),
        ({"parts": {"optimizer"}, "optimizer": None}, "parts has 'optimizer', which needs an optimizer"),
        ({"parts": {"model"}, "model": None}, "parts has 'model', which needs a model"),
        ({"allow_missing": "head.*"}, "allow_missing is 'head.*'; give a list of patterns"),
        ({"allow_unexpected": [3]}, "allow_unexpected is [3]; give a list of patterns"),
        ({"cast": "float32"}, "cast is 'float32'; give True or False"),
    ],
)
@pytest.mark.parametrize("only_rank", [None, 1])
def test_options_that_are_none(options: dict[str, Any], words: str, only_rank: int | None, saved: Saved, ranks: Ranks) -> None:
    given = [options] if only_rank is None else [{}, options]
    results = ranks(2).run(refused, saved()[0], "base", "adamw", given)
    assert {name for name, _, _ in results} <= {"CheckpointError", "RankFailedError"}
    for _, message, changed in results:
        assert words in message
        assert not changed


@pytest.mark.parametrize("parts", [{"optimizer"}, {"learning_rate"}])
def test_parts_that_were_not_saved(parts: set[str], tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "weights")
    ranks(2).run(save_base, path, "base", None)
    results = ranks(2).run(refused, path, "base", "adamw", [{"parts": parts}])
    check(results, ["without an optimizer", 'parts={"model"}'], "IncompleteCheckpointError")


def test_one_of_two_optimizers(tmp_path: Path, ranks: Ranks) -> None:
    for unexpected, other_stays in ranks(2).run(halved_optimizers, str(tmp_path / "halves")):
        assert other_stays
        assert unexpected and all(key.endswith(".velocity_0") for key in unexpected)


def test_a_name_of_the_model_that_the_checkpoint_has_for_something_else(saved: Saved, tmp_path: Path, ranks: Ranks) -> None:
    """The model's head is the checkpoint's other head, and the checkpoint's head is left out."""
    source, values, _ = saved()

    def edit(held: Held) -> list[Held]:
        piece, data = held
        if not piece.key.startswith("head."):
            return [held]
        other = np.frombuffer(data, np.float32) + (1 if piece.key == "head.weight" else 0)
        renamed = type(piece)(
            piece.key.replace("head.", "other."), *[getattr(piece, name) for name in list(piece.__dataclass_fields__)[1:]]
        )
        return [held, (renamed, memoryview(other.tobytes()))]

    path = Path(rewrite(Path(source), tmp_path / "heads", edit))
    manifest = read_manifest(path)
    for group in manifest.optimizers[0]["groups"]:
        group["parameters"] = [name.replace("head.", "other.") for name in group["parameters"]] + ["head.weight"]
    (path / MANIFEST_NAME).write_text(manifest.to_json())
    options: dict[str, Any] = {"key_map": {"head.": "other."}}
    check(ranks(2).run(refused, str(path), "base", "adamw", [options]), ["in the checkpoint, and not in the objects: 'head.weight'"])
    _, after, report = load_on(ranks(2), str(path), "base", "adamw", 1, **options, allow_unexpected=["head.weight*"])
    assert_values(after, values | {"head.weight": values["head.weight"] + 1})
    assert report.unexpected == sorted(key for key in values if key.startswith("head.weight"))
    assert report.mapped == {"head.weight": "other.weight"}


@pytest.mark.parametrize(
    ("dtype", "with_optimizer", "offered", "is_trained"),
    [
        ("float32", False, "key_map={'': 'ema.'} (or 'model.') and", False),
        ("float64", False, "key_map={'': 'model.'} and", True),
        ("float32", True, "key_map={'': 'model.'} and", True),
    ],
)
def test_one_of_a_model_and_its_average(
    dtype: str, with_optimizer: bool, offered: str, is_trained: bool, tmp_path: Path, ranks: Ranks
) -> None:
    ((message, loaded),) = ranks(1).run(one_of_a_model_and_its_average, str(tmp_path / "saved"), dtype, with_optimizer)
    assert offered in message
    assert loaded == is_trained
