"""What lies under the name of a step and is none: a step that was damaged so, or something of the user's in the way of a save."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import counted, listing
from ..storage.format import MANIFEST_NAME, PADDLE_METADATA_NAME
from ..storage.system_errors import is_there
from .history import steps_in_history
from .steps import Root, hide_step, is_own_directory, may_be_there, parse_step, step_name, why_no_step

_LOG = logging.getLogger("paddle_fsdp_ckpt")


def lost_steps(where: Path, root: Root) -> list[int]:
    """Return the steps of a root that its history says were saved, and of which no checkpoint is left, in ascending order."""
    taken = [step for step in root.taken if not (where / step_name(step)).is_symlink()]
    return sorted(steps_in_history(where).intersection(taken)) if taken else []


def say_what_is_taken(where: Path, root: Root, restored: int | None, foreign: Collection[int]) -> Iterator[str]:
    """Yield what a run must be told, before it trains, of names that its saves will come to.

    Args:
        where: the root.
        root: what it holds.
        restored: the step that the run goes on from; None where it begins anew.
        foreign: the steps that go once the run has saved one.
    """
    for step in root.taken:
        if (restored is None or step > restored) and step not in foreign:
            name = step_name(step)
            later = "" if restored is None else f", later than the restored {step_name(restored)},"
            yield (
                f"'{where}' has a {name}{later} that was skipped: {root.skipped[name]}. If it is to be a step, end this run, and make it "
                f"whole; else move it away: mv '{where / name}' ELSEWHERE. A save of step {step} renames it, and removes nothing of it"
            )


def say_what_else_is_there(where: Path, root: Root) -> str | None:
    """Return what a run that finds no step must be told of the checkpoints, as far as their names say, that lie where it looked."""
    visible = [name for name in root.skipped if not name.startswith(".") and parse_step(name) is None]
    others = [name for name in visible if any(may_be_there(where / name / file) for file in (MANIFEST_NAME, PADDLE_METADATA_NAME))]
    if not others:
        return None
    return (
        f"'{where}' holds no steps to restore, and the run begins anew; it holds {counted(len(others), 'checkpoint')} that no "
        f"CheckpointManager made: {listing(others)}. To go on from one, load('{where / others[-1]}', model=..., optimizer=...) first"
    )


def make_way(where: Path, step: int, *, may_go: bool) -> None:
    """Let the name of a step be free for its save, unless a checkpoint has it. On rank 0, with the lock of the root held.

    Args:
        where: the root.
        step: the number.
        may_go: whether what is there is a damaged step, to be removed once the new one is there; else it gets another name.

    Raises:
        OSError: the system refused.
    """
    path = where / step_name(step)
    with suppress(OSError):
        path.rmdir()  # an empty directory
    reason = why_no_step(path)
    if reason is None or not is_there(path):
        return
    if may_go and is_own_directory(path):
        hide_step(where, step)
        return
    aside = where / f"{path.name}.aside-{secrets.token_hex(4)}"
    os.rename(path, aside)
    _LOG.warning("'%s' was in the way of the save of step %d, and was renamed to '%s': %s", path, step, aside.name, reason)
