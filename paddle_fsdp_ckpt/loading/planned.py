"""A load that is planned: what one rank reads, and into what; and how that is carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import paddle

from ..errors import counted, listing
from ..host_memory import destinations
from ..meeting import digest_of
from ..pieces import Piece
from ..progress import ProgressLine
from ..saved_run import SavedRun
from ..shardings import StateLoad
from ..storage.base_parameter import BaseParameter
from ..storage.besides import SavedBesides
from ..storage.casts import read_cast
from ..storage.format import MANIFEST_NAME
from ..storage.index import CheckpointIndex
from ..storage.key_names import RESERVED_PREFIX
from ..storage.plan import ReadPlan, plan_read
from ..storage.problems import ReadProblems
from ..storage.ranges import FileRanges
from ..storage.reader import execute_read, read_ranges
from ..subjects import Subjects
from .options import LoadOptions
from .report import LoadNotes


class Reading(Protocol):
    """What a load reads, and into what."""

    @property
    def count(self) -> int:
        """How many keys are loaded."""
        ...

    def read(self, index: CheckpointIndex, progress: ProgressLine, *, check_digests: bool) -> None:
        """Read everything into its place."""
        ...


class KeyTarget(NamedTuple):
    """One key to load.

    Attributes:
        key: its name in the objects.
        piece: what is wanted, and of which key of the checkpoint, by the names of the objects; in the dtype that is wanted.
        tensor: where the values go.
        is_substitute: that key is another value of the same parameter: the master weight, or for that the parameter itself.
    """

    key: str
    piece: Piece
    tensor: paddle.Tensor
    is_substitute: bool = False

    @property
    def source(self) -> str:
        """The key of the checkpoint, by the names of the objects."""
        return self.piece.key


@dataclass(frozen=True, eq=False)
class TargetReading:
    """Targets, each for itself: what is read for each of them, in the dtypes of the checkpoint."""

    targets: list[KeyTarget]
    reads: ReadPlan

    @property
    def count(self) -> int:
        """How many keys are loaded."""
        return len(self.targets)

    def read(self, index: CheckpointIndex, progress: ProgressLine, *, check_digests: bool) -> None:
        """Read everything into its place."""
        read_targets(index, self.targets, self.reads, progress, check_digests=check_digests)


@dataclass(frozen=True, eq=False)
class RangeReading:
    """Ranges of files that are what the memory behind the tensors holds.

    Attributes:
        count: how many keys are loaded.
        ranges: position of a file in the index -> what to read of it.
        tensors: what keeps the memory where it is.
    """

    count: int
    ranges: dict[int, FileRanges]
    tensors: list[paddle.Tensor]

    def read(self, index: CheckpointIndex, progress: ProgressLine, *, check_digests: bool) -> None:
        """Read everything into its place."""
        nbytes = sum(int(some.nbytes.sum()) for some in self.ranges.values())
        counter = progress.counter(nbytes) if progress.is_shown and nbytes else None
        read_ranges(index, self.ranges, check_digests=check_digests, on_read=counter)


@dataclass(frozen=True)
class LoadPlan:
    """What one rank will read, and into what. It must not be carried out where any rank has problems.

    Attributes:
        index: of the checkpoint, by the names of the objects.
        run: what it says about its run, by the names of the objects.
        options: what may differ.
        subjects: what is loaded: the parts that were chosen, of the objects that were given.
        reading: what is read, and into what.
        problems: of this rank.
        state_loads: one an optimizer where there is something to do before or after.
        notes: what this rank has to report.
        without_state: see :class:`~.report.LoadReport`; the same on all ranks, as are the following.
        not_asked_for: see there.
        mapped: see there.
        copied_tied: see there.
        unused_prefixes: entries of ``key_map`` that nothing needed.
        damaged: see there.
        base: parameters of the model that the checkpoint leaves to the base, and what they were.
        besides: what a manager saved that is neither the model's nor an optimizer's; None where that can't be read.
    """

    index: CheckpointIndex
    run: SavedRun
    options: LoadOptions
    subjects: Subjects
    reading: Reading
    problems: ReadProblems
    state_loads: Sequence[StateLoad] = ()
    notes: LoadNotes = field(default_factory=LoadNotes)
    without_state: list[str] = field(default_factory=list)
    not_asked_for: list[str] = field(default_factory=list)
    mapped: dict[str, str] = field(default_factory=dict)
    copied_tied: list[str] = field(default_factory=list)
    unused_prefixes: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    base: dict[str, BaseParameter] = field(default_factory=dict)
    besides: SavedBesides | None = field(default_factory=SavedBesides)

    @property
    def lost(self) -> str:
        """Why keys that objects have are lost, each reason once; empty where none is."""
        return listing(dict.fromkeys(why for name, why in self.damaged.items() if not name.startswith((RESERVED_PREFIX, MANIFEST_NAME))))

    @property
    def damage(self) -> str:
        """What is damaged that objects have, as a sentence for an error; empty where nothing is."""
        damaged = [name for name in self.damaged if not name.startswith(RESERVED_PREFIX)]
        if not damaged:
            return ""
        what = counted(len(damaged), "key or file of it is", "keys or files of it are")
        return f"\n{what} damaged; what is lost counts as missing: {listing(damaged)}; allow_missing says which may be"

    def digest(self) -> str:
        """Return a digest that two ranks have alike only where they see the same checkpoint, with the same damage."""
        return digest_of(repr((self.index.digest(), sorted(self.damaged))))

    def read(self, progress: ProgressLine) -> None:
        """Read everything into its place."""
        with progress:
            self.reading.read(self.index, progress, check_digests=self.options.check_digests)
        for one in self.state_loads:
            one.finish()


def counter_of(progress: ProgressLine, reads: ReadPlan) -> Callable[[int], None] | None:
    """Return what shows how much of a plan is read when it is told of each few bytes; None where nobody looks."""
    return progress.counter(sum(one.nbytes for some in reads.reads.values() for one in some)) if progress.is_shown else None


def read_targets(
    index: CheckpointIndex, targets: Sequence[KeyTarget], reads: ReadPlan, progress: ProgressLine, *, check_digests: bool = True
) -> None:
    """Read the values of the targets into them, those of other dtypes through a buffer of bounded size."""
    pieces = [one.piece for one in targets]
    cast: list[int] = []
    direct: list[int] = []
    for number, piece in enumerate(pieces):
        (direct if piece.dtype == index.dtypes[piece.key] else cast).append(number)
    with destinations([one.tensor for one in targets]) as views:
        if not cast:
            execute_read(reads, views, check_digests=check_digests, on_read=counter_of(progress, reads))
            return
        plan = plan_read(index, [pieces[number] for number in direct], ())
        wanted = [views[number] for number in direct]
        execute_read(plan, wanted, check_digests=check_digests, on_read=counter_of(progress, plan))
        read_cast(index, [pieces[number] for number in cast], [views[number] for number in cast], check_digests=check_digests)
