"""``verify``: say all that is wrong with a checkpoint directory, from its files alone; Paddle isn't needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import FEW, CheckpointError, IncompleteCheckpointError, NewerFormatError, counted, listing
from .format import MANIFEST_NAME, PADDLE_METADATA_NAME
from .index import CheckpointIndex, has_lost_manifest, say_lost_manifest
from .json_values import JsonValue
from .plan import Duplicate, ReadPlan, plan_whole
from .read_lock import while_reading
from .reader import differing_duplicates
from .stock import is_stock, read_stock_index
from .survey import FileSurvey, Progress, Survey, damaged_ranges, survey

_FILES_THAT_STOCK_READS = (".safetensors", ".distcp", ".metadata", ".metadata.lock")
_DIRECTORY = "the directory"
_WITHOUT_MANIFEST = "all other files: the manifest knows their digests"
ONLY_STOCK_READS = "Only stock Paddle reads this file"
"""What is to be said of damage of ``0.metadata``."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        where: the name of the file, or what else it is about.
        text: what is wrong, a sentence.
    """

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        path: the directory.
        kind: what kind of checkpoint it is, in words.
        step: the training step it was saved at, where it says so.
        world_size: how many ranks saved it, where it says so.
        keys: how many keys the readable headers name.
        nbytes: of the files that were looked at.
        findings: all that is wrong; none means that the checkpoint is whole.
        not_checked: what could not be looked at, in words.
    """

    path: Path
    kind: str
    step: int | None
    world_size: int | None
    keys: int
    nbytes: int
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        return asdict(self) | {"path": str(self.path), "is_good": self.is_good}

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        ranks = "" if self.world_size is None else f", saved by {counted(self.world_size, 'rank')}"
        # Where nothing can be read, nothing is counted.
        counts = f", {counted(self.keys, 'key')}, {counted(self.nbytes, 'byte')}" if self.keys or self.nbytes else ""
        lines = [f"'{self.path}': {self.kind}{step}{ranks}{counts}"]
        lines += [f"- {finding}" for finding in self.findings]
        lines += [f"(not checked: {what})" for what in self.not_checked]
        lines.append("nothing is wrong" if self.is_good else counted(len(self.findings), "thing is wrong", "things are wrong"))
        return "\n".join(lines)


@while_reading("path")
def verify(path: str | os.PathLike[str], *, workers: int | None = None, progress: Progress | None = None) -> VerifyReport:
    """Check a checkpoint directory, offline: every byte against its digest, every size, that each key is whole and its copies are equal.

    Nothing is changed, and nothing of the files can run. A directory that stock Paddle wrote is checked as far as it can be: it
    holds no digests.

    Args:
        path: the directory.
        workers: how many threads read; by default as many as there are processors, 8 at most.
        progress: called now and then with the number of bytes checked so far, and of all bytes.

    Returns:
        A report that names all that is wrong, not only the first.

    Raises:
        IncompleteCheckpointError: there is no checkpoint at ``path``; the message says what there is.
        NewerFormatError: it is of a newer format version.
    """
    directory = Path(os.path.expanduser(path))  # as load does
    if is_stock(directory):
        if has_lost_manifest(directory):
            finding = Finding(MANIFEST_NAME, say_lost_manifest("the rest of the directory"))
            return VerifyReport(directory, f"a checkpoint without its {MANIFEST_NAME}", None, None, 0, 0, (finding,), (_WITHOUT_MANIFEST,))
        return _verify_stock(directory)
    try:
        found = survey(directory, workers=workers, progress=progress)
    except (IncompleteCheckpointError, NewerFormatError):
        raise
    except CheckpointError as error:
        finding = Finding(MANIFEST_NAME, str(error))
        return VerifyReport(directory, "a damaged checkpoint", None, None, 0, 0, (finding,), (_WITHOUT_MANIFEST,))
    findings = [*_manifest_findings(found), *_file_findings(found), *_stray_files(found)]
    not_checked: list[str] = []
    if all(one.entries is not None for one in found.files):
        findings += _key_findings(found)
    else:
        not_checked.append("whether the keys are whole, since a file's header can't be read")
    return VerifyReport(
        directory,
        f"a checkpoint of format version {found.manifest.format_version}",
        found.manifest.step,
        found.manifest.world_size,
        len(found.index),
        sum(one.record.size for one in found.all_files),
        tuple(findings),
        tuple(not_checked),
    )


def _manifest_findings(found: Survey) -> Iterator[Finding]:
    if found.manifest_problem is not None:
        yield Finding(MANIFEST_NAME, found.manifest_problem)
    base = found.manifest.base or {}  # of which no file is to hold anything
    lacking = sorted({name for names in found.manifest.tied if base.keys().isdisjoint(names) for name in names if name not in found.index})
    if lacking and all(one.entries is not None for one in found.files):
        yield Finding(MANIFEST_NAME, f"names tied tensors that no file holds: {_quoted(lacking)}")


def _file_findings(found: Survey) -> Iterator[Finding]:
    for one in found.all_files:
        if one.problem is not None:
            of_stock = f". {ONLY_STOCK_READS}" if one.record.name == PADDLE_METADATA_NAME else ""
            yield Finding(one.record.name, f"{one.problem}{of_stock}")
        if one.header_problem is not None:
            yield Finding(one.record.name, one.header_problem)
        if one.damaged and (one.problem is None or len(one.damaged) < one.record.chunks):
            yield Finding(one.record.name, _say_damage(one))
        for number, error in sorted(one.unreadable.items()):
            yield Finding(one.record.name, f"chunk {number} can't be read: {error}")
    for conflict in found.conflicts:
        yield Finding(_DIRECTORY, conflict)


def _say_damage(one: FileSurvey) -> str:
    ranges = [f"{start} to {stop}" for start, stop in damaged_ranges(one)]
    text = f"damaged, {len(one.damaged)} of its {one.record.chunks} chunks are not as they were written: bytes {listing(ranges)}"
    if one.record.name == PADDLE_METADATA_NAME:
        return f"{text}. {ONLY_STOCK_READS}"
    if one.entries is None:
        return f"{text}. That is its header too, so which keys it holds can't be told"
    return f"{text}. They hold {_held(keys_in_damage(one))}"


def keys_in_damage(one: FileSurvey) -> list[str]:
    """Return the keys of which a file stores values in damaged chunks, in the order of the file."""
    entries = one.entries or []
    stops = [*(entry[-1] for entry in entries[1:]), one.record.size]
    return [entry[0] for entry, stop in zip(entries, stops, strict=True) if one.is_damaged(entry[-1], stop)] if entries else []


def _stray_files(found: Survey) -> Iterator[Finding]:
    known = {one.record.name for one in found.all_files} | {MANIFEST_NAME}
    for name in sorted(os.listdir(found.index.path)):
        if name not in known and name.endswith(_FILES_THAT_STOCK_READS):
            yield Finding(name, "does not belong to this checkpoint, and stock Paddle may read it; move it elsewhere")


def _key_findings(found: Survey) -> Iterator[Finding]:
    plan = plan_whole(found.index, found.index.keys())
    yield from _coverage_findings(plan)
    yield from _difference_findings(found.index, [one for one in plan.duplicates if not _touches_damage(found, one)])


def _coverage_findings(plan: ReadPlan) -> Iterator[Finding]:
    for problem in plan.problems.uncovered:
        yield Finding(f"key '{problem.key}'", problem.text)


def _difference_findings(index: CheckpointIndex, duplicates: Iterable[Duplicate]) -> Iterator[Finding]:
    seen: set[tuple[str, int, int]] = set()
    for one in differing_duplicates(index, duplicates):
        if (one.key, one.file, one.other_file) not in seen:
            seen.add((one.key, one.file, one.other_file))
            names = f"{index.files[one.file].name} and {index.files[one.other_file].name}"
            yield Finding(f"key '{one.key}'", f"{names} hold different values for the same elements")


def _touches_damage(found: Survey, one: Duplicate) -> bool:
    return any(
        found.files[file].problem is not None or found.files[file].is_damaged(offset, offset + one.nbytes)
        for file, offset in ((one.file, one.file_offset), (one.other_file, one.other_offset))
    )


def _verify_stock(path: Path) -> VerifyReport:
    kind = "a checkpoint of stock Paddle"
    not_checked = ("the values: stock Paddle keeps no digests",)
    try:
        index = read_stock_index(path)
        plan = plan_whole(index, index.keys())
        findings = [*_coverage_findings(plan), *_difference_findings(index, plan.duplicates)]
    except CheckpointError as error:
        return VerifyReport(path, kind, None, None, 0, 0, (Finding(_DIRECTORY, str(error)),), not_checked)
    nbytes = sum(one.size for one in index.files)
    return VerifyReport(path, kind, None, len(index.files), len(index), nbytes, tuple(findings), not_checked)


def _held(keys: Sequence[str]) -> str:
    """Say of which keys there are values; of many, how many."""
    if not keys:
        return "no values"
    count = f"{counted(len(keys), 'key')}: " if len(keys) > FEW else ""
    return count + listing((f"'{key}'" for key in keys), FEW)


def _quoted(keys: Iterable[str]) -> str:
    return listing(f"'{key}'" for key in keys)
