"""Which steps to keep: policies as values that compose. Pure arithmetic on step numbers, times and metrics.

A step is kept where any policy of a list keeps it. What is newer is decided by the step number, never by the times of files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timezone
from typing import Literal, Protocol

from ..errors import CheckpointError, listing
from .steps import SavedStep, names_of


class Retention(Protocol):
    """A policy."""

    def kept(self, steps: Sequence[SavedStep]) -> Iterable[int]:
        """Return the numbers of the steps that it keeps, of steps in ascending order."""
        ...


@dataclass(frozen=True)
class KeepAll:
    """Keep every step."""

    def kept(self, steps: Sequence[SavedStep]) -> Iterable[int]:
        """Return all."""
        return [one.step for one in steps]


@dataclass(frozen=True)
class KeepLast:
    """Keep the ``count`` newest steps; at least 1."""

    count: int

    def __post_init__(self) -> None:
        _check_positive(self, "count", self.count)

    def kept(self, steps: Sequence[SavedStep]) -> Iterable[int]:
        """Return the last ones."""
        return [one.step for one in steps[-self.count :]]


@dataclass(frozen=True)
class KeepEvery:
    """Keep for ever the steps whose number can be divided by ``steps``."""

    steps: int

    def __post_init__(self) -> None:
        _check_positive(self, "steps", self.steps)

    def kept(self, steps: Sequence[SavedStep]) -> Iterable[int]:
        """Return those that can be divided."""
        return [one.step for one in steps if one.step % self.steps == 0]


@dataclass(frozen=True)
class KeepNewestOfEach:
    """Keep the newest step of each hour or day, as UTC has them, in which a step was saved.

    Attributes:
        period: which.
        count: of how many hours or days, those with the newest steps; None for all.
    """

    period: Literal["hour", "day"]
    count: int | None = None

    def __post_init__(self) -> None:
        if self.period not in _PERIODS:
            raise CheckpointError(f"{self}: period is one of {', '.join(map(repr, _PERIODS))}")
        if self.count is not None:
            _check_positive(self, "count", self.count)

    def kept(self, steps: Sequence[SavedStep]) -> Iterable[int]:
        """Return the newest of each; those whose time is unknown too."""
        newest: dict[str, int] = {}
        for one in steps:
            if one.created is not None:
                newest[one.created.astimezone(timezone.utc).strftime(_PERIODS[self.period])] = one.step
        # The latest periods are those of the newest steps: a clock may have jumped back.
        return sorted(newest.values())[-self.count if self.count else 0 :] + [one.step for one in steps if one.created is None]


_PERIODS = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d"}


@dataclass(frozen=True)
class KeepBest:
    """Keep the ``count`` steps with the best value of a metric that was given to their saves; of equal ones the newest.

    Attributes:
        metric: its name in ``metrics``. A step without it, or where it is no number (NaN), is never among the best.
        count: at least 1.
        mode: ``"min"`` where less is better, ``"max"`` where more is. It must be given: with the wrong one the best steps are removed.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "count", self.count)
        if self.mode not in ("min", "max"):
            wrong = "does not say which values are best" if self.mode is None else f"mode is {self.mode!r:.100}"
            raise CheckpointError(
                f'KeepBest({self.metric!r:.100}): {wrong}; give mode="max" where more is better, or mode="min" where less is'
            )

    def kept(self, steps: Sequence[SavedStep]) -> Iterable[int]:
        """Return the best ones."""
        sign = 1 if self.mode == "min" else -1
        measured = [one for one in steps if not math.isnan(one.metrics.get(self.metric, math.nan))]
        best = sorted(measured, key=lambda one: (sign * one.metrics[self.metric], -one.step))
        return [one.step for one in best[: self.count]]


def best_step(metric: str, mode: Literal["min", "max"], steps: Sequence[SavedStep]) -> int | None:
    """Return the step with the best value of a metric, as :class:`KeepBest` compares them; None where no step has a number there.

    Args:
        metric: its name.
        mode: which values are best.
        steps: with their metrics, in ascending order.

    Raises:
        CheckpointError: the metrics of some could not be read, or there are steps, and none was saved with this metric.
    """
    best = [*KeepBest(metric, mode=mode).kept(steps)]
    unknown = [one.step for one in steps if not one.is_known]
    if unknown:
        raise CheckpointError(
            f"best_step: the metrics of {names_of(unknown)} can't be read, and one of them may be the best. Try again; `paddle-fsdp-ckpt "
            "verify` says what is wrong with a step, and one that is lost can be moved out of the root"
        )
    names = {name for one in steps for name in one.metrics}
    if steps and metric not in names:
        raise CheckpointError(
            f"best_step: no step was saved with metrics={{{metric!r:.100}: ...}}; they were with {listing(sorted(names)) or 'none'}"
        )
    return best[0] if best else None


def missing_metrics(policies: Iterable[Retention], metrics: Collection[str]) -> list[str]:
    """Return the names of the metrics by which policies compare steps and that are not among these."""
    return sorted({policy.metric for policy in policies if isinstance(policy, KeepBest)} - {*metrics})


def need_metrics(policies: Iterable[Retention]) -> bool:
    """Tell whether a policy may look at the steps' metrics; those that are not of this module may."""
    return any(not isinstance(policy, (KeepAll, KeepLast, KeepEvery, KeepNewestOfEach)) for policy in policies)


def steps_to_remove(policies: Sequence[Retention], steps: Sequence[SavedStep], protected: Collection[int] = ()) -> list[int]:
    """Return the numbers of the steps that no policy keeps, in ascending order; never the newest one.

    Where policies may compare metrics, a step of which they could not be read stays: it may be the best.

    Args:
        policies: at least one.
        steps: the committed ones, in any order.
        protected: steps that stay whatever the policies say.
    """
    ordered = sorted(steps, key=lambda one: one.step)
    unknown = [one.step for one in ordered if not one.is_known] if need_metrics(policies) else []
    kept = {*protected, *unknown, *(one.step for one in ordered[-1:])}.union(*(policy.kept(ordered) for policy in policies))
    return [one.step for one in ordered if one.step not in kept]


def _check_positive(policy: Retention, what: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{type(policy).__name__}: {what} is {value!r:.100}, not a whole number from 1 on")
