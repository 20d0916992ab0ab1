"""What rank 0 tells of a restore: the event, and all that a run should hear before it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..warn import warn_caller
from .history import CheckpointEvent, tell
from .restoring import RestoreReport
from .run_steps import RunSteps
from .steps import names_of, step_name
from .taken_names import say_what_else_is_there, say_what_is_taken

_LOG = logging.getLogger("paddle_fsdp_ckpt")


def tell_restored(
    report: RestoreReport, steps: RunSteps, where: Path, seconds: float, on_event: Callable[[CheckpointEvent], None] | None
) -> None:
    """Tell of a step that was restored.

    Args:
        report: of the restore.
        steps: those of the run, which took note of it.
        where: the root.
        seconds: how long it took.
        on_event: the user's hook.
    """
    event = CheckpointEvent(
        "restore", report.step, seconds, seconds, steps=steps.own(), skipped=report.skipped, fell_back_from=report.fell_back_from
    )
    tell(event, where, on_event)
    for later, why in report.fell_back_from.items():
        _LOG.warning("restored step %d, since %s is damaged: %s", report.step, step_name(later), why)
    _warn_of_taken_names(where, steps, report.step)
    if text := steps.later():
        warn_caller(text)
    for text in report.lost:
        _LOG.warning("restored step %d, of which some is lost: %s", report.step, text)
    for difference in report.differences:  # load has told of its own
        _LOG.warning("restored step %d: %s", report.step, difference)
    for left in report.load.not_restored:
        _LOG.warning("restored step %d without all that was saved: %s", report.step, left)


def tell_begun_anew(steps: RunSteps, where: Path) -> None:
    """Tell of a root in which there was nothing to restore."""
    if text := say_what_else_is_there(where, steps.root):
        _LOG.warning("%s", text)
    else:
        _LOG.info("'%s' holds no steps to restore: the run begins anew", where)
    _warn_of_taken_names(where, steps, None)


def _warn_of_taken_names(where: Path, steps: RunSteps, restored: int | None) -> None:
    given_up = steps.not_removed()
    if given_up and restored is not None:
        _LOG.warning(
            "'%s' holds %s of a history that was given up, and its removal was not finished: the next save removes them. To keep one, "
            "move it elsewhere now",
            where,
            names_of(given_up),
        )
    for text in say_what_is_taken(where, steps.root, restored, steps.foreign):
        _LOG.warning("%s", text)
