"""How the demo judges a resume, and what it says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paddle_fsdp_ckpt.demo.job import Job
from paddle_fsdp_ckpt.demo.report import Outcome, compare, table

JOB = Job("uninterrupted", "unused", world_size=2, steps=4, text=None, moe=False, seed=1, save_to="unused", save_at=2)


def _outcome(title: str, ranks: int, losses: dict[int, float], weight: float = 1.0, moment: float = 2.0) -> Outcome:
    job = dataclasses.replace(JOB, title=title, world_size=ranks)
    return Outcome(job, losses, parameters={"weight": np.array([weight])}, optimizer={"moment": np.array([moment])})


REFERENCE = _outcome("uninterrupted", 2, {1: 4.0, 2: 3.0, 3: 2.5, 4: 2.25})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_bits_are_good_on_any_number_of_ranks(ranks: int) -> None:
    comparison = compare(REFERENCE, _outcome("resumed", ranks, {3: 2.5, 4: 2.25}))
    assert comparison.bitwise and comparison.good
    assert (comparison.loss, comparison.parameter) == (0.0, 0.0)
    assert "bit for bit. Each" in str(comparison)


@pytest.mark.parametrize(
    "resumed",
    [
        _outcome("loss", 2, {3: 2.5, 4: 2.2500001}),
        _outcome("parameter", 2, {3: 2.5, 4: 2.25}, weight=1.0000001),
        _outcome("optimizer", 2, {3: 2.5, 4: 2.25}, moment=2.0000001),
        _outcome("step missing", 2, {4: 2.25}),
        _outcome("not a number", 2, {3: 2.5, 4: float("nan")}),
    ],
    ids=lambda outcome: outcome.job.title,
)
def test_on_as_many_ranks_nothing_else_will_do(resumed: Outcome) -> None:
    comparison = compare(REFERENCE, resumed)
    assert not comparison.bitwise and not comparison.good
    assert "must not be" in str(comparison)


def test_on_other_ranks_rounding_is_good_and_more_is_not() -> None:
    near = compare(REFERENCE, _outcome("near", 3, {3: 2.5, 4: 2.250001}, weight=1.5))
    assert near.good and not near.bitwise
    assert near.loss == pytest.approx(1e-6)
    assert near.parameter == 0.5
    assert "another order" in str(near) and "1.0e-06" in str(near) and "5.0e-01" in str(near)
    for losses in ({3: 2.5, 4: 2.26}, {4: 2.25}, {3: float("nan"), 4: 2.25}):
        far = compare(REFERENCE, _outcome("far", 3, losses))
        assert not far.good
        assert "too far" in str(far)


def test_the_table_shows_losses_side_by_side() -> None:
    lines = list(table([REFERENCE, _outcome("resumed on 2", 2, {3: 2.5, 4: 2.25})]))
    assert lines[0].split() == ["step", "uninterrupted", "resumed", "on", "2"]
    assert [line.split() for line in lines if not line.startswith("----")][1:] == [
        ["1", "4.000000000"],
        ["2", "3.000000000"],
        ["3", "2.500000000", "2.500000000"],
        ["4", "2.250000000", "2.250000000"],
    ]
    assert lines[3].startswith("---- saved here")


def test_a_long_table_is_thinned_out_but_shows_the_checkpoint() -> None:
    job = dataclasses.replace(JOB, steps=1000, save_at=501)
    lines = list(table([Outcome(job, dict.fromkeys(range(1, 1001), 1.0))]))
    assert len(lines) < 40
    shown = [int(line.split()[0]) for line in lines[1:] if not line.startswith("----")]
    assert {1, 501, 502, 1000} <= set(shown)
