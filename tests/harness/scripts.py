"""How tests start scripts of their own, outside the pool of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script_environment() -> dict[str, str]:
    """The environment of a script whose exit status counts.

    Paddle 3.3.1's store, in rank 0's process, aborts now and then while that process ends, where another rank leaves just then: seen in
    ``LibUVClient::readCallback``, in about one of twenty runs that had done all their work. Its other implementation has no such code.
    """
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FLAGS_tcp_store_using_libuv": "0"}


def run_script(directory: Path, command: Sequence[str]) -> str:
    """Run a script under Paddle's launcher, in its directory, and return what its ranks printed, one behind the other.

    Args:
        directory: where it lies; the launcher makes ``log`` there.
        command: what ``python`` is given, from ``-m`` on.
    """
    run = subprocess.run(
        [sys.executable, *command], cwd=directory, env=script_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    logs = "\n".join(path.read_text() for path in sorted((directory / "log").glob("workerlog.*")))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    return logs


def on_two_ranks(script: str) -> list[str]:
    """Return the command of :func:`run_script` that starts a script on 2 ranks."""
    return ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", script]
