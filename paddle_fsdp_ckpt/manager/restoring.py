"""Which step a run goes on from, and how all of it is given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MismatchError,
    RankFailedError,
    listing,
)
from ..loading import LoadReport, load
from ..meeting import check_same
from ..optim import optimizer_list
from ..progress import long_progress
from ..storage.agreement import Rendezvous, exchange
from ..storage.format import VALUES_WITHOUT_MANIFEST
from ..storage.json_values import JsonValue
from ..storage.read_lock import reading
from ..storage.reader import PARTIAL_STATE
from ..storage.system_errors import describe_error
from .kept_values import DAMAGED
from .steps import HISTORY_NAME, Root, step_name
from .trainer_state import SavedState, TrainerState, read_trainer_state


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        step: the step that was restored.
        load: what was loaded into model and optimizers.
        extra_state: as it was given to the save; see ``lost``.
        rank_states: rank -> what it gave as ``rank_state``: of this rank, where as many ranks saved as restore; else of all that saved,
            since only the caller knows how such states are divided anew. Empty where plain ``save`` made the step.
        skipped: name in the root -> in words, why it is no step.
        fell_back_from: step -> what is wrong with it, of later steps that are damaged.
        differences: in words, what of schedulers, scaler and random number generators was saved otherwise, or not saved, and was left.
        not_asked_for: what was saved and not given to the restore: ``"lr_scheduler"``, ``"grad_scaler"``, ``"sharded"``.
        metrics: as they were given to the save.
        lost: in words, what the manager kept beside the model that is damaged and was left out, as ``salvage`` allows, and what became
            of it; of all ranks together.
    """

    step: int
    load: LoadReport
    extra_state: Any
    rank_states: dict[int, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    fell_back_from: dict[int, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    not_asked_for: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        loaded = str(self.load).split("\n- ")
        # That all is as it was saved, which is said last, is so of what was loaded only.
        lines = [f"restored step {self.step}", *(loaded[:-1] if self.load.is_exact and not self.is_exact else loaded)]
        lines += [f"skipped '{name}': {reason}" for name, reason in self.skipped.items()]
        lines += [f"fell back from {step_name(step)}: {reason}" for step, reason in self.fell_back_from.items()]
        lines += [f"metrics: {listing(f'{name} {value:g}' for name, value in self.metrics.items())}"] * bool(self.metrics)
        lines += [*self.lost, *self.differences]
        return "\n- ".join(lines)

    @property
    def is_exact(self) -> bool:
        """Whether all that the step holds was given back, just as it was saved; see :attr:`~.loading.LoadReport.is_exact`."""
        return self.load.is_exact and not self.differences and not self.lost


@dataclass(frozen=True)
class Restoring:
    """One restore of all ranks.

    Attributes:
        where: the root.
        root: what it held when the manager last looked.
        rendezvous: the ranks.
        token: for this restore.
        timeout_seconds: at each point where ranks wait for each other.
    """

    where: Path
    root: Root
    rendezvous: Rendezvous
    token: str
    timeout_seconds: float

    def restore(
        self,
        steps: Sequence[int],
        wanted: int | None,
        fall_back: bool,
        state: TrainerState,
        *,
        random_state: bool,
        model: Any,
        optimizer: Any,
        options: Mapping[str, Any],
    ) -> RestoreReport | None:
        """Restore the wanted step, or the newest; None where there is none.

        Args:
            steps: the committed ones in ascending order, and those among them that the root's history says were so.
            wanted: one of them, or None for the newest.
            fall_back: whether to take earlier ones where that is damaged.
            state: what to restore into, as are the following.
            random_state: whether the random number generators are restored.
            model: the model, or None.
            optimizer: the optimizer, several, or None.
            options: more arguments of ``load``.
        """
        candidates = [step for step in reversed(steps) if wanted is None or step <= wanted]
        fell_back_from: dict[int, str] = {}
        for number, step in enumerate(candidates):
            try:
                saved, report, differences = self._restore_step(step, state, random_state, model, optimizer, options)
            except CheckpointError as error:
                before = [one for one in candidates[number + 1 :] if step_name(one) not in self.root.skipped][:1]
                if not self._is_damaged(step, error):
                    raise
                if not before or not fall_back:
                    # It says all that the error says, which would be printed twice.
                    raise _with_way_out(error, step, before).with_traceback(error.__traceback__) from None
                fell_back_from[step] = str(error)
                continue
            return RestoreReport(
                step,
                report,
                saved.extra_state,
                saved.rank_states,
                self.root.skipped,
                fell_back_from,
                differences,
                saved.not_asked_for,
                saved.metrics,
                saved.lost,
            )
        return None

    def _restore_step(
        self, step: int, state: TrainerState, random_state: bool, model: Any, optimizer: Any, options: Mapping[str, Any]
    ) -> tuple[SavedState, LoadReport, list[str]]:
        path = self.where / step_name(step)
        reason = self.root.skipped.get(step_name(step))
        if reason is not None:
            raise IncompleteCheckpointError(
                f"'{path}' was saved, as {HISTORY_NAME} says, and is no step now: {reason}. Copy it there whole; "
                f"where its manifest is lost, {VALUES_WITHOUT_MANIFEST}"
            )
        with reading(path):
            return self._restore_from(path, step, state, random_state, model, optimizer, options)

    def _restore_from(
        self, path: Path, step: int, state: TrainerState, random_state: bool, model: Any, optimizer: Any, options: Mapping[str, Any]
    ) -> tuple[SavedState, LoadReport, list[str]]:
        token = f"{self.token}/{step}"
        read: list[SavedState] = []
        rank, world_size = self.rendezvous.rank, self.rendezvous.world_size

        def prepare() -> JsonValue:
            saved = read_trainer_state(
                path,
                state,
                rank,
                world_size,
                long_progress("loading", rank),
                random_state=random_state,
                salvage=options.get("salvage") is True,
            )
            if saved.manifest.step != step and not saved.is_manifest_damaged:
                raise CorruptCheckpointError(
                    f"'{path}' says that it is step {saved.manifest.step}: somebody renamed it. Give it its name back, or remove it"
                )
            read.append(saved)
            return [step, saved.digest(), sorted(state.sharded), saved.sharded, saved.not_asked_for, saved.lost]

        not_asked_for, lost = exchange(self.rendezvous, f"{token}/prepare", prepare, _judge, self.timeout_seconds)
        saved = replace(read[0], not_asked_for=not_asked_for, lost=lost)
        loaded = load(
            path,
            **{"verify_first": options.get("check_digests", True), "timeout_seconds": self.timeout_seconds, **options},
            model=model,
            optimizer=None if optimizer is None else optimizer_list(optimizer),
        )
        report = replace(loaded, not_restored=saved.not_restored(state, loaded.parts))
        differences: list[str] = []

        def finish() -> None:
            try:
                saved.read_sharded(state, long_progress("loading", rank))
                differences.extend(saved.apply(state))
            except OSError as error:  # which says nothing of the checkpoint
                raise CheckpointError(f"{describe_error(error)}; {PARTIAL_STATE}") from error
            except CheckpointError as error:
                text = str(error) if PARTIAL_STATE in str(error) else f"{error}; {PARTIAL_STATE}"
                raise CorruptCheckpointError(text).with_traceback(error.__traceback__) from None

        exchange(self.rendezvous, f"{token}/finish", finish, lambda _: None, self.timeout_seconds)
        return saved, report, differences

    def _is_damaged(self, step: int, error: CheckpointError) -> bool:
        """Tell whether any rank found the step damaged, rather than that it doesn't fit; the same on all ranks."""
        own = isinstance(error, DAMAGED)
        return bool(exchange(self.rendezvous, f"{self.token}/{step}/damaged", lambda: own, any, self.timeout_seconds))


def _with_way_out(error: CheckpointError, step: int, before: Sequence[int]) -> CheckpointError:
    """Return the error of the same kind that says what to go on from."""
    kind = type(error) if isinstance(error, (*DAMAGED, RankFailedError)) else CorruptCheckpointError
    if not before:
        begin = "CheckpointManager(root, overwrite=True) begins anew"
        return kind(f"{step_name(step)} is damaged, and the root has no step before it ({begin}): {error}")
    return kind(
        f"{step_name(step)} is damaged, and the step before it is {step_name(before[0])}: restore(fall_back=True) takes that. {error}"
    )


def _judge(ranks: list[JsonValue]) -> JsonValue:
    """Return what is not asked for and what is lost on any rank, once all read the same step and it holds what they want."""
    _check_same_restore(ranks)
    return [list(dict.fromkeys(text for one in ranks for text in one[which])) for which in (4, 5)]


def _check_same_restore(ranks: list[JsonValue]) -> None:
    for what, values in zip(("step", "checkpoint"), zip(*(one[:2] for one in ranks), strict=True), strict=True):
        check_same("restore", what, values, "nothing was changed", shown=what == "step")
    given = {key for one in ranks for key in one[2]}
    saved = {key for one in ranks for key in one[3]}
    step = step_name(ranks[0][0])
    if given - saved:
        lacking = listing(f"'{key}'" for key in sorted(given - saved))
        instead = f"with those alone that it holds ({listing(sorted(saved))})" if saved else "without sharded="
        raise MismatchError(
            f"{step} holds no value {lacking} of sharded=; nothing was changed. Restore {instead}, and start what it lacks afresh "
            "(from the weights, for an average)"
        )
    if given and saved - given:
        raise MismatchError(
            f"sharded: {step} has besides {listing(sorted(saved - given))}; nothing was changed. Give all tensors that were given to the "
            "save, or restore without sharded="
        )
