"""Which steps stay: for any steps and policies, checked against what each policy says in words."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fsdp_ckpt.errors import CheckpointError
from paddle_fsdp_ckpt.manager.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepNewestOfEach, Retention, steps_to_remove
from paddle_fsdp_ckpt.manager.steps import SavedStep

START = datetime(2026, 2, 27, 22, 30, tzinfo=timezone.utc)


@st.composite
def saved_steps(draw: st.DrawFn) -> list[SavedStep]:
    """Steps in any order; their times may go backwards, or be unknown."""
    numbers = draw(st.lists(st.integers(0, 300), unique=True, max_size=25))
    minutes = st.none() | st.integers(-3000, 9000)
    losses = st.none() | st.sampled_from([math.nan, math.inf, -1.0, 0.0, 0.5, 2.0])
    steps = []
    for number in numbers:
        minute, loss = draw(minutes), draw(losses)
        created = None if minute is None else START + timedelta(minutes=minute)
        steps.append(SavedStep(number, created, {} if loss is None else {"loss": loss}))
    return steps


policies = st.one_of(
    st.builds(KeepAll),
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepEvery, st.integers(1, 50)),
    st.builds(KeepNewestOfEach, st.sampled_from(["hour", "day"]), st.none() | st.integers(1, 4)),
    st.builds(KeepBest, st.just("loss"), st.integers(1, 4), st.sampled_from(["min", "max"])),
)


@settings(deadline=None)
@given(saved_steps(), st.lists(policies, min_size=1, max_size=4), st.data())
def test_what_is_removed(steps: list[SavedStep], chosen: list[Retention], data: st.DataObject) -> None:
    protected = data.draw(st.sets(st.sampled_from([one.step for one in steps]))) if steps else set()
    removed = steps_to_remove(chosen, steps, protected)
    ordered = sorted(steps, key=lambda one: one.step)
    assert removed == sorted(set(removed))
    assert not protected & set(removed)
    if steps:
        assert ordered[-1].step not in removed, "the newest one always stays"
    # Composing: removed is what each policy alone would remove.
    assert set(removed) == set.intersection(*(set(steps_to_remove([policy], steps, protected)) for policy in chosen))
    # Removing once is enough.
    left = [one for one in steps if one.step not in removed]
    if not any(isinstance(policy, KeepBest | KeepNewestOfEach | KeepLast) for policy in chosen) or not protected:
        assert steps_to_remove(chosen, left, protected) == [] or protected


@settings(deadline=None)
@given(saved_steps(), st.integers(1, 5))
def test_last(steps: list[SavedStep], count: int) -> None:
    numbers = sorted(one.step for one in steps)
    assert steps_to_remove([KeepLast(count)], steps) == numbers[: max(0, len(numbers) - count)]


@settings(deadline=None)
@given(saved_steps(), st.integers(1, 50))
def test_every(steps: list[SavedStep], every: int) -> None:
    numbers = sorted(one.step for one in steps)
    assert steps_to_remove([KeepEvery(every)], steps) == [number for number in numbers[:-1] if number % every]


@settings(deadline=None)
@given(saved_steps(), st.sampled_from(["hour", "day"]), st.none() | st.integers(1, 4))
def test_newest_of_each(steps: list[SavedStep], period: str, count: int | None) -> None:
    seconds = {"hour": 3600, "day": 86400}[period]
    kept = set(KeepNewestOfEach(period, count).kept(sorted(steps, key=lambda one: one.step)))
    dated = [(int(one.created.timestamp()) // seconds, one.step) for one in steps if one.created is not None]
    newest = {number: max(step for other, step in dated if other == number) for number, _ in dated}
    chosen = sorted(newest, key=lambda number: newest[number], reverse=True)[:count]  # of these periods
    assert kept == {newest[number] for number in chosen} | {one.step for one in steps if one.created is None}


def test_a_clock_that_jumps_back_makes_no_old_step_the_newest() -> None:
    hours = [20, 21, 22, 23, 1, 2, 3, 4]  # 1 to 4 of the same day: the clock was wrong before
    steps = [SavedStep(step, datetime(2026, 11, 30, hour, tzinfo=timezone.utc)) for step, hour in enumerate(hours, 1)]
    assert steps_to_remove([KeepNewestOfEach("hour", 2)], steps) == [1, 2, 3, 4, 5, 6]
    assert steps_to_remove([KeepNewestOfEach("hour")], steps) == []


@settings(deadline=None)
@given(saved_steps(), st.integers(1, 4), st.sampled_from(["min", "max"]))
def test_best(steps: list[SavedStep], count: int, mode: str) -> None:
    kept = set(KeepBest("loss", count, mode).kept(sorted(steps, key=lambda one: one.step)))
    measured = {one.step: one.metrics["loss"] for one in steps if "loss" in one.metrics and one.metrics["loss"] == one.metrics["loss"]}
    assert kept <= measured.keys()
    assert len(kept) == min(count, len(measured))
    for step in measured.keys() - kept:
        for better in kept:
            left, right = (measured[better], measured[step]) if mode == "min" else (measured[step], measured[better])
            assert left < right or (left == right and better > step)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: KeepLast(0), "KeepLast: count is 0, not a whole number from 1 on"),
        (lambda: KeepEvery(True), "KeepEvery: steps is True"),
        (lambda: KeepBest("loss", 1.5, "min"), "KeepBest: count is 1.5"),
        (lambda: KeepBest("acc"), 'KeepBest\\(\'acc\'\\): .*give mode="max" where more is better, or mode="min"'),
        (lambda: KeepBest("loss", mode="least"), "mode is 'least'; give mode="),
        (lambda: KeepNewestOfEach("week"), "period is one of 'hour', 'day'"),
        (lambda: KeepNewestOfEach("day", -1), "KeepNewestOfEach: count is -1"),
    ],
)
def test_nonsense_is_refused(make: object, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        make()
