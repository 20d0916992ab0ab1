"""Run the benchmarks and write ``RESULTS.md`` and a plot: ``python -m benchmarks``, from the root of the project."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from . import report, results
from .bench import Bench
from .cases import Case, cases
from .results import CaseResults, Results
from .setting import commit, machine, versions


def main() -> None:
    """Parse the command line, run, write."""
    options = _parser().parse_args()
    known = cases(options.quick)
    unknown = set(options.cases) - known.keys()
    if unknown:
        _parser().error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    output: Path = options.output or Path(__file__).parent / ("quick" if options.quick else ".")
    try:
        all_results = _results_in(output, options.quick)
    except ValueError as error:
        _parser().error(str(error))
    if options.report_only:
        if not all_results.cases:
            _parser().error(f"{output} has no {results.FILE_NAME} to write a report from")
        report.write(output, all_results)
        return
    output.mkdir(exist_ok=True)
    with_torch = not options.without_torch and importlib.util.find_spec("torch") is not None
    if not with_torch:
        print("PyTorch is not installed, or was left out: no comparison with FSDP2 and DCP")
    failed = []
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="benchmarks-") as directory:
        for name in dict.fromkeys(options.cases or known):
            bench = Bench(name, Path(directory), 1 if options.quick else options.repeats, options.patience, with_torch)
            new = measured(name, known[name], bench, _command(options))
            if new.failure is not None:
                failed.append(name)
            # After each case, so that it is there if the next one is interrupted.
            all_results = all_results.renewed(new).in_order(known)
            results.write(output, all_results)
            all_results = _results_in(output, options.quick)
            report.write(output, all_results)
    print(f"{output / 'RESULTS.md'} is written")
    if failed:
        sys.exit(1)


def measured(name: str, case: Case, bench: Bench, command: str) -> CaseResults:
    """Run a case, and return what was measured, up to where it failed if it did; what it wrote is removed."""
    at, on_commit, start = datetime.now(timezone.utc), commit(), time.monotonic()
    failure = None
    try:
        case.run(bench)
    except (RuntimeError, OSError) as error:
        print(f"{name} did not come to its end: {error}", file=sys.stderr)
        failure = " ".join(_ends(f"{type(error).__name__}: {error}".splitlines()))
    bench.clear()
    return CaseResults(
        name=name,
        about=case.about,
        command=command,
        measured_at=at.isoformat(timespec="seconds"),
        minutes=(time.monotonic() - start) / 60,
        commit=on_commit,
        machine=machine(),
        versions=versions(bench.with_torch),
        steadiness=bench.same_work.steadiness,
        failure=failure,
        failed_renewal=None,
        rows=tuple(bench.results),
    )


def _ends(lines: list[str]) -> list[str]:
    """Return the first line and the last, without the traceback between them."""
    return [lines[0], *lines[1:][-1:]]


def _results_in(directory: Path, quick: bool) -> Results:
    """Return what there is already.

    Raises:
        ValueError: it was measured with sizes of the other kind, or can't be read.
    """
    there = results.read(directory) or Results(quick, {})
    if there.quick != quick:
        kinds = ("small sizes (--quick)", "full sizes") if there.quick else ("full sizes", "small sizes (--quick)")
        raise ValueError(f"{directory} has results of {kinds[0]}, with which those of {kinds[1]} are not mixed: give another --output")
    return there


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"what to measure, or to renew, of {', '.join(cases(quick=False))}; by default all")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: to try the command")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=30, help="seconds after which a contender is not asked again (default: %(default)s)"
    )
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out, though it is there")
    parser.add_argument("--report-only", action="store_true", help="measure nothing: write RESULTS.md and the plot from results.json")
    parser.add_argument("--directory", type=Path, help="where to write checkpoints; by default a temporary directory")
    parser.add_argument("--output", type=Path, help="where results are, and go (default: beside this; with --quick in quick, beside this)")
    return parser


def _command(options: argparse.Namespace) -> str:
    """Return the command, with the options that change what is measured and were given."""
    parser = _parser()
    names = ("quick", "repeats", "patience", "without_torch")
    given = {name: getattr(options, name) for name in names if getattr(options, name) != parser.get_default(name)}
    said = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value:g}") for name, value in given.items()]
    return " ".join(["python -m benchmarks", *options.cases, *said])


if __name__ == "__main__":
    main()
