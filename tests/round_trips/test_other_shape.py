"""Parameters that have another shape in the checkpoint keep their values where that was asked for; and what errors offer leads out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import RankPool
from loaded_bases import Saved, assert_values, is_state, load_on
from option_cases import LARGER, refused
from shape_cases import follow, given_then_kept, restored, with_master_weights
from strict_cases import VOCABULARY
from test_strict import check

Ranks = Callable[[int], RankPool]

GROWN = ("embed.weight", "out.weight", "head.weight")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_larger_vocabulary(world_size: int, saved: Saved, ranks: Ranks) -> None:
    """Tied names count as one; what else there is comes from the checkpoint."""
    path, values, _ = saved()
    options: dict[str, Any] = {"allow_other_shape": ["out.weight", "head.*", "blocks.*", "no such"]}
    before, after, report = load_on(ranks(world_size), path, "grown", "adamw", 2, **options)
    others = {key: array for key, array in values.items() if not key.startswith(GROWN)}
    assert_values(after, others | {key: before[key] for key in GROWN})
    assert [(one.key, one.saved, one.now) for one in report.other_shape] == [
        ("embed.weight", (VOCABULARY, 10), (LARGER, 10)),
        ("head.weight", (10, VOCABULARY), (10, LARGER)),
    ]
    assert report.started_afresh == ["embed.weight", "head.weight"] and not report.missing and not report.without_state
    assert report.unexpected == sorted(key for key in values if is_state(key) and key.startswith(GROWN))
    assert report.unused_options == ["allow_other_shape='blocks.*'", "allow_other_shape='no such'"]
    assert not report.is_exact
    assert f"2 keys of another shape in it, left as they were: 'embed.weight': [{VOCABULARY}, 10] in it, [{LARGER}, 10] here" in str(report)


def test_what_is_not_allowed_is_refused(saved: Saved, ranks: Ranks) -> None:
    path = saved()[0]
    results = ranks(2).run(refused, path, "grown", "adamw", [{"allow_other_shape": ["head.*"]}])
    assert results[0] == results[1]
    shapes = (
        f"1 of another shape: 'embed.weight': checkpoint has shape [{VOCABULARY}, 10], the model wants [{LARGER}, 10] (and of its states)"
    )
    check(results, [shapes, "allow_other_shape=['embed.weight']"])
    check(
        ranks(2).run(refused, path, "grown", "adamw", [{}, {"allow_other_shape": ["*"]}]), ["options must be the same"], "RankFailedError"
    )
    for name, message, changed in ranks(2).run(refused, path, "grown", "adamw", [{"allow_other_shape": "head.*"}]):
        assert name == "CheckpointError" and "allow_other_shape is 'head.*'; give a list of patterns" in message and not changed


def test_nothing_of_the_same_shape_is_refused(saved: Saved, ranks: Ranks) -> None:
    check(ranks(2).run(refused, saved()[0], "wide", "adamw", [{"allow_other_shape": ["*"]}]), ["not one key matches"])


def test_master_weights(tmp_path: Path, ranks: Ranks) -> None:
    for found in ranks(2).run(with_master_weights, str(tmp_path / "low")):
        assert all(found.values()), found


def test_what_was_given_and_kept_is_the_same_on_all_ranks(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(given_then_kept, str(tmp_path / "given"))
    assert first.tolist() == [1.5] * 5  # 3 - 0.25 * 2 * 3
    assert not second.size


def test_a_manager_passes_it_on(tmp_path: Path, ranks: Ranks) -> None:
    for step, keys, is_exact, text in ranks(2).run(restored, str(tmp_path / "root")):
        assert step == 2 and keys == ["embed.weight", "head.weight"] and not is_exact
        assert "2 keys of another shape in it" in text


@pytest.mark.parametrize(
    ("source", "model", "optimizer", "ways"),
    [
        (
            "base adamw",
            "grown",
            "adamw",
            {
                "options": "{'allow_other_shape': ['embed.weight', 'head.weight']}",
                "resize": "{'resize': ['embed.weight', 'head.weight']}",
            },
        ),
        ("base adamw", "more", "adamw", {"options": "{'allow_missing': ['extra.*']}"}),
        ("more adamw", "base", "adamw", {"options": "{'allow_unexpected': ['extra.*']}"}),
        (
            "base adamw",
            "renamed",
            "adamw",
            {
                "options": "{'allow_missing': ['lm_head.*'], 'allow_unexpected': ['head.*']}",
                "key_map": "{'key_map': {'lm_head.': 'head.'}}",
            },
        ),
        ("base adamw", "base", "adamw amsgrad", {"options": "{'allow_missing': ['*_0']}", "weights": ""}),
        ("base adamw amsgrad", "base", "adamw", {"options": "{'allow_unexpected': ['*.moment2_max_0']}", "weights": ""}),
        ("base adamw", "base", "adam", {"weights": ""}),
        ("base adamw", "base", "momentum", {"weights": ""}),
        ("base adamw", "double", "adamw", {"options": "{'cast': True}"}),
        ("base adamw", "untied", "adamw", {"options": "{'copy_tied': True}"}),
        ("base adamw", "wrapped", "adamw", {"key_map": "{'key_map': {'_layers.': ''}}"}),
        ("base adamw", "other", "adamw", {}),
        ("base adamw", "wide", "adamw", {}),
    ],
)
def test_each_way_out_leads_out(source: str, model: str, optimizer: str, ways: dict[str, str], saved: Saved, ranks: Ranks) -> None:
    path = saved(*source.split(" ", 1))[0]
    results = ranks(2).run(follow, path, model, optimizer)
    assert results[0] == results[1]
    (_, message, _), *followed = results[0]
    assert [name for name, _, _ in followed] == list(ways), message
    for name, options, odd in followed:
        assert odd == (["exact"] if name == "exact" else []), (name, odd)
        assert options == (ways[name] or "{'parts': {'model'}}"), message


def test_an_error_says_what_hinders(saved: Saved, ranks: Ranks) -> None:
    path = saved()[0]
    check(
        ranks(2).run(refused, path, "base", "adam", [{}]),
        ["both keep moment1, moment2", "AdamW takes weight decay from the weights, and Adam adds it to the gradient"],
    )
    check(
        ranks(2).run(refused, path, "wide", "adamw", [{}]),
        [
            "14 of another shape:\n    'blocks.0.down.bias': checkpoint has shape [10], the model wants [11] (and of its states),\n    '",
            "Way out: nothing that is to be loaded has the shape that it has there; make the model with the sizes that it had then",
        ],
    )
