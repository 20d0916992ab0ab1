"""Which of the steps that a root holds are this run's, and which step it may save next."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..errors import IncompleteCheckpointError, TargetExistsError
from ..storage.discarded import discarded_steps, identity_of, is_another
from .given_up import WhyGivenUp, given_up_anew, given_up_as_damaged, given_up_by, given_up_on_going_back, saved_without
from .steps import Root, names_of, step_name


class RunSteps:
    """The steps of one run. Each rank has one, and all know the same.

    Attributes:
        root: what the root held when it was looked at last.
        lost: steps that were saved there, and of which nothing is left that can be restored.
        foreign: steps in it of another history than this run's -> why they are, to be removed once this run has a step of its own. A step
            says which were, so that a run that is killed before they are gone, or can't remove one that is being read, isn't resumed from
            them.
        last: the step that was saved or restored last, or began to be saved; None before.
    """

    def __init__(self, where: Path, root: Root, lost: Collection[int], *, overwrite: bool) -> None:
        """Begin with what a root holds; with ``overwrite`` all of it is foreign, else what the newest step of its history says is."""
        self._where = where
        self.root = root
        self.lost = set(lost)
        self.foreign: dict[int, WhyGivenUp] = (
            dict.fromkeys([*root.numbers, *lost], given_up_anew())
            if overwrite
            else {step: given_up_by(by, where / step_name(step)) for step, by in discarded_steps(root.steps, lost).items()}
        )
        self.last: int | None = None
        self._restored: int | None = None
        self._later: list[int] = []
        self._may_save = overwrite or not (root.steps or lost)

    def to_discard(self, step: int) -> dict[int, int | str]:
        """Return what the manifest of a step is to say of foreign ones; see :class:`~.storage.manifest.Manifest`."""
        known = {one.step: identity_of(one) for one in self.root.steps}
        return {one: known.get(one, 0) for one in self.foreign if one != step}

    def own(self) -> list[int]:
        """Return the committed steps of this run in ascending order."""
        return [step for step in self.root.numbers if step not in self.foreign]

    def to_restore(self) -> list[int]:
        """Return the steps of this run that a restore looks at, in ascending order: those that are lost must not be passed over."""
        return sorted({*self.own(), *self.lost.difference(self.foreign)})

    def not_removed(self) -> list[int]:
        """Return the steps that were given up, as a step says, and whose removal was not finished, in ascending order."""
        return sorted(step for step, why in self.foreign.items() if why.by is not None)

    def check_can_be_restored(self, step: int) -> None:
        """Raise unless a restore may look at a step.

        Raises:
            IncompleteCheckpointError: there is none, or it was given up; the message says by what, and what can be done.
        """
        there = self.to_restore()
        if step in there:
            return
        name, others = step_name(step), f"has {names_of(there) or 'no steps'}"
        why = self.foreign.get(step)
        if why is not None:
            way_out = f". {why.way_out}" if step in self.root.numbers else ""
            raise IncompleteCheckpointError(f"{name} in '{self._where}' was given up: {why.words}{way_out}; '{self._where}' {others}")
        by = self._gave_up(step)
        reason = "" if by is None else f" any more, which was given up: {saved_without(by)}"
        raise IncompleteCheckpointError(f"'{self._where}' has no {name}{reason}; it {others}")

    def _gave_up(self, step: int) -> int | None:
        """Return the newest step of this run that gave up one that is gone by now; None where that may have been saved anew since."""
        own = [one for one in self.root.steps if one.step not in self.foreign]
        by = next((one.step for one in reversed(own) if step in one.discarded), None)
        return by if by is not None and (step < by or own[-1].step < step) else None

    def check_next(self, step: int) -> None:
        """Raise unless this run may save a step.

        Raises:
            TargetExistsError: the root holds steps that it did not resume, or later ones than the restored, or a later one, or the step
                itself.
        """
        own = self.own()
        if not self._may_save:
            raise TargetExistsError(
                f"'{self._where}' holds {names_of(self.to_restore())} of an earlier run; nothing was saved. Go on with restore(), choose "
                "another root, or begin anew with CheckpointManager(root, overwrite=True), which removes them"
            )
        if self._later:
            raise TargetExistsError(
                f"this run went back to {step_name(self.last or 0)}, and '{self._where}' holds {names_of(self._later)} of the one before; "
                "nothing was saved, since two histories would mix. Steps are saved in ascending order; a run that goes back says "
                "restore(step=..., discard_later=True), and its first save removes them; or it saves to another root"
            )
        if own and step <= own[-1]:
            raise TargetExistsError(
                f"step {step} is not later than {step_name(own[-1])}, which '{self._where}' holds; nothing was saved. Steps are saved in "
                "ascending order; a run that goes back says restore(step=..., discard_later=True)"
            )

    def check_nothing_new(self, root: Root) -> None:
        """Raise where a root holds other steps now than when it was looked at last, or lacks the one that this run goes on from.

        Args:
            root: all of it looked at anew.

        Raises:
            TargetExistsError: another run saved some, under new numbers or under those of steps that were there.
            IncompleteCheckpointError: the step that was restored is gone.
        """
        known = {one.step: one for one in self.root.steps}
        new = [one.step for one in root.steps if one.step not in known or is_another(one, known[one.step])]
        if new:
            raise TargetExistsError(
                f"another run saved {names_of(new)} in '{self._where}' since this one looked; nothing was saved. Make a new manager, and "
                "go on with restore(), or choose another root"
            )
        if self._restored is not None and self._restored not in root.numbers:
            raise IncompleteCheckpointError(
                f"{step_name(self._restored)}, from which this run goes on, is gone from '{self._where}'; nothing was saved. Make a new "
                "manager, and go on with restore(), or choose another root"
            )

    def restored(self, step: int, *, discard_later: bool, damaged: Collection[int]) -> None:
        """Take note that the run goes on from a step: later ones are foreign if they are discarded, else those that are damaged."""
        if discard_later:
            self.foreign |= {one: given_up_on_going_back(step) for one in self.to_restore() if one > step}
        else:
            self.foreign |= {one: given_up_as_damaged(step, self._where / step_name(one)) for one in damaged}
        self._later = [one for one in self.own() if one > step]
        self._may_save = True
        self.last = self._restored = step

    def later(self) -> str | None:
        """Return what a run that went back must be told before it trains: later steps than the restored one keep it from saving."""
        if not self._later:
            return None
        return (
            f"restore: '{self._where}' holds {names_of(self._later)}, later than the restored {step_name(self.last or 0)}: this run can't "
            "save there. To go on from here, restore(step=..., discard_later=True) lets its first save remove them; or save to another root"
        )

    def saved(self, step: int, root: Root) -> None:
        """Take over what the root holds after a save."""
        self._restored = None
        self.root = root
        self.lost &= {*root.taken}
        left = self.foreign.keys() & {*root.numbers, *root.taken} - {step}
        self.foreign = {one: given_up_by(step, self._where / step_name(one)) for one in left}
