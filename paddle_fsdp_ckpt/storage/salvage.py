"""``salvage``: of a damaged checkpoint, which keys are still whole, and an index of just those."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import counted, listing
from .entries import Stored
from .index import CheckpointIndex
from .json_values import JsonValue
from .plan import plan_whole
from .read_lock import while_reading
from .reader import differing_duplicates
from .survey import FileSurvey, Progress, Survey, survey


@dataclass(frozen=True)
class SalvageReport:
    """What is left of a checkpoint.

    Attributes:
        path: the directory.
        intact: keys of which every element is stored in at least one place whose digest is right, in the order of the files.
        damaged: the other keys that are known of -> why they are lost.
        unreadable: files whose header is damaged or missing -> why. Keys that only they hold are lost, and can't be named.
        manifest_problem: in words, why step, extra_state and hyper-parameters may be wrong; None if they are right.
        index: of the intact keys alone, without the damaged copies of their values: what reading plans can be made from.
    """

    path: Path
    intact: tuple[str, ...]
    damaged: dict[str, str]
    unreadable: dict[str, str]
    manifest_problem: str | None
    index: CheckpointIndex = field(repr=False, compare=False)

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data, without the index."""
        return {
            "path": str(self.path),
            "intact": list(self.intact),
            "damaged": self.damaged,
            "unreadable": self.unreadable,
            "manifest_problem": self.manifest_problem,
        }

    @property
    def is_whole(self) -> bool:
        """Whether nothing at all is lost."""
        return not self.damaged and not self.unreadable and self.manifest_problem is None

    def __str__(self) -> str:
        lines = [f"'{self.path}': {counted(len(self.intact), 'key is', 'keys are')} intact, {counted(len(self.damaged), 'is', 'are')} not"]
        lines += [f"- lost: '{key}', {why}" for key, why in self.damaged.items()]
        lines += [f"- {name}: {why}. Keys that only it holds are lost, and can't be named" for name, why in self.unreadable.items()]
        if self.manifest_problem is not None:
            lines.append(f"- step, extra_state and hyper-parameters may be wrong: {self.manifest_problem}")
        return "\n".join(lines)


@while_reading("path")
def salvage(path: str | os.PathLike[str], *, workers: int | None = None, progress: Progress | None = None) -> SalvageReport:
    """Read all bytes of a checkpoint directory, and say which keys are still whole. Nothing is changed.

    Args:
        path: the directory of a checkpoint that ``save`` made.
        workers: how many threads read; by default as many as there are processors, 8 at most.
        progress: called now and then with the number of bytes checked so far, and of all bytes.

    Raises:
        IncompleteCheckpointError: there is no committed checkpoint at ``path``.
        NewerFormatError: it is of a newer format version.
        CorruptCheckpointError: its manifest is damaged so much that it says nothing.
    """
    found = survey(Path(path), workers=workers, progress=progress)
    left, reasons = _without_damage(found)
    plan = plan_whole(left, left.keys())
    # A key whose damaged pieces have intact copies is whole.
    lost = {key: why for key, why in reasons.items() if key not in left}
    lost |= {problem.key: reasons.get(problem.key, problem.text) for problem in plan.problems.uncovered}
    for one in differing_duplicates(left, [one for one in plan.duplicates if one.key not in lost]):
        lost[one.key] = f"{left.files[one.file].name} and {left.files[one.other_file].name} hold different values for the same elements"
    return SalvageReport(
        left.path,
        tuple(key for key in left.stored if key not in lost),
        lost,
        {one.record.name: _say_unreadable(one) for one in found.files if one.entries is None},
        found.manifest_problem,
        _restrict(left, {key: pieces for key, pieces in left.stored.items() if key not in lost}),
    )


def _without_damage(found: Survey) -> tuple[CheckpointIndex, dict[str, str]]:
    """Return an index of the pieces that are intact, and why keys lack some."""
    stored: dict[str, list[Stored]] = {}
    reasons: dict[str, str] = {}
    for key, pieces in found.index.stored.items():
        good = [one for one in pieces if not (found.is_damaged(key, one) or _is_too_long(found.files[one[0]]))]
        if good:
            stored[key] = good
        if len(good) < len(pieces):
            reasons[key] = f"damaged in {listing(found.files[one[0]].record.name for one in pieces if one not in good)}"
    # What is left of a file that was cut is read as a file of that size.
    files = tuple(replace(one.record, size=min(one.record.size, one.size)) for one in found.files)
    return _restrict(replace(found.index, files=files), stored), reasons


def _restrict(index: CheckpointIndex, stored: dict[str, list[Stored]]) -> CheckpointIndex:
    return replace(index, dtypes={key: index.dtypes[key] for key in stored}, stored=stored)


def _is_too_long(one: FileSurvey) -> bool:
    """Tell whether something was appended to a file; reading it refuses such a file as a whole."""
    return one.size > one.record.size


def _say_unreadable(one: FileSurvey) -> str:
    return one.problem or one.header_problem or f"the header of '{one.record.name}' is damaged"
