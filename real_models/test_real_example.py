"""The README's commands train, resume and convert a real Qwen3-MoE, and transformers reads it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch_cases
from harness import RankPool
from shared_settings import VOCABULARY

PROJECT = Path(__file__).resolve().parent.parent


def test_the_commands_run(torch_process: RankPool, tmp_path: Path) -> None:
    text = (PROJECT / "README.md").read_text()
    marked = re.search(r"<!-- real_models/test_real_example.py runs this -->\n```bash\n(.*?)```", text, re.DOTALL)
    assert marked is not None
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT), "PATH": path}
    output = ""
    for command in marked[1].splitlines():
        run = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
        log = tmp_path / "log" / "workerlog.0"
        text = run.stdout + run.stderr + (log.read_text() if log.exists() else "")
        assert run.returncode == 0, text
        output += text
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)}
    assert sorted(losses) == list(range(1, 17))
    assert losses[16] < losses[12] < losses[1] - 1
    assert "restored step 12" in output
    tokens = np.random.RandomState(8).randint(0, VOCABULARY, [2, 24])
    ((info, logits),) = torch_process.run(torch_cases.read, "qwen3_moe", str(tmp_path / "my-model"), tokens)
    assert not any(info.values()), info
    assert np.isfinite(logits).all()
