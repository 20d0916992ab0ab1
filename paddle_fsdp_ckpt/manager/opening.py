"""How all ranks open a root together: what a manager was told, what the root holds, and who may write to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..meeting import absolute_path, check_same
from ..storage.format import MANIFEST_NAME
from ..storage.json_values import JsonValue
from .arguments import retention_of
from .meetings import Meetings
from .retention import Retention, need_metrics
from .run_steps import RunSteps
from .steps import Root, read_root
from .taken_names import lost_steps
from .votes import Schedule
from .writer_lock import WriterLock, heal_root


@dataclass(frozen=True)
class OpenRoot:
    """A root that all ranks have opened.

    Attributes:
        where: its absolute path.
        policies: which steps to keep; at least one.
        schedule: when to save.
        lock: of who writes to it.
        steps: those of the run.
    """

    where: Path
    policies: Sequence[Retention]
    schedule: Schedule
    lock: WriterLock
    steps: RunSteps

    def hold_lock(self, timeout_seconds: float) -> None:
        """Be, from now on, the only one that writes to the root; on rank 0.

        Raises:
            CheckpointError: another process writes to it, and did not end in time.
            TargetExistsError: another run saved steps there meanwhile.
            IncompleteCheckpointError: the step that was restored is gone.
        """
        if self.lock.hold(timeout_seconds):
            try:
                self.steps.check_nothing_new(read_root(self.where))
            except BaseException:
                self.lock.release()
                raise

    def close(self) -> None:
        """Let signals do again what they did, and other runs write to the root; once the last save is there.

        A launcher sends its SIGTERM several times, and another one must not kill the last save.
        """
        self.schedule.close()
        self.lock.release()


def open_root(
    meetings: Meetings,
    root: str | os.PathLike[str],
    *,
    max_to_keep: int | None,
    keep: Sequence[Retention],
    overwrite: bool,
    save_every_steps: int | None,
    save_every_minutes: float | None,
    save_signals: Sequence[int],
    stop_signals: Sequence[int],
    async_save: bool,
    when_busy: str,
) -> OpenRoot:
    """Check what a manager was told, and look what its root holds; see :class:`~.manager.CheckpointManager`.

    Raises:
        CheckpointError: an argument is not what it must be; or another process writes to the root, and did not end within 30 s.
        RankFailedError: another rank raised, or the roots differ.
    """
    own: list[tuple[Path, list[Retention], Schedule, WriterLock]] = []

    def begin() -> JsonValue:
        where = absolute_path(root)
        if (where / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"root is '{where}', which is a checkpoint itself; give the directory in which a run's steps lie, or a new one"
            )
        policies = retention_of(max_to_keep, keep)
        if when_busy not in ("wait", "refuse"):
            raise CheckpointError(f"when_busy is {when_busy!r:.100}, and must be 'wait' or 'refuse'")
        schedule = Schedule(
            meetings.store,
            f"{meetings.token}/ballot",
            meetings.timeout_seconds,
            every_steps=save_every_steps,
            every_minutes=save_every_minutes,
            save_signals=save_signals,
            stop_signals=stop_signals,
        )
        undo.callback(schedule.close)
        lock = WriterLock(where)
        undo.callback(lock.release)
        own.append((where, policies, schedule, lock))
        return [str(where), bool(overwrite), bool(async_save), when_busy, *schedule.described()]

    def look(ranks: list[JsonValue]) -> JsonValue:
        whats = ("root", "overwrite", "async_save", "when_busy", "save_every_steps and save_every_minutes", "signals")
        for what, values in zip(whats, zip(*ranks, strict=True), strict=True):
            check_same("CheckpointManager", what, values, "nothing was changed", shown=True)
        where, policies, schedule, lock = own[0]
        if where.is_dir() and (overwrite or async_save or max_to_keep is not None or keep or schedule.is_any):
            # Where the file of the lock can't be written, steps can still be restored; a save will say what is wrong.
            with suppress(OSError):
                lock.hold(meetings.timeout_seconds)
        heal_root(lock, where)
        found = read_root(where, metrics=need_metrics(policies))
        return [found.to_json(), lost_steps(where, found)]

    with ExitStack() as undo:
        held, lost = meetings.meet("begin", begin, look)
        where, policies, schedule, lock = own[0]
        opened = OpenRoot(where, policies, schedule, lock, RunSteps(where, Root.from_json(held), lost, overwrite=overwrite))
        undo.pop_all()
    return opened
