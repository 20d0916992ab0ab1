"""The README's training loop runs as it stands, started as the README says."""

from __future__ import annotations

import re
from pathlib import Path

from harness import run_script

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_training_loop_runs(tmp_path: Path) -> None:
    marked = re.search(r"<!-- tests/test_readme.py runs this -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert marked is not None
    (tmp_path / "train.py").write_text(marked[1])
    command = re.search(r"`python (-m paddle.distributed.launch [^`]*)`", README.read_text())
    assert command is not None
    logs = run_script(tmp_path, command[1].split())
    assert logs.count("10 {'epoch': 1}") == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "step_10").iterdir()) == [
        "0.metadata",
        "0_0.safetensors",
        "1_0.safetensors",
        "manifest.json",
    ]
