"""What of a checkpoint's values must be judged before anything changes, beyond keys, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import MismatchError
from ..pieces import Piece
from ..progress import ProgressLine
from ..shardings import StateLoad
from ..storage.casts import can_cast, may_overflow, read_cast
from ..storage.index import CheckpointIndex
from ..storage.plan import ReadPlan, plan_read
from ..storage.problems import KeyProblem, OtherProblem, ReadProblems
from ..storage.reader import differing_duplicates, verify_first
from .planned import KeyTarget, read_targets


@dataclass(frozen=True)
class Values:
    """A checkpoint's values, as one load takes them.

    Attributes:
        index: where they lie.
        cast: whether floating point values are converted.
        progress: shows how far it is where many are read.
    """

    index: CheckpointIndex
    cast: bool
    progress: ProgressLine

    def stored_piece(self, target: KeyTarget) -> Piece:
        """Return what is read for a target, in the dtype that is stored where that is converted."""
        stored = self.index.dtypes[target.source]
        return replace(target.piece, dtype=stored) if self.cast and can_cast(stored, target.piece.dtype) else target.piece

    def check(self, targets: Sequence[KeyTarget], reads: ReadPlan, copies: Sequence[tuple[StateLoad, list[KeyTarget]]]) -> ReadProblems:
        """Read what must be judged before anything changes, and judge it.

        Args:
            targets: what is loaded.
            reads: how.
            copies: what optimizers judge themselves, see :attr:`~.shardings.StateLoad.copies`.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """
        dtypes, files = self.index.dtypes, self.index.files
        conflicts = {
            KeyProblem(two.key, f"{files[two.file].name} and {files[two.other_file].name} hold different values for the same elements")
            for two in differing_duplicates(self.index, reads.duplicates)
        }
        narrowed = [one for one in targets if may_overflow(dtypes[one.source], one.piece.dtype)]
        if narrowed:
            self._verify(narrowed)
        overflows = zip(narrowed, read_cast(self.index, [one.piece for one in narrowed], None), strict=True)
        too_large = [
            KeyProblem(one.key, f"{count} of its {dtypes[one.source]} values are too large for {one.piece.dtype}")
            for one, count in overflows
            if count
        ]
        others = [text for loading, some in copies if some for text in self._check_copies(loading, some)]
        return ReadProblems(
            self.index.path, wrong_dtype=tuple(too_large), conflicts=tuple(sorted(conflicts)), others=tuple(map(OtherProblem, others))
        )

    def _check_copies(self, loading: StateLoad, copies: Sequence[KeyTarget]) -> list[str]:
        """Say what an optimizer has against the values that it would get."""
        read_targets(self.index, copies, self._verify(copies), self.progress)
        try:
            loading.check()
        except MismatchError as error:
            return [str(error)]
        return []

    def _verify(self, targets: Sequence[KeyTarget]) -> ReadPlan:
        """Return how to read some of the targets, of which all digests are right."""
        reads = plan_read(self.index, [self.stored_piece(one) for one in targets], ())
        verify_first(reads)
        return reads
