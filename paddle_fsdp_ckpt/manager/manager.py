"""``CheckpointManager``: a run's checkpoints under one root, which to keep, and how a run goes on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import CheckpointError
from ..meeting import check_same
from ..saving import Kept, prepare_save
from ..storage.agreement import COORDINATOR
from ..storage.commit import DEFAULT_TIMEOUT_SECONDS
from ..storage.json_values import JsonValue
from ..subjects import Models
from .arguments import check_can_be_compared, check_group, check_same_restore, check_same_values, is_same_save, step_number
from .history import CheckpointEvent
from .meetings import Meetings
from .opening import open_root
from .restore_telling import tell_begun_anew, tell_restored
from .restoring import RestoreReport, Restoring
from .retention import Retention, best_step
from .save_job import SaveJob, let_all_hear
from .saves import Saves
from .steps import read_root, step_name
from .trainer_state import TrainerState, check_metrics, check_trainer_state, describe_common, is_json, keep_trainer_state

_LOG = logging.getLogger("paddle_fsdp_ckpt")


class CheckpointManager:
    """The checkpoints of one run, in step directories such as ``step_00000100`` under one root.

    All ranks make one alike, with the same root, and call its methods alike, but for :meth:`latest_step`, :meth:`all_steps` and the
    attributes, which are the same on all ranks at any time. Rank 0 decides what the root holds.

    One manager at a time writes to a root: from its beginning where it is told anything of saving, such as ``max_to_keep`` or
    ``save_every_steps``, else from its first save, and until it is closed or its process ends. Others may restore meanwhile.

    A step is the number of steps that were taken: what is saved as 1 is there after the first one, and a run that restored it goes on
    with the second.

    Attributes:
        restored: the report of the last :meth:`restore` that found something, or None.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        keep: Sequence[Retention] = (),
        overwrite: bool = False,
        save_every_steps: int | None = None,
        save_every_minutes: float | None = None,
        save_signals: Sequence[int] = (),
        stop_signals: Sequence[int] = (),
        async_save: bool = False,
        when_busy: Literal["wait", "refuse"] = "wait",
        on_event: Callable[[CheckpointEvent], None] | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Open a root, which is made at the first save. All ranks must call it.

        Args:
            root: the directory, the same on all ranks, on a file system that they share.
            max_to_keep: keep the newest so many steps; the same as ``keep=[KeepLast(max_to_keep)]``.
            keep: policies of :mod:`~paddle_fsdp_ckpt.manager.retention`. A step stays where any of them, or ``max_to_keep``, keeps
                it; without any, all stay.
            overwrite: begin anew where the root holds steps of an earlier run: :meth:`restore` finds none, and they are removed once the
                first new step is there. Without it, such a root must be resumed with :meth:`restore` before it is saved to.
            save_every_steps: :meth:`should_save` says yes at each step that can be divided by it.
            save_every_minutes: and when this time has passed since the last save, by the clock of rank 0.
            save_signals: and once after any rank got such a signal, e.g. ``[signal.SIGUSR1]``.
            stop_signals: the same, and :attr:`should_stop` becomes true, e.g. ``[signal.SIGTERM]``. Signals do nothing else meanwhile.
            async_save: :meth:`save` returns once this rank's bytes are copied, and the copy is written in the background.
            when_busy: what a save does while the one before is still being written: wait for it, or raise.
            on_event: called on rank 0 after each save and restore, in the background where the save is there.
            timeout_seconds: how long to wait for the slowest rank wherever ranks wait for each other.

        Raises:
            CheckpointError: an argument is not what it must be; or another process writes to the root, and did not end within 30 s.
            RankFailedError: another rank raised, or the roots differ.
        """
        self.restored: RestoreReport | None = None
        self._meetings = Meetings(timeout_seconds)
        self._is_open = True
        self._root = open_root(
            self._meetings,
            root,
            max_to_keep=max_to_keep,
            keep=keep,
            overwrite=overwrite,
            save_every_steps=save_every_steps,
            save_every_minutes=save_every_minutes,
            save_signals=save_signals,
            stop_signals=stop_signals,
            async_save=async_save,
            when_busy=when_busy,
        )
        self._steps = self._root.steps
        self._on_event, self._when_busy = on_event, when_busy
        self._saves = Saves(self._meetings, self._root, in_background=async_save)

    @property
    def has_schedule(self) -> bool:
        """Whether it was told when to save, by steps, minutes or signals; where it wasn't, :meth:`should_save` always says no."""
        return self._root.schedule.is_any

    @property
    def should_stop(self) -> bool:
        """Whether a signal of ``stop_signals`` came on any rank, as of the last :meth:`should_save`."""
        return self._root.schedule.should_stop

    def latest_step(self) -> int | None:
        """Return the newest committed step, or None, as all ranks know it since the last call that all of them made."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def all_steps(self) -> list[int]:
        """Return the committed steps of this run in ascending order; as :meth:`latest_step`."""
        return self._steps.own()

    def best_step(self, metric: str, *, mode: Literal["min", "max"]) -> int | None:
        """Return the step with the best value of a metric, of equal ones the newest; None where no step has a number there.

        All ranks must call it. It waits for a save in the background, and reads the metrics of all steps of this run.

        Args:
            metric: its name in ``metrics`` of the saves.
            mode: ``"min"`` where less is better, ``"max"`` where more is.

        Raises:
            CheckpointError: there are steps, and none was saved with such a metric; or that of some step, which may be the best, can't
                be read.
            RankFailedError: another rank raised, or asked for something else.
        """
        self._check_open()
        self.wait()
        own = self.all_steps()

        def look(ranks: list[JsonValue]) -> JsonValue:
            check_same("best_step", "metric and mode", ranks, "nothing was read", shown=True)
            return best_step(metric, mode, [one for one in read_root(self._root.where, metrics=True).steps if one.step in own])

        def ask() -> JsonValue:
            if not isinstance(metric, str):
                raise CheckpointError(f"best_step: metric is {metric!r:.100}; give the name of a metric")
            return [metric, mode]

        number: int | None = self._meetings.meet("best", ask, look)
        return number

    def should_save(self, step: int) -> bool:
        """Tell whether it is time to save ``step``, alike on all ranks; false where it is saved. All ranks must call it at each step.

        With minutes or signals, ranks wait for each other here; without, no rank hears of another. A manager that was told neither
        these nor ``save_every_steps`` always says no, of which the first call warns.

        Raises:
            RankFailedError: some rank did not call it in time.
        """
        return self._root.schedule.is_due(step) and step != self._steps.last

    def save(
        self,
        step: int,
        *,
        model: Models,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        grad_scaler: Any = None,
        extra_state: Any = None,
        rank_state: Any = None,
        sharded: Mapping[str, ShardedWeight] | None = None,
        metrics: Mapping[str, float] | None = None,
        trainable_only: bool = False,
    ) -> None:
        """Save a step, as a whole or not at all, and then remove those that no policy keeps. All ranks must call it.

        The states of random number generators are saved too, see :mod:`~paddle_fsdp_ckpt.manager.random_state`. What had the step's name
        when the manager last looked, and is no step, gets another one, of which a warning is logged.

        Args:
            step: how many steps were taken; later than all steps that the root holds.
            model: as for ``save``: one, or a dict of several.
            optimizer: the same; its scheduler is saved with it. An empty list where states are left out on purpose.
            lr_scheduler: a scheduler of ``paddle.optimizer.lr``, or a list or dict of such, that belongs to no optimizer, or may not.
            grad_scaler: a ``paddle.amp.GradScaler``, or a list or dict of such.
            extra_state: None, bool, int, float, str, numpy arrays, Paddle tensors, lists and dicts of these; the same on all ranks.
            rank_state: such a value of this rank's own.
            sharded: this rank's parts of tensors of the user's own by name, e.g. of an average of the weights, as ``sharded_state_dict``
                describes parts. A rank may lack what it holds nothing of.
            metrics: numbers by which :class:`~.retention.KeepBest` and :meth:`best_step` compare steps.
            trainable_only: as for ``save``.

        Raises:
            TargetExistsError: the root holds steps that this run did not resume, or later ones than it went back to, or a later one than
                this, or the step itself.
            CheckpointError: something can't be saved, or another process writes to the root; nothing was. Or an earlier save in the
                background failed.
            RankFailedError: another rank failed.
        """
        started = time.monotonic()
        self._check_open()
        if self._when_busy == "refuse":
            self._saves.refuse_while_busy()
        self.wait()
        kept: list[Kept] = []
        given: list[TrainerState] = []
        checked_metrics: dict[str, float] = {}

        def check() -> JsonValue:
            number = step_number(step)
            self._steps.check_next(number)
            check_group(model, optimizer, self._meetings.rendezvous.world_size)
            state = check_trainer_state(lr_scheduler, grad_scaler, sharded)
            given.append(state)
            numbers = check_metrics(metrics)
            check_can_be_compared(self._root.policies, numbers)
            own, digest = keep_trainer_state(state, extra_state, rank_state, numbers, self._meetings.rendezvous.rank)
            checked_metrics.update(numbers)
            kept.append(own)
            if self._saves.in_background:
                self._meetings.in_background()  # what goes wrong there, all ranks hear of here
            return [number, digest]

        def decide(ranks: list[JsonValue]) -> JsonValue:
            if not is_same_save(ranks):
                return False
            self._root.hold_lock(self._meetings.timeout_seconds)
            return True

        if not self._meetings.meet("check", check, decide):
            self._meetings.meet("differ", lambda: describe_common(given[0], extra_state, checked_metrics), check_same_values)
        step = step_number(step)  # numpy's, for one, can't be written as JSON
        prepared = prepare_save(
            self._root.where / step_name(step),
            self._meetings.rendezvous,
            self._meetings.next_token("save"),
            model=model,
            optimizer=optimizer,
            step=step,
            extra_state=extra_state if is_json(extra_state) else None,
            overwrite=step in self._steps.foreign,
            trainable_only=trainable_only,
            timeout_seconds=self._meetings.timeout_seconds,
            keep=lambda: kept[0],
        )
        prepared = replace(prepared, manifest=replace(prepared.manifest, discarded=self._steps.to_discard(step)))
        self._root.schedule.saved()
        self._steps.last = step
        job = SaveJob(
            self._root.where,
            step,
            prepared,
            checked_metrics,
            self._meetings.rendezvous,
            self._root.policies,
            self._steps.root.steps,
            frozenset(self._steps.foreign),
            step_name(step) in self._steps.root.skipped,
            self._on_event,
            started,
        )
        self._saves.run(job)

    def restore(
        self,
        *,
        model: Models | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        grad_scaler: Any = None,
        sharded: Mapping[str, ShardedWeight] | None = None,
        step: int | None = None,
        fall_back: bool = False,
        discard_later: bool = False,
        random_state: bool = True,
        **load_options: Any,
    ) -> int | None:
        """Restore the newest committed step, and return its number; None where there is none. All ranks must call it.

        All is checked before anything changes: files, their digests, and whether they fit. What was found, what was skipped and why, and
        what was saved with ``extra_state`` and ``rank_state`` is in :attr:`restored`.

        Args:
            model: as for ``load``.
            optimizer: the same.
            lr_scheduler: as it was given to :meth:`save`, as are the following; of a dict some are enough.
            grad_scaler: the same of scalers.
            sharded: the tensors to read into.
            step: another step than the newest.
            fall_back: where the newest one is damaged, take the one before it, and so on. Those that are damaged are removed once
                the run has saved a step. One that was saved, as ``history.jsonl`` says, and has no manifest is damaged.
            discard_later: with ``step``: that later steps may be removed once the run has saved one. Without, such a run
                can't save here, of which restore warns.
            random_state: whether to restore the random number generators.
            load_options: more arguments of ``load``, such as ``parts`` and ``key_map``. With ``salvage=True`` a step that is damaged is
                restored as far as it is intact, rather than the one before it. What the manager kept beside the model is then left out
                where it is damaged, of which a warning is logged; :attr:`RestoreReport.lost` names it. Of ``sharded``, give what is whole.

        Raises:
            IncompleteCheckpointError: there is no such step.
            CorruptCheckpointError: it is damaged; the message names the step before it.
            MismatchError: it doesn't fit; nothing was changed.
            CheckpointError: as ``load``.
        """
        started = time.monotonic()
        self._check_open()
        self.wait()
        checked: list[TrainerState] = []

        def check() -> JsonValue:
            checked.append(check_trainer_state(lr_scheduler, grad_scaler, sharded))
            return [None if step is None else step_number(step), bool(fall_back), bool(discard_later), bool(random_state)]

        self._meetings.meet("check", check, check_same_restore)
        state = checked[0]
        step = None if step is None else step_number(step)
        if step is not None:
            self._steps.check_can_be_restored(step)
        meetings = self._meetings
        restoring = Restoring(
            self._root.where, self._steps.root, meetings.rendezvous, meetings.next_token("restore"), meetings.timeout_seconds
        )
        report = restoring.restore(
            self._steps.to_restore(),
            step,
            fall_back,
            state,
            random_state=random_state,
            model=model,
            optimizer=optimizer,
            options=load_options,
        )
        if report is None:
            if self._meetings.rendezvous.rank == COORDINATOR:
                tell_begun_anew(self._steps, self._root.where)
            return None
        self._steps.restored(report.step, discard_later=discard_later, damaged=report.fell_back_from)
        self.restored = report
        if self._meetings.rendezvous.rank == COORDINATOR:
            tell_restored(report, self._steps, self._root.where, time.monotonic() - started, self._on_event)
        return report.step

    def wait(self) -> None:
        """Wait until no save is being written.

        Raises:
            CheckpointError: one in the background failed; it is raised once.
        """
        self._saves.wait()

    def close(self) -> None:
        """Wait for what is being written, and for all ranks. All ranks must call it; afterwards nothing can be saved or restored.

        Raises:
            CheckpointError: a save in the background failed.
        """
        if self._is_open:
            self._is_open = False
            try:
                self.wait()
                self._meetings.meet("close", lambda: None, lambda _: None)
                let_all_hear(self._meetings.rendezvous, self._meetings.next_token("closed"), self._meetings.timeout_seconds)
            finally:
                self._root.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        # The others may not be here: wait for what is being written, and for nobody else.
        self._is_open = False
        try:
            self.wait()
        except CheckpointError:
            _LOG.exception("a save in the background failed too")
        finally:
            self._root.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise CheckpointError("the CheckpointManager was closed; make a new one")
