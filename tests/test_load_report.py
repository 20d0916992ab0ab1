from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_fsdp_ckpt.loading.report import CastKey, LoadNotes, LoadReport, OtherShape, Resized, merge_notes

EXACT = LoadReport(Path("step_7"), 7, 4, None, 12, parts=["model", "optimizer"])
SHAPE = OtherShape("a", (2, 3), (4, 3))
CAST = CastKey("a", "a", "float32", "bfloat16", True)


def test_an_exact_load() -> None:
    report = replace(EXACT, without_state=["frozen"], unused_options=["allow_missing='x'"])
    assert report.is_exact
    assert str(report).splitlines() == [
        "loaded 'step_7', step 7, saved by 4 ranks: model, optimizer",
        "- 1 parameter without a gradient so far, and without state: frozen",
        "- 1 option not needed: allow_missing='x'",
        "- everything in it, as it was saved",
    ]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ({"missing": ["a", "b"]}, "2 keys missing, left as they were: a, b"),
        ({"other_shape": [SHAPE]}, "1 key of another shape in it, left as it was: 'a': [2, 3] in it, [4, 3] here"),
        (
            {"resized": [Resized("a", "b", (2, 3), (2, 4)), Resized("c", "c", (5,), (4,)), Resized("d", "d", (1, 2, 3), (1, 4, 3))]},
            (
                "3 keys of another size, loaded as far as both have them: 'a': [2, 3] of 'b' in it, [2, 4] here, 1 column left as it was, "
                "'c': [5] in it, [4] here, 1 row of it left out, "
                "'d': [1, 2, 3] in it, [1, 4, 3] here, 2 indices of dimension 1 left as they were"
            ),
        ),
        ({"not_restored": ["x"]}, "1 thing saved besides, and not restored: x"),
        ({"started_afresh": ["a"]}, "1 parameter whose states start afresh: a"),
        ({"unexpected": list("abcdefgh")}, "8 keys of the checkpoint left out: a, b, c, d, e, ... (3 more)"),
        ({"not_asked_for": ["a"]}, "1 key of the checkpoint not asked for: a"),
        ({"casts": [CAST]}, "1 key converted: 'a': float32 -> bfloat16 (rounded)"),
        ({"casts": [CAST._replace(source="a.w_0", now="float32", may_have_rounded=False)]}, "'a': float32 of 'a.w_0' -> float32"),
        ({"mapped": {"a": "b"}}, "1 name that differs in the checkpoint: 'a' is 'b' there"),
        ({"copied_tied": ["a = b"]}, "1 tied on one side only, and copied: a = b"),
        ({"differences": ["other rate"]}, "1 setting differs: other rate"),
    ],
)
def test_what_differs_is_said(what: dict[str, Any], line: str) -> None:
    report = replace(EXACT, **what)
    assert not report.is_exact
    assert line in str(report) and "as it was saved" not in str(report)


def test_notes_of_all_ranks() -> None:
    one = LoadNotes(missing=["b"], casts=[CAST], used_options=["x"], other_shape=[SHAPE], resized=[Resized("a", "a", (5,), (4,))])
    other = LoadNotes(missing=["a", "b"], unexpected=["c"], casts=[CAST, CAST._replace(key="0")], started_afresh=["d"])
    merged = merge_notes([json.loads(json.dumps(notes.to_json())) for notes in (one, other)])
    assert merged == LoadNotes(["a", "b"], ["c"], [CAST._replace(key="0"), CAST], [SHAPE], ["d"], ["x"], [Resized("a", "a", (5,), (4,))])
    assert merge_notes([json.loads(json.dumps(merged.to_json()))]) == merged
