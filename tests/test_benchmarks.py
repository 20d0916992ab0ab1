"""The command that runs the benchmarks, on small sizes, and the report that it writes, on figures that are made up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import goals, report, results, setting
from benchmarks.bench import Bench
from benchmarks.cases import Case
from benchmarks.measure import Measurement
from benchmarks.results import CaseResults, Figure, Result, Results, Steadiness

PROJECT = Path(__file__).resolve().parent.parent


def test_the_command_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, options = tmp_path / "out", ["--quick", "--without-torch", "--directory", str(tmp_path), "--output"]
    arguments = [sys.executable, "-m", "benchmarks", "async", *options, str(out)]
    run = subprocess.run(arguments, cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "PyTorch" in run.stdout
    text = (out / "RESULTS.md").read_text()
    assert "by `python -m benchmarks async --quick --without-torch`" in text
    assert "without PyTorch" in text
    assert "How steady the machine was" in text
    for contender in ("one copy", "this package"):
        assert f"| later, training waits | {contender} | 0." in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    # The report can be made again from what is kept, without a measurement.
    (out / "RESULTS.md").unlink()
    _main(monkeypatch, "--report-only", *options, str(out))
    assert (out / "RESULTS.md").read_text() == text


def test_single_cases_are_renewed_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1, 100))

    def run(bench: Bench) -> None:
        bench.compare("wait", 0, {"plain": lambda: [Measurement(next(seconds), 0, 0)]})

    monkeypatch.setattr(command, "cases", lambda quick: dict.fromkeys(("first", "second"), Case("a model", run)))
    everywhere = ["--without-torch", "--repeats", "1", "--directory", str(tmp_path), "--output", str(tmp_path / "out")]
    for case, expected in (("second", {"second": 1}), ("first", {"first": 2, "second": 1}), ("second", {"first": 2, "second": 3})):
        _main(monkeypatch, case, *everywhere)
        there = results.read(tmp_path / "out")
        assert there is not None
        assert {name: one.rows[0].seconds.value for name, one in there.cases.items()} == expected
        assert {name: one.command for name, one in there.cases.items()} == {
            name: f"python -m benchmarks {name} --repeats 1 --without-torch" for name in expected
        }
        assert list(there.cases) == list(expected)
        assert (tmp_path / "out" / "RESULTS.md").read_text() == report.text(there, (tmp_path / "out" / "results.svg").exists())


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    command.main()


@pytest.mark.parametrize("quick", [False, True])
def test_small_sizes_and_full_ones_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: bool
) -> None:
    results.write(tmp_path, Results(quick, cases={"big": _case("big")}))
    before = (tmp_path / "results.json").read_text()
    with pytest.raises(SystemExit):
        _main(monkeypatch, "gather", *([] if quick else ["--quick"]), "--output", str(tmp_path))
    assert "not mixed" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"results.json": before}


def test_a_case_that_fails_halfway_tells_so_and_replaces_none_that_is_whole(tmp_path: Path) -> None:
    def run(bench: Bench) -> None:
        bench.compare("save, 2 ranks", 8, {"plain": lambda: [Measurement(1, 1, 1), Measurement(3, 1, 1)]})
        bench.compare("load, 2 to 2 ranks", 8, {"plain": lambda: _lose_a_rank()})

    def _lose_a_rank() -> list[Measurement]:
        raise RuntimeError("rank 0 failed:\nTraceback\n  here and there\nValueError: lost")

    broken = command.measured("big", Case("a model", run), Bench("big", tmp_path, 3, 30, with_torch=False), "python -m benchmarks big")
    assert broken.failure == "RuntimeError: rank 0 failed: ValueError: lost"
    assert [(row.operation, row.seconds) for row in broken.rows] == [("save, 2 ranks", Figure(3, (3, 3)))]
    assert broken.steadiness is not None
    assert broken.steadiness.rounds == 4  # three of the first operation, one of that which failed

    alone = Results(quick=False, cases={}).renewed(broken)
    assert "It did not come to its end; what was measured before that is here**: RuntimeError: rank 0" in report.text(alone, False)

    good = _case("big")
    kept = Results(quick=False, cases={"big": good}).renewed(broken)
    assert kept.cases["big"].rows == good.rows
    text = report.text(kept, False)
    assert "it did not come to its end; nothing of that is here**: RuntimeError: rank 0 failed: ValueError: lost" in text
    assert "did not come to its end" not in report.text(kept.renewed(good), False)
    assert alone.renewed(broken).cases["big"] == broken


def test_what_is_kept_is_read_as_it_was_written_a_line_a_row(tmp_path: Path) -> None:
    failed = Result("load, 2 to 1 ranks", "peer", 3, [Measurement(1.5, 1.25, 7), Measurement(0.5, 0.25, 0, "OSError: no")])
    broken = replace(_case("many", {"plain": [1.0], "peer": [2.0]}), failure="RuntimeError: x", rows=(failed,), commit=None)
    again = results.Failure("2026-11-30T10:00:00+00:00", "abc+", "OSError: full")
    all_results = Results(quick=False, cases={"big": replace(_case("big"), failed_renewal=again), "many": broken})
    results.write(tmp_path, all_results)
    assert results.read(tmp_path) == all_results
    lines = (tmp_path / "results.json").read_text().splitlines()
    rows = [line for line in lines if '"operation"' in line]
    assert [line.count('"operation"') for line in rows] == [1] * 4
    assert '"seconds": [1.5, 0.5]' in rows[-1]
    results.write(tmp_path, Results(quick=False, cases={"many": replace(broken, rows=(), steadiness=None)}))
    assert results.read(tmp_path) == Results(quick=False, cases={"many": replace(broken, rows=(), steadiness=None)})

    (tmp_path / "results.json").write_text('{"version": 2}')
    with pytest.raises(ValueError, match="version 2, and 1 is known"):
        results.read(tmp_path)


def test_ratios_compare_rounds_one_by_one_where_there_are_as_many() -> None:
    # The machine was three times slower in the second round, and in the last the peer was not asked any more.
    case = _case("step", {"Paddle's fused runtime": [2, 6, 2], "this package": [1, 6, 1.5], "peer": [10, 40]})
    fused, ours, peer = case.rows
    assert ours.ratio(fused) == Figure(0.75, (0.5, 1.0))
    assert peer.ratio(fused) == Figure(12.5)
    assert ours.ratio(peer) == Figure(1.5 / 25)
    cases = {"step": case, "scale-load": replace(case, rows=tuple(replace(row, operation="load, 2 to 1 ranks") for row in (ours, peer)))}
    text = report.text(Results(quick=False, cases=cases), with_plot=True)
    assert "| step, 2 ranks | Paddle's fused runtime | 2.000 | 2.000 to 6.000 | 1 | 1.00 | 2 | 3 |" in text
    assert "| step, 2 ranks | this package | 1.500 | 1.000 to 6.000 | 0.75 | 1.00 | 2 | 3 |" in text
    assert "| step, 2 ranks | peer | 25.000 | 10.000 to 40.000 | 12.5 | 1.00 | 2 | 2 |" in text
    assert "| a training step: ratio to Paddle's own fused runtime | 1.2 x | 0.75 x | 0.5 x to 1 x | yes |" in text
    assert "| load 113,000 keys, 2 to 1 ranks: ratio to the faster peer | 1/100 x | 1/17 x |  | **no** |" in text
    assert "| the same of 113,000 keys | 64 MiB | not measured | | |" in text
    assert "results.svg" in text


def test_who_raised_is_in_no_goal() -> None:
    raised = Result("load, 2 to 1 ranks", "peer", 0, [Measurement(0.001, 0, 0, "NotImplementedError: a|b")])
    case = _case("many", {"this package": [1, 1], "slow peer": [100, 100]}, operation="load, 2 to 1 ranks")
    with_raised = replace(case, rows=(*case.rows, raised))
    measured = [goal.measured for goal in goals.goals({"many": with_raised}) if goal.measured is not None]
    assert measured == [Figure(0.01, (0.01, 0.01))]
    assert "| peer | NotImplementedError: a/b | | | | | 1 |" in report.text(Results(False, {"many": with_raised}), False).replace(
        "|  ", "| "
    )
    ours_raised = replace(raised, contender="this package")
    assert all(goal.measured is None for goal in goals.goals({"many": replace(case, rows=(ours_raised, *case.rows[1:]))}))


def test_machine_and_versions_are_said_once_where_they_are_alike_and_else_by_each_case() -> None:
    here = "2 cores of something, 24 GiB. paddlepaddle 3.3.1, torch 2.13."
    cases = {name: _case(name) for name in ("big", "many")}
    text = report.text(Results(False, cases), False)
    assert text.count(here) == 1
    assert text.index(here) < text.index("## Goals")
    assert "measured in 24 minutes" in text
    assert text.count("Measured 2026-11-30 14:53 UTC on commit 1e7ae71 in 12.0 minutes by `python -m benchmarks`.") == 2
    assert (
        text.count(
            "a loop of Python took 1.00 to 1.13 times its median of 20.0 ms, and a copy of 64 MB 0.90 to 2.50 times its median of 10.0 ms."
        )
        == 2
    )

    cases["many"] = replace(cases["many"], versions={"paddlepaddle": "3.3.2"})
    text = report.text(Results(False, cases), False)
    big, many = text.index("## big"), text.index("## many")
    assert "Machines or versions were not the same" in text[:big]
    assert here not in text[:big]
    assert here in text[big:many]
    assert "2 cores of something, 24 GiB. paddlepaddle 3.3.2, without PyTorch." in text[many:]


def test_the_commit_is_that_of_the_project_and_tells_of_changes_to_its_code(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", "-C", str(project), *identity, *arguments], check=True, capture_output=True)

    project = tmp_path / "project"
    for name in ("benchmarks/__main__.py", "benchmarks/results.json", "paddle_fsdp_ckpt/save.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    assert setting.commit(project) is None
    git("init")
    assert setting.commit(project) is None
    git("add", ".")
    git("commit", "-m", "all")
    on = setting.commit(project)
    assert on is not None
    assert len(on) == 10
    (project / "benchmarks" / "results.json").write_text("{}")
    assert setting.commit(project) == on
    (project / "paddle_fsdp_ckpt" / "new.py").write_text("")
    assert setting.commit(project) == f"{on}+"


def _case(name: str, seconds: Mapping[str, list[float]] | None = None, operation: str = "step, 2 ranks") -> CaseResults:
    rows = [
        Result(operation, contender, 0, [Measurement(one, 1.0, 2 << 20) for one in rounds])
        for contender, rounds in (seconds or {"plain": [1.0, 2.0, 3.0], "this package": [2.0, 2.0, 2.0], "peer": [9.0]}).items()
    ]
    return CaseResults(
        name=name,
        about="a model",
        command="python -m benchmarks",
        measured_at="2026-11-30T14:53:08+00:00",
        minutes=12.0,
        commit="1e7ae71",
        machine="2 cores of something, 24 GiB",
        versions={"paddlepaddle": "3.3.1", "torch": "2.13"},
        steadiness=Steadiness(11, Figure(0.02, (0.02, 0.0226)), Figure(0.01, (0.009, 0.025))),
        failure=None,
        failed_renewal=None,
        rows=tuple(rows),
    )
