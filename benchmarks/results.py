"""What was measured, as data, and as ``results.json``: from it ``RESULTS.md`` is written, and single cases are renewed in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from .measure import Measurement

VERSION = 1
FILE_NAME = "results.json"


@dataclass(frozen=True)
class Figure:
    """A figure of several rounds.

    Attributes:
        value: the figure; mostly the median.
        spread: the least and the most of the rounds; None of a single round, and where rounds can't be compared one by one.
    """

    value: float
    spread: tuple[float, float] | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure:
        """Return the median, with the least and the most."""
        values = list(values)
        return cls(median(values), (min(values), max(values)) if len(values) > 1 else None)


@dataclass
class Result:
    """What one contender needed for one operation, round by round.

    Attributes:
        operation: what was done.
        contender: who did it.
        nbytes: how many bytes all ranks had together.
        rounds: what each cost, the largest figure of all ranks. Who raised is not asked again, so only the last can have an error.
    """

    operation: str
    contender: str
    nbytes: int
    rounds: list[Measurement] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        """What it raised, if it did."""
        return next((one.error for one in self.rounds if one.error is not None), None)

    @property
    def seconds(self) -> Figure:
        """On the clock."""
        return Figure.of(one.seconds for one in self.rounds)

    @property
    def cpu_seconds(self) -> Figure:
        """Of the rank that needed most."""
        return Figure.of(one.cpu_seconds for one in self.rounds)

    @property
    def extra_nbytes(self) -> int:
        """The most."""
        return max(one.extra_nbytes for one in self.rounds)

    def ratio(self, baseline: Result) -> Figure:
        """Return how many times as long it took as the baseline.

        Both did the work in each round, one behind the other, so rounds are compared one by one, and what slows the machine down for a
        while slows both. Where one was asked in fewer rounds than the other, it is the ratio of their medians.
        """
        if len(self.rounds) != len(baseline.rounds):
            return Figure(self.seconds.value / baseline.seconds.value)
        return Figure.of(own.seconds / other.seconds for own, other in zip(self.rounds, baseline.rounds, strict=True))


@dataclass(frozen=True)
class Steadiness:
    """How long the same work took, which was done before each round: what else the machine had to do.

    Attributes:
        rounds: how many.
        loop: seconds of a loop of Python.
        copy: seconds of a copy in memory.
    """

    rounds: int
    loop: Figure
    copy: Figure


@dataclass(frozen=True)
class Failure:
    """A try to measure a case again that did not come to its end.

    Attributes:
        measured_at: when it began, UTC, ISO 8601.
        commit: as :attr:`CaseResults.commit`.
        error: what ended it.
    """

    measured_at: str
    commit: str | None
    error: str


@dataclass(frozen=True)
class CaseResults:
    """One case, measured from its beginning to its end by one command.

    Attributes:
        name: of the case.
        about: the model in words.
        command: that measured it.
        measured_at: when it began, UTC, ISO 8601.
        minutes: how many it took.
        commit: of the project, with a "+" where the code differed from it; None outside of git.
        machine: in words.
        versions: of what it depends on, by name.
        steadiness: of the machine; None where no round began.
        failure: what ended it before its end; None where it came there.
        failed_renewal: a later try of which nothing was kept.
        rows: what was measured.
    """

    name: str
    about: str
    command: str
    measured_at: str
    minutes: float
    commit: str | None
    machine: str
    versions: Mapping[str, str]
    steadiness: Steadiness | None
    failure: str | None
    failed_renewal: Failure | None
    rows: tuple[Result, ...]


@dataclass(frozen=True)
class Results:
    """All cases that a directory has results of.

    Attributes:
        quick: whether sizes were small, to try the command. Results of both kinds are never together.
        cases: by name.
    """

    quick: bool
    cases: Mapping[str, CaseResults]

    def renewed(self, new: CaseResults) -> Results:
        """Return them with a case measured again. One that did not come to its end replaces none that did, but is told of there."""
        old = self.cases.get(new.name)
        if new.failure is not None and old is not None and old.failure is None:
            new = replace(old, failed_renewal=Failure(new.measured_at, new.commit, new.failure))
        return replace(self, cases={**self.cases, new.name: new})

    def in_order(self, names: Iterable[str]) -> Results:
        """Return them in the order of these names; others come last."""
        known = {name: self.cases[name] for name in names if name in self.cases}
        return replace(self, cases={**known, **self.cases})


def read(directory: Path) -> Results | None:
    """Return what a directory has results of, None where there are none.

    Raises:
        ValueError: the file is none of this version, or not whole.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != VERSION:
            raise ValueError(f"it has version {document['version']}, and {VERSION} is known")
        return Results(document["quick"], {one["name"]: _case(one) for one in document["cases"]})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} can't be read: {type(error).__name__}: {error}; move it away to begin anew") from error


def write(directory: Path, results: Results) -> None:
    """Write them, a line for each row: an old file stays until the new one is whole."""
    cases = ",\n".join(_case_text(one) for one in results.cases.values())
    text = f'{{\n"version": {VERSION},\n"quick": {json.dumps(results.quick)},\n"cases": [\n{cases}\n]\n}}\n'
    new = directory / f"{FILE_NAME}.new"
    new.write_text(text, encoding="utf-8")
    os.replace(new, directory / FILE_NAME)


def _case_text(case: CaseResults) -> str:
    fields = {
        "name": case.name,
        "about": case.about,
        "command": case.command,
        "measured_at": case.measured_at,
        "minutes": round(case.minutes, 1),
        "commit": case.commit,
        "machine": case.machine,
        "versions": dict(case.versions),
        "steadiness": case.steadiness and _steadiness_fields(case.steadiness),
        "failure": case.failure,
        "failed_renewal": case.failed_renewal and vars(case.failed_renewal),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in fields.items()]
    rows = ",\n".join(f"  {json.dumps(_row_fields(row))}" for row in case.rows)
    return "\n".join(["{", *lines, ' "rows": [', *([rows] if rows else []), " ]", "}"])


def _row_fields(row: Result) -> dict[str, Any]:
    return {
        "operation": row.operation,
        "contender": row.contender,
        "nbytes": row.nbytes,
        "seconds": [round(one.seconds, 6) for one in row.rounds],
        "cpu_seconds": [round(one.cpu_seconds, 6) for one in row.rounds],
        "extra_nbytes": [one.extra_nbytes for one in row.rounds],
        "error": row.error,
    }


def _steadiness_fields(steadiness: Steadiness) -> dict[str, Any]:
    return {
        "rounds": steadiness.rounds,
        "loop_seconds": _figure_fields(steadiness.loop),
        "copy_seconds": _figure_fields(steadiness.copy),
    }


def _figure_fields(figure: Figure) -> dict[str, float]:
    least, most = figure.spread or (figure.value, figure.value)
    return {"least": round(least, 6), "median": round(figure.value, 6), "most": round(most, 6)}


def _case(fields: dict[str, Any]) -> CaseResults:
    steadiness, failed = fields["steadiness"], fields["failed_renewal"]
    own = {
        "steadiness": steadiness and _steadiness(steadiness),
        "failed_renewal": failed and Failure(**failed),
        "rows": tuple(_row(one) for one in fields["rows"]),
    }
    return CaseResults(**{**fields, **own})


def _steadiness(fields: dict[str, Any]) -> Steadiness:
    rounds, loop, copy = fields["rounds"], fields["loop_seconds"], fields["copy_seconds"]
    return Steadiness(rounds, *(Figure(one["median"], (one["least"], one["most"]) if rounds > 1 else None) for one in (loop, copy)))


def _row(fields: dict[str, Any]) -> Result:
    rounds = [Measurement(*one) for one in zip(fields["seconds"], fields["cpu_seconds"], fields["extra_nbytes"], strict=True)]
    if fields["error"] is not None:
        rounds[-1] = replace(rounds[-1], error=fields["error"])
    return Result(fields["operation"], fields["contender"], fields["nbytes"], rounds)
