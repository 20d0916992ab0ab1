"""Decide which bytes of a checkpoint's files a rank needs, and whether they are all there, before any is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import MismatchError, counted, listing
from ..pieces import Piece, overlaps, ranges_inside
from .entries import Stored
from .format import DTYPE_NBYTES
from .index import CheckpointIndex
from .problems import CASTABLE, KeyProblem, ReadProblems


class Read(NamedTuple):
    """Bytes that go from a file straight into the destination of a target.

    Attributes:
        file_offset: first byte in the file.
        target: position in :attr:`ReadPlan.targets`.
        target_offset: first byte in the target's own data.
        nbytes: how many bytes there are.
    """

    file_offset: int
    target: int
    target_offset: int
    nbytes: int


class Duplicate(NamedTuple):
    """The same values of a key, stored twice; files are positions in the index, offsets and lengths bytes."""

    key: str
    file: int
    file_offset: int
    other_file: int
    other_offset: int
    nbytes: int


FLOATING_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Paddle's names of the types between which values can be converted; see :mod:`.casts`."""


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Which bytes one rank reads, and where to.

    Attributes:
        index: of the checkpoint.
        targets: what the rank wants.
        problems: why the plan would not give the targets all their values. Targets that have one aren't read, or not wholly.
        reads: position of a file in the index -> what is read from it. No two reads meet in a target.
        duplicates: values that this rank reads and that are stored a second time.
    """

    index: CheckpointIndex
    targets: Sequence[Piece]
    problems: ReadProblems
    reads: dict[int, list[Read]]
    duplicates: list[Duplicate]

    @property
    def nbytes(self) -> int:
        """How many bytes the plan reads into the targets."""
        return sum(read.nbytes for reads in self.reads.values() for read in reads)


class _Run(NamedTuple):
    """Elements of a target, in its own 1-D data, and where a file has them."""

    start: int
    stop: int
    file: int
    file_offset: int


def plan_read(
    index: CheckpointIndex, targets: Sequence[Piece], expected_keys: Collection[str], ignored_keys: Collection[str] = ()
) -> ReadPlan:
    """Plan how one rank reads ``targets`` from the checkpoint; nothing is read and nothing changed.

    Every difference between checkpoint and objects becomes a problem of the plan; call ``plan.problems.raise_if_any()``.
    Values that are stored more than once are read from the first file that has them; :func:`~.reader.differing_duplicates`
    compares them with the others.

    Args:
        index: what the checkpoint holds.
        targets: what this rank wants. Several may be of one key; each needs to be a valid piece, but that its box may reach beyond the
            tensor: what of it does is not read.
        expected_keys: all keys of the objects, on any rank. Keys of ``targets`` count as expected.
        ignored_keys: keys that the checkpoint may have besides.
    """
    missing = {key for key in expected_keys if key not in index}
    wrong_shape: dict[str, KeyProblem] = {}
    wrong_dtype: dict[str, KeyProblem] = {}
    uncovered: list[KeyProblem] = []
    reads: dict[int, list[Read]] = {}
    duplicates: list[Duplicate] = []
    for number, target in enumerate(targets):
        key = target.key
        stored = index.stored.get(key)
        if stored is None:
            missing.add(key)
            continue
        shape, dtype = stored[0][1].global_shape, index.dtypes[key]
        if shape != target.global_shape:
            text = f"checkpoint has shape {list(shape)}, the model wants {list(target.global_shape)}"
            wrong_shape[key] = KeyProblem(key, text)
            continue
        if dtype != target.dtype:
            castable = f" {CASTABLE}" if {dtype, target.dtype} <= FLOATING_DTYPES else ""
            wrong_dtype[key] = KeyProblem(key, f"checkpoint has {dtype}, the model wants {target.dtype}{castable}")
            continue
        itemsize = DTYPE_NBYTES[dtype]
        runs = _find_runs(index, target, stored, itemsize)
        if len(runs) != 1:
            runs, twice = _split_duplicates(runs, itemsize)
            duplicates.extend(
                Duplicate(key, run.file, run.file_offset, other.file, other.file_offset, (run.stop - run.start) * itemsize)
                for run, other in twice
            )
        found = 0
        for start, stop, file, file_offset in runs:
            found += stop - start
            reads.setdefault(file, []).append(Read(file_offset, number, start * itemsize, (stop - start) * itemsize))
        if found != target.numel and found != sum(one.numel for one in ranges_inside(target)):
            uncovered.append(KeyProblem(key, _say_uncovered(target, runs)))
    expected = set(expected_keys).union(target.key for target in targets)
    problems = ReadProblems(
        index.path,
        tuple(sorted(missing)),
        tuple(sorted(index.keys() - expected - set(ignored_keys))),
        tuple(wrong_shape.values()),
        tuple(wrong_dtype.values()),
        tuple(uncovered),
        nothing_matched=len(missing) == len(expected),
    )
    return ReadPlan(index, targets, problems, reads, duplicates)


def plan_whole(index: CheckpointIndex, keys: Iterable[str]) -> ReadPlan:
    """Plan to read all of the tensors under some of the checkpoint's keys, as :func:`plan_read` does; nothing else is expected of it."""
    return plan_read(index, [index.whole_piece(key) for key in keys], ())


def check_complete(index: CheckpointIndex) -> list[Duplicate]:
    """Raise where a checkpoint doesn't hold every element of each of its keys; return what it holds twice.

    Raises:
        MismatchError: it lists the keys.
    """
    # Nearly all keys are ranges that follow each other, which the columns tell of all at once.
    keys = list(index.stored if index.table is None else index.table.uncovered_keys())
    if not keys:
        return []
    plan = plan_whole(index, keys)
    uncovered = plan.problems.uncovered
    if uncovered:
        raise MismatchError(
            f"{len(uncovered)} keys are not whole, though all ranks wrote what they have of them: {listing(map(str, uncovered))}"
        )
    return plan.duplicates


def _find_runs(index: CheckpointIndex, target: Piece, stored: Iterable[Stored], itemsize: int) -> list[_Run]:
    """Return where the target's elements lie, once for each time they are stored."""
    runs: list[_Run] = []
    local_shape, offset, flat = target.local_shape, target.global_offset, target.flat_range
    first, last = (0, target.numel) if flat is None else (flat.start, flat.stop)
    for one in stored:
        file, box, box_start, box_stop, file_offset = one
        if box.local_shape == local_shape and box.global_offset == offset:
            # What overlaps() does for equal boxes, without making a Piece: nearly all pieces come this way.
            start, stop = max(box_start, first), min(box_stop, last)
            if start < stop:
                runs.append(_Run(start - first, stop - first, file, file_offset + (start - box_start) * itemsize))
        else:
            for source_start, target_start, numel in overlaps(index.piece(target.key, one), target):
                runs.append(_Run(target_start, target_start + numel, file, file_offset + source_start * itemsize))
    return runs


def _split_duplicates(runs: list[_Run], itemsize: int) -> tuple[list[_Run], list[tuple[_Run, _Run]]]:
    """Return runs that cover the same elements once, in ascending order, and pairs of runs that hold equal elements."""
    once: list[_Run] = []
    twice: list[tuple[_Run, _Run]] = []
    for run in sorted(runs, key=lambda run: (run.start, run.file)):
        covered = once[-1].stop if once else 0
        earlier = len(once) - 1
        while earlier >= 0 and once[earlier].stop > run.start:
            other = once[earlier]
            start, stop = max(run.start, other.start), min(run.stop, other.stop)
            if start < stop:
                twice.append((_cut(other, start, stop, itemsize), _cut(run, start, stop, itemsize)))
            earlier -= 1
        if run.stop > covered:
            once.append(_cut(run, max(run.start, covered), run.stop, itemsize))
    return once, twice


def _cut(run: _Run, start: int, stop: int, itemsize: int) -> _Run:
    return _Run(start, stop, run.file, run.file_offset + (start - run.start) * itemsize)


def _say_uncovered(target: Piece, runs: Sequence[_Run]) -> str:
    inside = list(ranges_inside(target))
    first, wanted, found = inside[0].start, sum(one.numel for one in inside), sum(run.stop - run.start for run in runs)
    for one in inside:
        first = max(first, one.start)
        for run in runs:
            if run.start <= first < run.stop:
                first = run.stop
        if first < one.stop:
            break
    lacking = wanted - found
    is_whole = target.numel == math.prod(target.global_shape)
    which = f"its {counted(wanted, 'element')}" if is_whole else f"the {counted(wanted, 'element')} that this rank wants"
    place, rest = [], target.box_range.start + first
    for size, offset in zip(reversed(target.local_shape), reversed(target.global_offset), strict=True):
        rest, within = divmod(rest, size)
        place.append(offset + within)
    verb = "is" if lacking == 1 else "are"
    return f"{lacking:,} of {which} {verb} in no file, the first is the one at {place[::-1]} of {list(target.global_shape)}"
