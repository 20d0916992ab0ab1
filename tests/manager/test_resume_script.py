"""README's resuming script, killed and restarted at random moments on 2, then 3, then 1 ranks, has the losses of a run without a break."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from harness import script_environment
from harness.pool import _environments

README = Path(__file__).resolve().parents[2] / "README.md"
STEPS = 200
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def script() -> str:
    marked = re.search(r"<!-- tests/manager runs this -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert marked is not None
    return marked[1]


@contextmanager
def started(script: str, directory: Path, world_size: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks of the script; they write what they print into ``{rank}.log`` and their errors beside, and end with the block."""
    directory.mkdir(exist_ok=True)
    processes = []
    environments = [{}] if world_size == 1 else _environments(world_size)
    clean = {key: value for key, value in script_environment().items() if not key.startswith("PADDLE_")}
    for rank, environment in enumerate(environments):
        with open(directory / f"{rank}.log", "ab") as log, open(directory / f"{rank}.errors", "ab") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", script],
                    cwd=directory,
                    env=environment | clean,
                    stdout=log,
                    stderr=errors,
                )
            )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def losses(directory: Path) -> dict[int, float]:
    """What rank 0 printed; of a step that was taken again, the last."""
    found = re.findall(r"^step (\d+) loss (\S+)$", (directory / "0.log").read_text(), re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def wait_for_step(directory: Path, step: int, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while max(losses(directory), default=0) < step:
        ended = [process.poll() for process in processes]
        assert ended == [None] * len(processes), f"{ended}: {(directory / '0.errors').read_text()}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_and_restarted(script: str, tmp_path: Path) -> None:
    with started(script, tmp_path / "whole", 1) as processes:
        assert processes[0].wait(PATIENCE_SECONDS) == 0
    right = losses(tmp_path / "whole")
    assert sorted(right) == list(range(1, STEPS + 1))
    directory = tmp_path / "cut"
    moments = random.Random(os.getpid())
    for world_size, number in [(2, signal.SIGKILL), (3, signal.SIGTERM), (3, signal.SIGKILL)]:
        reached = max(losses(directory), default=0) if directory.exists() else 0
        with started(script, directory, world_size) as processes:
            wait_for_step(directory, reached + moments.randrange(1, 35), processes)
            if number == signal.SIGTERM:  # on one rank: all save the same step and end
                processes[moments.randrange(world_size)].send_signal(number)
                assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0] * world_size
            for process in moments.sample(processes, world_size):
                process.kill()
    with started(script, directory, 1) as processes:
        assert processes[0].wait(PATIENCE_SECONDS) == 0, (directory / "0.errors").read_text()
    taken = losses(directory)
    assert sorted(taken) == list(range(1, STEPS + 1))
    np.testing.assert_allclose([taken[step] for step in right], list(right.values()), rtol=1e-4)
