"""``salvage``: of a damaged checkpoint, which keys are still whole, and an index of just those."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import CorruptCheckpointError, IncompleteCheckpointError, counted, listing
from .entries import Stored
from .format import VALUES_WITHOUT_MANIFEST, parse_left_over
from .headers_alone import read_headers_alone
from .index import CheckpointIndex, has_lost_manifest
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
        are_digests_lost: whether keys are only intact as far as the headers of their files tell, since the manifest is lost and with it
            all digests. Step, extra_state and hyper-parameters are lost too, and the index has no manifest.
    """

    path: Path
    intact: tuple[str, ...]
    damaged: dict[str, str]
    unreadable: dict[str, str]
    manifest_problem: str | None
    index: CheckpointIndex = field(repr=False, compare=False)
    are_digests_lost: bool = False

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data, without the index."""
        return {
            "path": str(self.path),
            "intact": list(self.intact),
            "damaged": self.damaged,
            "unreadable": self.unreadable,
            "manifest_problem": self.manifest_problem,
            "are_digests_lost": self.are_digests_lost,
        }

    @property
    def is_whole(self) -> bool:
        """Whether nothing at all is lost."""
        return not self.damaged and not self.unreadable and self.manifest_problem is None

    def __str__(self) -> str:
        intact = "there, and not checked" if self.are_digests_lost else "intact"
        lines = [
            f"'{self.path}': {counted(len(self.intact), 'key is', 'keys are')} {intact}, {counted(len(self.damaged), 'is', 'are')} not"
        ]
        lines += [f"- lost: '{key}', {why}" for key, why in self.damaged.items()]
        lines += [f"- {name}: {why}. Keys that only it holds are lost, and can't be named" for name, why in self.unreadable.items()]
        if self.are_digests_lost:
            lines.append(f"- {_LOST_WITH_MANIFEST}: {self.manifest_problem}")
        elif self.manifest_problem is not None:
            lines.append(f"- step, extra_state and hyper-parameters may be wrong: {self.manifest_problem}")
        return "\n".join(lines)


_LOST_WITH_MANIFEST = (
    "lost are all digests, so that values may be damaged unseen, and what the manifest alone says: step, hyper-parameters, learning rate, "
    "extra_state, which names are of one tensor, and how many files there were"
)


@while_reading("path")
def salvage(
    path: str | os.PathLike[str], *, workers: int | None = None, progress: Progress | None = None, without_manifest: bool = False
) -> SalvageReport:
    """Read all bytes of a checkpoint directory, and say which keys are still whole. Nothing is changed.

    Args:
        path: the directory of a checkpoint that ``save`` made.
        workers: how many threads read; by default as many as there are processors, 8 at most.
        progress: called now and then with the number of bytes checked so far, and of all bytes.
        without_manifest: where the manifest is lost, or damaged so much that it says nothing, go by the headers of the other files; their
            values then are not read, as nothing tells what they were.

    Raises:
        IncompleteCheckpointError: there is no committed checkpoint at ``path``.
        NewerFormatError: it is of a newer format version.
        CorruptCheckpointError: its manifest is damaged so much that it says nothing.
    """
    directory = Path(os.path.expanduser(path))  # as load does
    try:
        found = survey(directory, workers=workers, progress=progress)
    except (CorruptCheckpointError, IncompleteCheckpointError) as error:
        if without_manifest and _holds_files(directory, error):
            return _by_headers(directory, str(error).removesuffix(f". {VALUES_WITHOUT_MANIFEST}"))
        raise
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


def _holds_files(path: Path, error: Exception) -> bool:
    """Tell whether files of ours are there whose manifest is lost. An unfinished save's may lack values."""
    is_left_over = parse_left_over(Path(os.path.abspath(path)).name) is not None
    return isinstance(error, CorruptCheckpointError) or (path.is_dir() and not is_left_over and has_lost_manifest(path))


def _by_headers(path: Path, problem: str) -> SalvageReport:
    index, unreadable = read_headers_alone(path)
    lost = {one.key: one.text for one in plan_whole(index, index.keys()).problems.uncovered}
    intact = {key: pieces for key, pieces in index.stored.items() if key not in lost}
    return SalvageReport(path, tuple(intact), lost, unreadable, problem, _restrict(index, intact), are_digests_lost=True)


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
