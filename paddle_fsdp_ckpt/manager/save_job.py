"""One save from its first byte to the log line, in the thread that trains or in another one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..saving import PreparedSave, commit_save
from ..storage.agreement import COORDINATOR, Rendezvous, exchange
from ..storage.json_values import JsonValue
from ..storage.read_lock import removing
from ..storage.writer import FileImage
from .history import CheckpointEvent, tell
from .retention import Retention, need_metrics, steps_to_remove
from .steps import Root, SavedStep, clear_left_overs, hide_replaced, hide_step, is_own_directory, read_root, step_name
from .taken_names import make_way

_LOG = logging.getLogger("paddle_fsdp_ckpt")


@dataclass(frozen=True)
class SaveJob:
    """A step to write, and what to do once it is there. No Paddle collective runs here.

    Attributes:
        where: the root.
        step: its number.
        prepared: the save.
        metrics: those of the step.
        rendezvous: the ranks, over a connection that no other thread uses.
        policies: which steps to keep.
        known: the steps that the root held before.
        foreign: those of another history, which go once this one is there.
        is_taken: whether something that is no step has this one's name.
        on_event: the user's hook.
        started: when the call came, by ``time.monotonic``.
        image: a copy of this rank's file; None for the live tensors.
        failure: why there is no copy although there should be: all ranks raise it.
        blocked_seconds: how long the caller waited; None where it waits for all of this.
        is_awaited: tells whether somebody waits for it by now; None where the caller does anyway.
    """

    where: Path
    step: int
    prepared: PreparedSave
    metrics: dict[str, float]
    rendezvous: Rendezvous
    policies: Sequence[Retention]
    known: Sequence[SavedStep]
    foreign: frozenset[int]
    is_taken: bool
    on_event: Callable[[CheckpointEvent], None] | None
    started: float
    image: FileImage | None = None
    failure: BaseException | None = None
    blocked_seconds: float | None = None
    is_awaited: Callable[[], bool] | None = None

    def run(self) -> Root:
        """Write, commit, remove what nothing keeps, and tell; return what the root holds then.

        Raises:
            CheckpointError: on all ranks, where any could not write; nothing was removed.
        """
        timeout = self.prepared.timeout_seconds
        if self.blocked_seconds is not None:
            exchange(self.rendezvous, f"{self.prepared.token}/copied", self._check_copied, lambda _: None, timeout)
        if self.is_taken:
            exchange(self.rendezvous, f"{self.prepared.token}/way", lambda: None, lambda _: self._make_way(), timeout)
        nbytes = commit_save(self.prepared, self.image, self.rendezvous, self.is_awaited)
        verdict = exchange(self.rendezvous, f"{self.prepared.token}/keep", lambda: None, lambda _: self._remove(), timeout)
        root = Root.from_json(verdict["root"])
        if self.rendezvous.rank == COORDINATOR:
            self._clear()
            seconds = time.monotonic() - self.started
            blocked = seconds if self.blocked_seconds is None else self.blocked_seconds
            event = CheckpointEvent("save", self.step, seconds, blocked, nbytes, self.metrics, root.numbers, verdict["removed"])
            tell(event, self.where, self.on_event)
        if self.blocked_seconds is not None:
            let_all_hear(self.rendezvous, f"{self.prepared.token}/heard", timeout)
        return root

    def _check_copied(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _make_way(self) -> None:
        make_way(self.where, self.step, may_go=self.step in self.foreign)

    def _remove(self) -> JsonValue:
        """Take the steps that nothing keeps out of the root; what fails is logged, and is tried again after the next save."""
        try:
            root = read_root(self.where, [one for one in self.known if one.step != self.step], metrics=need_metrics(self.policies))
        except (CheckpointError, OSError) as error:
            _LOG.warning("'%s' can't be read, and nothing was removed from it: %s", self.where, error)
            root = Root((*(one for one in self.known if one.step != self.step), SavedStep(self.step, metrics=self.metrics)))
        foreign = self.foreign - {self.step}
        own = [one for one in root.steps if one.step not in foreign]
        unwanted = {*self._not_kept(own), *foreign.intersection([*root.numbers, *root.taken])}
        removed = [step for step in sorted(unwanted) if self._hide(step)]
        gone = {step_name(step) for step in removed}
        skipped = {name: reason for name, reason in root.skipped.items() if name not in gone}
        left = Root(tuple(one for one in root.steps if one.step not in removed), skipped)
        return {"root": left.to_json(), "removed": removed}

    def _not_kept(self, own: Sequence[SavedStep]) -> list[int]:
        try:
            return steps_to_remove(self.policies, own, {self.step})
        except Exception:  # noqa: BLE001 - a policy may be the user's; the step is there, and training goes on
            _LOG.exception("a policy of keep= failed, and nothing was removed; training goes on")
            return []

    def _hide(self, step: int) -> bool:
        """Take a step out of the root, unless somebody reads it; tell whether it is gone."""
        try:
            if not is_own_directory(self.where / step_name(step)):
                return False  # no save made it
            with removing(self.where / step_name(step)) as is_free:
                if not is_free:
                    _LOG.info("%s is being read, and its removal is tried again after the next save", step_name(step))
                    return False
                hide_replaced(self.where, step)
                hide_step(self.where, step)
        except OSError as error:
            _LOG.warning("%s could not be removed, and is tried again after the next save: %s", step_name(step), error)
            return False
        return True

    def _clear(self) -> None:
        try:
            clear_left_overs(self.where)
        except (CheckpointError, OSError) as error:
            _LOG.warning("%s", error)


def let_all_hear(rendezvous: Rendezvous, token: str, timeout_seconds: float) -> None:
    """Return on rank 0, in whose process the store lives, once all others need it no more; a process may end afterwards."""
    try:
        if rendezvous.rank != COORDINATOR:
            rendezvous.put(f"{token}/{rendezvous.rank}", b"")
            return
        for rank in range(rendezvous.world_size):
            if rank != COORDINATOR:
                rendezvous.get(f"{token}/{rank}", timeout_seconds)
    except (TimeoutError, ConnectionError) as error:
        # What was agreed on is agreed on.
        _LOG.warning("rank %d did not hear from all others at the end: %s", rendezvous.rank, error)
