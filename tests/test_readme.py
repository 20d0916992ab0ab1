"""The README's training loop runs as it stands, started as the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from harness import script_environment

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_training_loop_runs(tmp_path: Path) -> None:
    marked = re.search(r"<!-- tests/test_readme.py runs this -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert marked is not None
    (tmp_path / "train.py").write_text(marked[1])
    command = re.search(r"`python (-m paddle.distributed.launch [^`]*)`", README.read_text())
    assert command is not None
    run = subprocess.run(
        [sys.executable, *command[1].split()],
        cwd=tmp_path,
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    logs = "\n".join(path.read_text() for path in sorted((tmp_path / "log").glob("workerlog.*")))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    assert logs.count("10 {'epoch': 1}") == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "step_10").iterdir()) == [
        "0.metadata",
        "0_0.safetensors",
        "1_0.safetensors",
        "manifest.json",
    ]
