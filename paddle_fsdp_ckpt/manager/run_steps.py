"""Which of the steps that a root holds are this run's, and which step it may save next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ..errors import TargetExistsError
from .steps import Root, SavedStep, names_of, step_name


def discarded_steps(steps: Sequence[SavedStep], lost: Collection[int]) -> set[int]:
    """Return the steps of a root that are of a history that was given up, and were to be removed.

    The last step of the one that goes on is the first that discards all committed steps after it; as a rule that is the last step of all.
    One that was saved anew, or brought back since, was written at another time, and isn't meant.

    Args:
        steps: the committed ones, in ascending order.
        lost: those of which no checkpoint is left.
    """
    for number, last in enumerate(steps):
        if all(one.written and last.discarded.get(one.step) == one.written for one in steps[number + 1 :]):
            of_root = {one.step for one in steps if one.written and last.discarded.get(one.step) == one.written}
            return of_root | {step for step in lost if last.discarded.get(step) == 0}
    return set()


class RunSteps:
    """The steps of one run. Each rank has one, and all know the same.

    Attributes:
        root: what the root held when it was looked at last.
        lost: steps that were saved there, and of which nothing is left that can be restored.
        foreign: steps in it of another history than this run's, to be removed once this run has a step of its own. A step says which
            were, so that a run that is killed before they are gone, or can't remove one that is being read, isn't resumed from them.
        last: the step that was saved or restored last, or began to be saved; None before.
    """

    def __init__(self, where: Path, root: Root, lost: Collection[int], *, overwrite: bool) -> None:
        """Begin with what a root holds; with ``overwrite`` all of it is foreign, else what the newest step of its history says is."""
        self._where = where
        self.root = root
        self.lost = set(lost)
        self.foreign = {*root.numbers, *lost} if overwrite else discarded_steps(root.steps, lost)
        self.last: int | None = None
        self._later: list[int] = []
        self._may_save = overwrite or not (root.steps or lost)

    def to_discard(self, step: int) -> dict[int, int]:
        """Return what the manifest of a step is to say of foreign ones; see :class:`~.storage.manifest.Manifest`."""
        known = {one.step: one.written for one in self.root.steps}
        return {one: known.get(one, 0) for one in self.foreign - {step}}

    def own(self) -> list[int]:
        """Return the committed steps of this run in ascending order."""
        return [step for step in self.root.numbers if step not in self.foreign]

    def to_restore(self) -> list[int]:
        """Return the steps of this run that a restore looks at, in ascending order: those that are lost must not be passed over."""
        return sorted({*self.own(), *self.lost - self.foreign})

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
        """Raise where a root holds steps now that it did not when it was looked at last.

        Raises:
            TargetExistsError: another run saved some.
        """
        new = sorted({*root.numbers} - {*self.root.numbers})
        if new:
            raise TargetExistsError(
                f"another run saved {names_of(new)} in '{self._where}' since this one looked; nothing was saved. Make a new manager, and "
                "go on with restore(), or choose another root"
            )

    def restored(self, step: int, *, discard_later: bool, damaged: Collection[int]) -> None:
        """Take note that the run goes on from a step: later ones are foreign if they are discarded, else those that are damaged."""
        self.foreign |= {one for one in self.to_restore() if one > step} if discard_later else set(damaged)
        self._later = [one for one in self.own() if one > step]
        self._may_save = True
        self.last = step

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
        self.root = root
        self.lost &= {*root.taken}
        self.foreign &= {*root.numbers, *root.taken} - {step}
