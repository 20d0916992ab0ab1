from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_fsdp_ckpt.errors import MismatchError
from paddle_fsdp_ckpt.storage.problems import CASTABLE, KeyProblem, OtherProblem, ReadProblems, WaysOut, merge_problems, near_misses

PATH = Path("step")
NONE = ReadProblems(PATH)


def merged(*ranks: ReadProblems) -> ReadProblems:
    """As they come to rank 0: as text."""
    return merge_problems(PATH, [json.loads(json.dumps(one.to_json())) for one in ranks])


def test_none() -> None:
    assert not NONE and not merged(NONE, NONE)
    NONE.raise_if_any()


@pytest.mark.parametrize(
    "problems",
    [
        ReadProblems(PATH, missing=("a",)),
        ReadProblems(PATH, unexpected=("a",)),
        ReadProblems(PATH, wrong_shape=(KeyProblem("a", "x"),)),
        ReadProblems(PATH, wrong_dtype=(KeyProblem("a", "x"),)),
        ReadProblems(PATH, uncovered=(KeyProblem("a", "x"),)),
        ReadProblems(PATH, conflicts=(KeyProblem("a", "x"),)),
        ReadProblems(PATH, tied=(OtherProblem("x"),)),
        ReadProblems(PATH, others=(OtherProblem("x"),)),
        ReadProblems(PATH, nothing_matched=True),
    ],
)
def test_each_kind_counts_and_travels(problems: ReadProblems) -> None:
    assert problems and merged(problems) == problems
    with pytest.raises(MismatchError, match="nothing was changed"):
        problems.raise_if_any()


def test_what_only_some_ranks_see_names_them() -> None:
    hole, other = KeyProblem("a", "3 elements are missing"), KeyProblem("a", "5 elements are missing")
    everywhere = OtherProblem("of another class")
    found = merged(
        ReadProblems(PATH, uncovered=(hole,), others=(everywhere,)),
        ReadProblems(PATH, uncovered=(other,), others=(everywhere,), missing=("m",)),
        ReadProblems(PATH, uncovered=(hole,), others=(everywhere, OtherProblem("alone"))),
    )
    assert found.uncovered == (hole._replace(ranks=(0, 2)), other._replace(ranks=(1,)))
    assert found.others == (everywhere, OtherProblem("alone", (2,))) and found.missing == ("m",)
    text = str(found)
    assert "ranks 0, 2: 'a': 3 elements are missing, rank 1: 'a': 5 elements are missing" in text
    assert "- of another class\n- rank 2: alone\n" in text


def test_nothing_matches_only_where_nothing_does_on_any_rank() -> None:
    nothing = ReadProblems(PATH, nothing_matched=True)
    assert merged(nothing, nothing).nothing_matched and not merged(nothing, NONE)


def test_long_lists_are_counted_right() -> None:
    many = ReadProblems(PATH, missing=tuple(f"k{i:05}" for i in range(25_000)))
    found = merged(many, many, NONE)
    assert "25000 missing from the checkpoint: 'k00000'," in str(found) and "'k00019', ... (24980 more)" in str(found)
    assert len(json.dumps(many.to_json())) < 20_000


def test_the_way_out_fits_the_problem() -> None:
    assert "allow_missing=" in str(ReadProblems(PATH, missing=("a",)))
    assert "allow_unexpected=" in str(ReadProblems(PATH, unexpected=("a",)))
    assert "copy_tied=True" in str(ReadProblems(PATH, tied=(OtherProblem("x"),)))
    assert "cast=True" in str(ReadProblems(PATH, wrong_dtype=(KeyProblem("a", f"float32 {CASTABLE}"),)))
    assert "cast=True" not in str(ReadProblems(PATH, wrong_dtype=(KeyProblem("a", "int64"),)))
    assert "Way out: either a file is damaged" in str(ReadProblems(PATH, conflicts=(KeyProblem("a", "x"),)))


BLOCKS = [f"blocks.{i}.{name}" for i in range(12) for name in ("up.weight", "up.bias", "norm.weight")]


@pytest.mark.parametrize(
    ("here", "there", "key_map"),
    [
        ("_layers.", "", "{'_layers.': ''}"),
        ("", "_orig_mod.", "{'': '_orig_mod.'}"),
        ("model.", "transformer.", "{'model.': 'transformer.'}"),
        ("model.", "model._layers.", "{'model.': 'model._layers.'}"),
        ("a.b.c.", "c.", "{'a.b.': ''}"),
    ],
)
def test_a_prefix_that_differs_gives_the_key_map(here: str, there: str, key_map: str) -> None:
    lines = near_misses([here + key for key in BLOCKS], [there + key for key in BLOCKS])
    assert lines[0].startswith("36 of these are in it with")
    assert lines[-1] == f"was the model wrapped or renamed since? Then load with key_map={key_map}"


def test_several_prefixes_that_differ() -> None:
    missing = [f"encoder.{key}" for key in BLOCKS] + [f"decoder.{key}.x" for key in BLOCKS[:3]]
    there = [f"e.{key}" for key in BLOCKS] + [f"d.{key}.x" for key in BLOCKS[:3]]
    assert near_misses(missing, there)[-1].endswith("key_map={'encoder.': 'e.', 'decoder.': 'd.'}")


@pytest.mark.parametrize(
    ("missing", "there"),
    [
        (["extra.weight"], []),
        (["extra.weight"], ["other.weight"]),
        (["table.weight"], [f"{key}.weight" for key in ("embed", "head", "norm")]),
        (["teacher.up"], ["student_one.up", "student_two.up"]),
    ],
)
def test_no_guess_where_it_would_be_wild(missing: list[str], there: list[str]) -> None:
    assert near_misses(missing, there) == []


@pytest.mark.parametrize(("others", "is_offered"), [((), True), (("b",), False)])
def test_resizing_is_offered_where_it_leads_out(others: tuple[str, ...], is_offered: bool) -> None:
    """Where nothing has the shape that it has in the checkpoint, only if that makes all of it fit."""
    wrong = tuple(KeyProblem(key, "x") for key in ("a", *others))
    ways = WaysOut(allow_other_shape=("a", *others), resize=("a",), has_same_shapes=False)
    offer = "resize=['a'], which loads the rows or columns that both have"
    text = str(merged(ReadProblems(PATH, wrong_shape=wrong, ways_out=ways)))
    assert (offer in text) == is_offered and "allow_other_shape" not in text
    text = str(merged(ReadProblems(PATH, wrong_shape=wrong, ways_out=replace(ways, has_same_shapes=True))))
    assert f"{offer}, allow_other_shape={['a', *others]}" in text


def test_one_model_of_several() -> None:
    (line,) = near_misses(["up.weight", "bias"], [f"{name}.{key}" for name in ("actor", "critic") for key in ("bias", "up.weight")])
    assert "with each of several: actor., critic.; was this one of several models?" in line
    assert line.endswith("load with key_map={'': 'actor.'} (or 'critic.') and allow_unexpected=[patterns of the others]")


def test_names_that_only_the_key_map_changes() -> None:
    (line,) = near_misses([*BLOCKS, "head.weight"], BLOCKS)
    assert line == "36 of these are in it under their own names: leave key_map out, or what of it renames them"


def test_several_models_are_not_filled_from_one() -> None:
    *lines, way_out = near_misses([f"{name}.{key}" for name in ("actor", "critic") for key in BLOCKS], BLOCKS)
    assert lines == [f"36 of these are in it without their prefix '{name}.'" for name in ("actor", "critic")]
    assert "key_map" not in way_out and way_out.endswith("Then load it into that one by itself")


def test_names_that_are_spelt_nearly_alike() -> None:
    assert near_misses(["model.atention"], ["model.attention", "other"]) == ["'model.atention' is missing, and 'model.attention' is there"]


def test_near_misses_of_many_keys_take_little_time() -> None:
    keys = [f"layers.{i}.experts.{j}.{name}" for i in range(50) for j in range(100) for name in ("up", "down", "gate", "norm")]
    start = time.process_time()
    near_misses([f"a.{key}" for key in keys], [f"b.{key}" for key in keys])
    near_misses([f"{key}.one" for key in keys], [f"{key}.two" for key in keys])
    assert time.process_time() - start < 5.0
