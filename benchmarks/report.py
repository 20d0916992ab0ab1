"""What was measured, in words: ``RESULTS.md``, of ratios within one run of a case."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from .goals import goals, number
from .plot import plot
from .results import CaseResults, Failure, Figure, Result, Results, Steadiness
from .steadiness import COPY_NBYTES

_HOW = """\
Contenders took turns: in each round each did the work once, one behind the other. All ranks of a job begin it together, and it lasts until
the last has ended. Seconds are the median of the rounds; beside it stand the least and the most. **A ratio** is a contender's seconds
through those of the first contender in the same round, the median over the rounds: what slows the machine down for a while slows both.
Where one was asked in fewer rounds than the other, since it had needed long, it is the ratio of their medians. The goals' ratios are taken
in the same way, to the contender that they name.

Saves wait for the disk (fsync). Loads read from the page cache, but for "cold". Memory is the kernel's VmHWM, reset before each call, less
VmRSS at the call: the most of all rounds and ranks. Each process computes with one thread. Each case was measured by one command from its
beginning to its end; cases can be of different days and of different commits of the project, where "+" says that its code had changes that
were not committed."""


def write(directory: Path, results: Results) -> None:
    """Write ``RESULTS.md`` and, where matplotlib is there, ``results.svg`` into a directory."""
    with_plot = plot(directory / "results.svg", results)
    (directory / "RESULTS.md").write_text(text(results, with_plot), encoding="utf-8")


def text(results: Results, with_plot: bool) -> str:
    """Return ``RESULTS.md``."""
    cases = list(results.cases.values())
    settings = {_setting(case) for case in cases}
    minutes = sum(case.minutes for case in cases)
    lines = ["# Results", "", f"Written by `python -m benchmarks`; measured in {minutes:.0f} minutes."]
    lines += [*settings, ""] if len(settings) == 1 else ["Machines or versions were not the same for all cases: each says its own.", ""]
    lines += [_HOW, ""]
    if results.quick:
        lines += ["**Small sizes, to try the command: the figures mean nothing.**", ""]
    else:
        lines += ["## Goals", "", *_table(["what", "at most", "measured", "least to most of the rounds", "met"])]
        lines += [*(one.row() for one in goals(results.cases)), ""]
    if with_plot:
        lines += ["![seconds by operation and contender](results.svg)", ""]
    for case in cases:
        lines += _case(case, with_setting=len(settings) > 1)
    notes = Path(__file__).parent / "notes.md"
    if notes.exists() and not results.quick:
        lines += [notes.read_text(encoding="utf-8").strip(), ""]
    return "\n".join(lines)


def _case(case: CaseResults, with_setting: bool) -> list[str]:
    lines = [f"## {case.name}", ""]
    lines += [f"{case.about}.", ""]
    lines.append(f"Measured {_when(case)} in {case.minutes:.1f} minutes by `{case.command}`.")
    if with_setting:
        lines.append(_setting(case))
    if case.steadiness is not None:
        lines.append(_steadiness(case.steadiness))
    lines.append("")
    if case.failure is not None:
        lines += [f"**It did not come to its end; what was measured before that is here**: {case.failure}", ""]
    if case.failed_renewal is not None:
        when = _when(case.failed_renewal)
        lines += [f"**Measured again {when}, it did not come to its end; nothing of that is here**: {case.failed_renewal.error}", ""]
    lines += _table(["operation", "contender", "seconds", "least to most", "ratio", "processor s", "memory MiB", "rounds"])
    for operation in dict.fromkeys(row.operation for row in case.rows):
        rows = [row for row in case.rows if row.operation == operation]
        lines += [_row(row, rows[0]) for row in rows]
    return [*lines, ""]


def _row(row: Result, first: Result) -> str:
    if row.error is not None:
        cells = [row.error.replace("|", "/"), "", "", "", ""]
    else:
        cells = [
            f"{row.seconds.value:.3f}",
            " to ".join(f"{one:.3f}" for one in row.seconds.spread or ()),
            "" if first.error is not None else "1" if row is first else number(row.ratio(first).value),
            f"{row.cpu_seconds.value:.2f}",
            f"{row.extra_nbytes / (1 << 20):.0f}",
        ]
    return f"| {' | '.join([row.operation, row.contender, *cells, str(len(row.rounds))])} |"


def _table(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _setting(case: CaseResults) -> str:
    versions = [f"{name} {version}" for name, version in case.versions.items()]
    return f"{case.machine}. {', '.join(versions + ([] if 'torch' in case.versions else ['without PyTorch']))}."


def _when(measured: CaseResults | Failure) -> str:
    commit = "" if measured.commit is None else f" on commit {measured.commit}"
    return f"{datetime.fromisoformat(measured.measured_at):%Y-%m-%d %H:%M} UTC{commit}"


def _steadiness(steadiness: Steadiness) -> str:
    took = f"a loop of Python took {_times(steadiness.loop)}, and a copy of {COPY_NBYTES // 1_000_000} MB {_times(steadiness.copy)}"
    return f"How steady the machine was, by the same work before each of the rounds ({steadiness.rounds}): {took}."


def _times(figure: Figure) -> str:
    value = f"{1000 * figure.value:.1f} ms"
    if figure.spread is None:
        return value
    least, most = (one / figure.value for one in figure.spread)
    return f"{least:.2f} to {most:.2f} times its median of {value}"
