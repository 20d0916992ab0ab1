from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from paddle_fsdp_ckpt import load
from paddle_fsdp_ckpt.errors import CheckpointError, MismatchError
from paddle_fsdp_ckpt.loading.options import PARTS, LoadOptions, Patterns, check_options, map_names, unused_prefixes

NAMES = ["model.embed.weight", "model.embedding.weight", "model.head.weight", "scale"]
ARGUMENTS = {name: one.default for name, one in inspect.signature(load).parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
DEFAULTS: dict[str, Any] = {name: value for name, value in ARGUMENTS.items() if name not in ("model", "optimizer", "timeout_seconds")}
DEFAULTS["given"] = ["model", "optimizer"]


def test_an_option_is_an_argument_of_load_with_the_same_default() -> None:
    options = {one.name: one.default for one in fields(LoadOptions)}
    assert {**options, "parts": None, "given": DEFAULTS["given"]} == DEFAULTS


@pytest.mark.parametrize(
    ("key_map", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"": ""}, {}),
        ({"": "m."}, {name: f"m.{name}" for name in NAMES}),
        ({"model.": ""}, {name: name.removeprefix("model.") for name in NAMES[:3]}),
        ({"model": "net"}, {name: name.replace("model", "net") for name in NAMES[:3]}),
        ({"model.embed": "model.e"}, {"model.embed.weight": "model.e.weight"}),
        ({"model.": "", "model.head.": "last."}, {**{n: n.removeprefix("model.") for n in NAMES[:2]}, NAMES[2]: "last.weight"}),
        ({"scale": "factor", "sca": "x"}, {"scale": "factor"}),
        (str.upper, {name: name.upper() for name in NAMES}),
        (lambda name: name, {}),
    ],
)
def test_names_in_the_checkpoint(key_map: Any, expected: dict[str, str]) -> None:
    assert map_names(key_map, NAMES) == expected


def test_names_may_change_places() -> None:
    assert map_names({"a.": "b.", "b.": "a."}, ["a.w", "b.w"]) == {"a.w": "b.w", "b.w": "a.w"}


def test_two_names_may_not_be_one() -> None:
    with pytest.raises(
        MismatchError, match="2 names .*'a.w' and 'b.w' are both 'x.w', 'b.w' and 'x.w' are both 'x.w'; nothing was changed"
    ):
        map_names({"a.": "x.", "b.": "x."}, ["a.w", "b.w", "x.w"])


@pytest.mark.parametrize("strange", [None, 3, ""])
def test_a_function_must_give_names(strange: Any) -> None:
    with pytest.raises(CheckpointError, match="key_map gave"):
        map_names(lambda _: strange, ["a"])


def test_unused_prefixes() -> None:
    assert unused_prefixes({"model.": "", "modell.": "", "sca": "x", "": "y"}, NAMES) == ["modell.", "sca"]
    assert unused_prefixes(str.upper, NAMES) == unused_prefixes(None, NAMES) == []


def test_patterns_remember_whether_they_were_of_use() -> None:
    patterns = Patterns(["head.*", "*.b?as", "no", "x[0-9]"])
    assert patterns.match("head.weight") and patterns.match("a.bias") and patterns.match("x1")
    assert not patterns.match("a.weight") and not patterns.match("HEAD.weight") and not patterns.match("no.")
    assert patterns.used() == ["head.*", "*.b?as", "x[0-9]"]


def test_all_keys_or_none_are_matched() -> None:
    patterns = Patterns(["a.*", "b.x"])
    assert not patterns.match_all(["b.x", "b.y"]) and patterns.used() == []
    assert patterns.match_all(["b.x", "a.y"]) and patterns.used() == ["a.*", "b.x"]


def test_options_of_a_plain_call() -> None:
    options = check_options(**DEFAULTS)
    assert options.parts == frozenset(PARTS)
    assert check_options(**{**DEFAULTS, "given": ["model"]}).parts == {"model"}
    assert check_options(**{**DEFAULTS, "given": ["optimizer"]}).parts == {"optimizer", "learning_rate"}


@pytest.mark.parametrize("parts", [["model"], ("model",), {"model": 1}.keys(), iter(["model"])])
def test_any_collection_of_parts(parts: Any) -> None:
    assert check_options(**{**DEFAULTS, "parts": parts}).parts == {"model"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parts", {"model": True}),
        ("parts", [["model"]]),
        ("parts", 1),
        ("allow_missing", None),
        ("allow_unexpected", b"x"),
        ("cast", 1),
        ("check_digests", 0),
    ],
)
def test_what_is_no_option(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^load: "):
        check_options(**{**DEFAULTS, name: value})


def test_digests_are_checked_first_or_not_at_all() -> None:
    with pytest.raises(CheckpointError, match="verify_first=True.*check_digests=False.*choose one"):
        check_options(**{**DEFAULTS, "verify_first": True, "check_digests": False})


def test_the_digest_tells_options_apart() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"allow_missing": ["a"]},
        {"allow_unexpected": ["a"]},
        {"cast": True},
        {"parts": ["model"]},
        {"copy_tied": True},
        {"verify_first": True},
        {"salvage": True},
        {"allow_other_base": True},
        {"check_digests": False},
    ]
    digests = [check_options(**{**DEFAULTS, **way}).digest({}) for way in ways]
    digests.append(check_options(**DEFAULTS).digest({"a": "b"}))
    assert len(set(digests)) == len(digests)
    assert check_options(**{**DEFAULTS, "parts": ["model", "optimizer"]}).digest({"a": "b", "c": "d"}) == check_options(
        **{**DEFAULTS, "parts": ["optimizer", "model"]}
    ).digest({"c": "d", "a": "b"})
