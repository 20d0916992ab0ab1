"""What a manager tells of its saves and restores, on the ranks."""

from __future__ import annotations

import logging
import runpy
import sys
from typing import Any

import stand_in_visualdl
from harness import logged
from manager_runs import build
from paddle.distributed.launch.context.args_envs import parse_args

from paddle_fsdp_ckpt import CheckpointManager


def events_of(root: str) -> tuple[list[str], list[str]]:
    """The hook's events of two saves and a restore, and what was logged; the second call of the hook fails, which stops nothing."""
    model, optimizer = build()
    seen = []

    def hook(event: Any) -> None:
        seen.append(f"{event.kind} {event.step}")
        if len(seen) == 2:
            raise ValueError("no such board")

    with logged(logging.INFO) as lines, CheckpointManager(root, on_event=hook, max_to_keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, model=model, optimizer=optimizer, metrics={"loss": 0.5})
        checkpoints.restore(model=model, optimizer=optimizer)
    return seen, lines


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
