"""What runs on the ranks to decide together when to save and to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from harness import this_rank
from manager_runs import build

from paddle_fsdp_ckpt import CheckpointManager


def vote_by_signal(root: str, signalled_rank: int, at_step: int, steps: int) -> tuple[list[int], int]:
    """Return the steps at which it was said to save, and the one at which the loop was told to stop."""
    due = []
    with CheckpointManager(root, save_every_steps=4, save_signals=[signal.SIGUSR2], stop_signals=[signal.SIGTERM]) as checkpoints:
        for step in range(1, steps + 1):
            if step == at_step and this_rank().rank == signalled_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 2 and this_rank().rank == 0:
                os.kill(os.getpid(), signal.SIGUSR2)
            if checkpoints.should_save(step):
                due.append(step)
            if checkpoints.should_stop:
                break
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return due, step


def vote_while_signalled(root: str, times: int) -> int:
    """Vote while this process gets signals all the time, and return how many of the votes were to save."""
    code = f"import os, signal, time\nwhile True:\n    os.kill({os.getpid()}, signal.SIGUSR2)\n    time.sleep(0.0002)"
    with CheckpointManager(root, save_signals=[signal.SIGUSR2]) as checkpoints:
        sender = subprocess.Popen([sys.executable, "-S", "-c", code])
        try:
            saves = sum(checkpoints.should_save(step) for step in range(times))
        finally:
            sender.kill()
            sender.wait()
    return saves


def vote_by_time(root: str, late: int) -> list[bool]:
    """Ask at three steps: at the second, the minutes are over by one rank's clock; before the third it is saved."""
    model, optimizer = build()
    said = []
    with CheckpointManager(root, save_every_minutes=60) as checkpoints:
        said.append(checkpoints.should_save(1))
        if this_rank().rank == late:
            checkpoints._root.schedule._clock._since -= 3600.0
        said.append(checkpoints.should_save(2))
        checkpoints.save(2, model=model, optimizer=optimizer)
        said.append(checkpoints.should_save(3))
    return said


def warned_of_no_time_to_save(root: str) -> dict[str, tuple[list[str], list[bool]]]:
    """Ask three times, of a manager that was told nothing of saving and of others; say what was warned of, and what was said."""
    told: dict[str, dict[str, Any]] = {
        "nothing": {"max_to_keep": 4},
        "steps": {"save_every_steps": 2},
        "stop": {"stop_signals": [signal.SIGTERM]},
    }
    results = {}
    for name, options in told.items():
        with CheckpointManager(root, **options) as checkpoints, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said = [checkpoints.should_save(step) for step in (1, 2, 3)]
            assert checkpoints.has_schedule == (name != "nothing")
        results[name] = [f"{Path(one.filename).name}: {one.message}" for one in caught], said
    return results


def count_votes(root: str, times: int) -> list[int]:
    with CheckpointManager(root, save_signals=[signal.SIGUSR2]) as checkpoints:
        due = []
        for step in range(times):
            if step % 3 == this_rank().rank:
                os.kill(os.getpid(), signal.SIGUSR2)
            due += [step] * checkpoints.should_save(step)
        return due
