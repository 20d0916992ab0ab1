"""The command that runs the benchmarks, on small sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "async", "--quick", "--without-torch", "--directory", str(tmp_path), "--output"]
    run = subprocess.run([*command, str(tmp_path / "out")], cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "PyTorch" in run.stdout
    text = (tmp_path / "out" / "RESULTS.md").read_text()
    assert "Made by `python -m benchmarks async --quick --without-torch`" in text
    for contender in ("one copy", "this package"):
        assert f"| later, training waits | {contender} | 0." in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
