"""What was measured, in words: ``RESULTS.md`` and a plot, of ratios within one run."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from .bench import OURS, PLAIN, Result
from .sizes import FULL, Size

_FUSED = "Paddle's fused runtime"
_HOW = """\
Contenders took turns in one run; seconds are medians of the rounds given, of the slowest rank. Saves wait for the disk (fsync). Loads read
from the page cache, but for "cold". Memory is the kernel's VmHWM, reset before each call, less VmRSS at the call: the most of all rounds
and ranks. Each process computes with one thread. A contender that needed long was asked less often."""


@dataclass(frozen=True)
class Goal:
    """A bound, and what was measured.

    Attributes:
        what: in words.
        most: at most this.
        measured: None where it was not.
        unit: of both.
    """

    what: str
    most: float
    measured: float | None
    unit: str

    def row(self) -> str:
        """Return it as a row of a table."""
        if self.measured is None:
            return f"| {self.what} | {self._show(self.most)} | not measured | |"
        return (
            f"| {self.what} | {self._show(self.most)} | {self._show(self.measured)} | {'yes' if self.measured <= self.most else '**no**'} |"
        )

    def _show(self, value: float) -> str:
        return f"{_number(value)} x" if self.unit == "x" else f"{value:.3g} {self.unit}"


def goals(results: Sequence[Result]) -> list[Goal]:
    """Return the goals, with what was measured of each."""
    found = _Found(results)
    load = "load, 2 to {} ranks"
    return [
        Goal("save 1.5 GB, fsync, digests on: ratio to a plain write", 1.2, found.ratio("big", "save, 2 ranks", PLAIN), "x"),
        Goal("load it, same layout, digests checked: ratio to a plain read", 1.5, found.ratio("big", load.format(2), PLAIN), "x"),
        *(
            Goal(f"load it, {way}, digests checked: ratio to a plain read", 2, found.ratio("big", f"load, {way}", PLAIN), "x")
            for way in ("2 to 1 ranks", "2 to 3 ranks", "1 to 2 ranks")
        ),
        Goal("load 24,000 keys, 2 to 1 ranks: ratio to the faster peer", 1 / 40, found.ratio_to_best("many", load.format(1)), "x"),
        Goal("load 24,000 keys, 2 to 3 ranks: ratio to the faster peer", 1 / 40, found.ratio_to_best("many", load.format(3)), "x"),
        Goal("load 113,000 keys, 2 to 1 ranks: ratio to the faster peer", 1 / 100, found.ratio_to_best("scale", load.format(1)), "x"),
        Goal("113,000 keys, first save: processor time of the busier rank, all of it", 2, found.cpu("scale", "first save, 2 ranks"), "s"),
        Goal("113,000 keys, each later save: the same", 0.3, found.cpu("scale", "save, 2 ranks"), "s"),
        Goal("113,000 keys: reading the index, processor time", 1, found.cpu("scale", "read the index"), "s"),
        Goal(
            "save in the background: training waits, ratio to one copy", 1.2, found.ratio("async", "later, training waits", "one copy"), "x"
        ),
        Goal("memory besides the model's, any save or load of 1.5 GB", 64, found.extra("big"), "MiB"),
        Goal("the same of 113,000 keys", 64, found.extra("scale"), "MiB"),
        Goal("a training step: ratio to Paddle's own fused runtime", 1.2, found.ratio("step", "step, 2 ranks", _FUSED), "x"),
    ]


class _Found:
    def __init__(self, results: Iterable[Result]) -> None:
        self._by_name: dict[tuple[str, str], dict[str, Result]] = {}
        for one in results:
            self._by_name.setdefault((one.case, one.operation), {})[one.contender] = one

    def ratio(self, case: str, operation: str, baseline: str) -> float | None:
        there = self._by_name.get((case, operation), {})
        if OURS not in there or baseline not in there:
            return None
        return there[OURS].seconds / there[baseline].seconds

    def ratio_to_best(self, case: str, operation: str) -> float | None:
        there = self._by_name.get((case, operation), {})
        peers = [one.seconds for name, one in there.items() if not name.startswith((OURS, PLAIN)) and one.error is None]
        return there[OURS].seconds / min(peers) if peers and OURS in there else None

    def extra(self, case: str) -> float | None:
        there = [
            one for (name, _), rows in self._by_name.items() if name == case for one in rows.values() if one.contender.startswith(OURS)
        ]
        return max(one.extra_nbytes for one in there) / (1 << 20) if there else None

    def cpu(self, case: str, operation: str) -> float | None:
        there = self._by_name.get((case, operation), {})
        return there[OURS].cpu_seconds if OURS in there else None


def write(
    directory: Path, results: Sequence[Result], versions: Mapping[str, str], sizes: Mapping[str, Size], command: str, minutes: float
) -> None:
    """Write ``RESULTS.md`` and, where matplotlib is there, ``results.svg`` into a directory."""
    with_plot = _plot(directory / "results.svg", results)
    lines = [
        "# Results",
        "",
        f"Made by `{command}` in {minutes:.0f} minutes, {datetime.now(timezone.utc):%Y-%m-%d}.",
        f"{_machine()}. {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        _HOW,
        "",
    ]
    if sizes is FULL:
        lines += ["## Goals", "", "| what | at most | measured | met |", "|---|---|---|---|", *(one.row() for one in goals(results)), ""]
    else:
        lines += ["**Small sizes, to try the command: the figures mean nothing.**", ""]
    if with_plot:
        lines += ["![seconds by operation and contender](results.svg)", ""]
    for case in dict.fromkeys(one.case for one in results):
        lines += [f"## {case}", ""]
        if case in sizes:
            lines += [f"{sizes[case].parameters:,} parameters of {list(sizes[case].shape)}: {sizes[case].keys:,} keys.", ""]
        lines += ["| operation | contender | seconds | ratio | processor s | memory MiB | rounds |", "|---|---|---|---|---|---|---|"]
        for operation in dict.fromkeys(one.operation for one in results if one.case == case):
            rows = [one for one in results if (one.case, one.operation) == (case, operation)]
            lines += [_row(one, rows[0]) for one in rows]
        lines.append("")
    notes = Path(__file__).parent / "notes.md"
    if notes.exists():
        lines += [notes.read_text(encoding="utf-8").strip(), ""]
    (directory / "RESULTS.md").write_text("\n".join(lines), encoding="utf-8")


def _row(one: Result, first: Result) -> str:
    if one.error is not None:
        return f"| {one.operation} | {one.contender} | {one.error.replace('|', '/')} | | | | {len(one.rounds)} |"
    ratio = "1" if one is first else _number(one.seconds / first.seconds)
    return (
        f"| {one.operation} | {one.contender} | {one.seconds:.3f} | {ratio} | {one.cpu_seconds:.2f} | {one.extra_nbytes / (1 << 20):.0f} | "
        f"{len(one.rounds)} |"
    )


def _number(value: float) -> str:
    return f"1/{1 / value:.0f}" if 0 < value < 0.1 else f"{value:.3g}"


def _machine() -> str:
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    system = f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores of {model}, {memory / (1 << 20):.0f} GiB, {system}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _plot(path: Path, results: Sequence[Result]) -> bool:
    """Draw seconds by operation and contender; tell whether there was something to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    good = [one for one in results if one.error is None]
    operations = list(dict.fromkeys((one.case, one.operation) for one in good))
    contenders = list(dict.fromkeys(one.contender for one in good))
    figure, axes = pyplot.subplots(figsize=(10, 0.7 + 0.5 * len(operations)), layout="constrained")
    height = 0.8 / max(1, len(contenders))
    for number, contender in enumerate(contenders):
        own = [one for one in good if one.contender == contender]
        places = [operations.index((one.case, one.operation)) + number * height for one in own]
        axes.barh(places, [one.seconds for one in own], height, label=contender)
    axes.set_yticks(
        [place + 0.4 for place in range(len(operations))], [f"{case}: {operation}" for case, operation in operations], fontsize=8
    )
    axes.set_xscale("log")
    axes.set_xlabel("seconds (logarithmic)")
    axes.invert_yaxis()
    axes.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    return True
