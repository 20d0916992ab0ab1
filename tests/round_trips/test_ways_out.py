"""The patterns that an error offers match what they are for, and nothing else."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from paddle_fsdp_ckpt.loading import ways_out
from paddle_fsdp_ckpt.storage.problems import CASTABLE, KeyProblem, ReadProblems

LAYERS = [f"blocks.{i}.{name}" for i in range(3) for name in ("up.weight", "up.bias", "norm.weight")]


@pytest.mark.parametrize(
    ("missing", "patterns"),
    [
        (["blocks.1.up.weight", "blocks.1.up.bias"], ("blocks.1.up.*",)),
        ([key for key in LAYERS if key.startswith("blocks.1.")], ("blocks.1.*",)),
        (["blocks.1.up.bias"], ("blocks.1.up.bias", "blocks.1.up.bias.*")),
        (["odd[1].weight"], ("odd[[]1].*",)),
        (["scale"], ("scale", "scale.*")),
    ],
)
def test_missing_keys(missing: list[str], patterns: tuple[str, ...]) -> None:
    model_keys = [*LAYERS, "odd[1].weight", "scale"]
    found = ways_out.patterns_of_missing(missing, model_keys, set(), has_states=True)
    assert found == patterns
    assert [key for key in model_keys if any(fnmatchcase(key, one) for one in found)] == [key for key in model_keys if key in missing]


def test_missing_states() -> None:
    states = {f"{key}.moment1_0" for key in LAYERS}
    some = sorted(states)[:2]
    assert ways_out.patterns_of_missing(some, LAYERS, states, has_states=True) == ("blocks.0.norm.weight.*", "blocks.0.up.bias.*")
    assert ways_out.patterns_of_missing(sorted(states), LAYERS, states, has_states=True) == ("*_0",)


def test_unexpected_keys() -> None:
    states = {f"{key}.{state}" for key in LAYERS for state in ("moment1_0", "moment2_max_0")}
    stored = {*LAYERS, *states}
    gone = sorted(key for key in stored if key.startswith(("blocks.2.", "blocks.1.up.bias")))
    assert ways_out.patterns_of_unexpected(gone, stored, states) == ("blocks.1.up.bias", "blocks.1.up.bias.*", "blocks.2.*")
    maxima = sorted(key for key in states if key.endswith("max_0"))
    assert ways_out.patterns_of_unexpected(maxima, stored, states) == ("*.moment2_max_0",)


def test_layers_with_another_name() -> None:
    square, tall = ((4, 4), "float32"), ((8, 4), "float32")

    def layers(**held: Any) -> dict[str, frozenset[tuple[str, Any]]]:
        return {f"{name}.": frozenset({"weight": described}.items()) for name, described in held.items()}

    assert ways_out._renamed_layers(layers(a=square, b=tall), layers(c=square, d=((8, 4), "float64"))) == {"a.": "c."}
    assert ways_out._renamed_layers(layers(a=square), layers(c=square, d=square)) == {}
    assert ways_out._renamed_layers(layers(a=square, b=square), layers(c=square)) == {}


def test_many_keys_take_little_time() -> None:
    keys = [f"layers.{i}.experts.{j}.{name}" for i in range(50) for j in range(100) for name in ("up", "down", "gate", "norm")]
    described = dict.fromkeys([f"{begin}.{key}" for key in keys for begin in "ab"], ((4, 4), "float32"))
    here, there = ([f"{begin}.{key}" for key in keys] for begin in "ab")
    start = time.process_time()
    assert ways_out.patterns_of_unexpected(there, set(there), set()) == ("b.*",)
    kept = [key.replace(".up", ".kept") for key in here if key.endswith(".up")]
    assert len(ways_out.patterns_of_missing(here, [*here, *kept], set(), has_states=True)) == 2 * len(here)
    ways_out._renamed_layers(*(ways_out._in_layers(some, some, described) for some in (here, there)))
    assert time.process_time() - start < 5.0


def said(**problems: Any) -> str:
    return str(ways_out.with_words_on_masters(ReadProblems(Path("step"), **problems)))


def test_words_on_master_weights() -> None:
    only_one_has_masters = (said(missing=("a.w_0",)), said(unexpected=("a.w_0", "b.w_0")))
    assert "cast=True, which takes missing master weights (.w_0) from the parameters" in only_one_has_masters[0]
    assert "allow_missing" not in only_one_has_masters[0]
    assert "allow_unexpected=['*.w_0'], or give the optimizer master weights by multi_precision=True" in only_one_has_masters[1]
    both = said(missing=("a.w_0", "b"), unexpected=("c.w_0", "d"))
    assert "allow_missing=[patterns" in both and "allow_unexpected=[patterns of keys to leave out], cast=True, which" in both
    other_dtype = (KeyProblem("a", f"float32 {CASTABLE}"),)
    assert said(missing=("a.w_0",), wrong_dtype=other_dtype).endswith(
        "cast=True, which takes missing master weights (.w_0) from the parameters"
    )
    nothing = said(missing=("a.w_0", "b"), unexpected=("c.w_0",), nothing_matched=True)
    assert "allow_missing" not in nothing and "allow_unexpected=['*.w_0']" in nothing and "cast=True, which" in nothing


@pytest.mark.parametrize("problems", [{"missing": ("a", "b.moment1_0")}, {"unexpected": ("a", "b.w_0")}, {"nothing_matched": True}])
def test_without_master_weights_nothing_is_said_of_them(problems: dict[str, Any]) -> None:
    assert said(**problems) == str(ReadProblems(Path("step"), **problems))
