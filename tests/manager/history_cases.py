"""What a manager tells of its saves and restores, on the ranks."""

from __future__ import annotations

import logging
import runpy
import sys
from typing import Any

import stand_in_visualdl
from manager_runs import build
from paddle.distributed.launch.context.args_envs import parse_args

from paddle_fsdp_ckpt import CheckpointManager


def events_of(root: str) -> tuple[list[str], list[str]]:
    """The hook's events of two saves and a restore, and what was logged; the second call of the hook fails, which stops nothing."""
    model, optimizer = build()
    seen = []
    logged = Lines()
    log = logging.getLogger("paddle_fsdp_ckpt")

    def hook(event: Any) -> None:
        seen.append(f"{event.kind} {event.step}")
        if len(seen) == 2:
            raise ValueError("no such board")

    level = log.level
    log.addHandler(logged)
    log.setLevel(logging.INFO)
    try:
        with CheckpointManager(root, on_event=hook, max_to_keep=1) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, model=model, optimizer=optimizer, metrics={"loss": 0.5})
            checkpoints.restore(model=model, optimizer=optimizer)
    finally:
        log.removeHandler(logged)
        log.setLevel(level)
    return seen, logged.lines


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_example(script: str, root: str, log: str) -> None:
    """Run the example twice, the second time from where the first ended."""
    kept = sys.argv
    sys.modules["visualdl"] = stand_in_visualdl
    try:
        for steps in ("20", "30"):
            command = [script, "--root", root, "--board", log, "--steps", steps]
            sys.argv = ["launch", *command]
            launched, _ = parse_args()  # which takes an option for its own where that begins alike
            assert [launched.training_script, *launched.training_script_args] == command
            sys.argv = command
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = kept
        sys.modules.pop("visualdl")
