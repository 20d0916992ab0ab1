"""What ranks did with a model since the last step and must have done alike, and what they tell each other: one reduction of integers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import ShardingError

if TYPE_CHECKING:
    from .communication import Communicator
    from .live_buffer import LiveBuffer
    from .parameter_shard import ParameterShard
    from .unit import Unit

_DIFFERENCES = (
    "did not gather and reduce the same units in the same order since the last step; run the same layers on every rank",
    "differ in which parameters are frozen (stop_gradient); freeze the same ones on every rank",
    "differ in the optimizer's learning rate, parameters or another setting, or some read p.grad where others step; do the same on all",
    "differ in which parameters have a gradient from before; call clear_grad, or set p.grad to None, on all that keep a piece of p",
    "gave set_value other values, or some none; call it on every rank with the same value, or load_full_state_dict(from_rank=0)",
)
_OF_PRESENCE = 3
"""The one of these that is looked at again, see :func:`_settle_presence`."""


class Agreed(NamedTuple):
    """What holds on any rank.

    Attributes:
        got_gradient: for each parameter, whether a gradient arrived.
        is_pending: for each flat buffer, whether it has gradients to reduce.
        written: 1 + the index of a unit that was written to inside a forward, or 0.
        lost: 1 + the index of a parameter whose values or gradient were lost, or 0.
    """

    got_gradient: list[bool]
    is_pending: list[bool]
    written: int
    lost: int


class StepAgreement:
    """The journal of one model's collective operations since the last step, and its comparison."""

    def __init__(self) -> None:
        self._journal = 0

    def note(self, what: str, unit: Unit) -> None:
        """Remember that a unit was gathered, or its gradients reduced."""
        # FNV-1a over 24 bits, so that the value and its negative fit an int32.
        for byte in (unit.index & 0xFF, unit.index >> 8 & 0xFF, ord(what[0])):
            self._journal = ((self._journal ^ byte) * 0x01000193) & 0xFFFFFF

    def reach(
        self,
        communicator: Communicator,
        shards: Sequence[ParameterShard],
        buffers: Sequence[LiveBuffer],
        *,
        written: int,
        lost: int,
        settings: object,
        given: int,
    ) -> Agreed:
        """Compare what must be alike, and return what holds on any rank; the journal begins anew. A collective operation.

        Args:
            communicator: the ranks.
            shards: all parameters.
            buffers: all flat buffers.
            written: this rank's, see :class:`Agreed`.
            lost: the same.
            settings: of the optimizer that is about to step; None of none.
            given: a checksum of 24 bits of what ``set_value`` was given.

        Raises:
            ShardingError: the ranks differ; the journal is as it was.
        """
        flags: list[int] = [shard.got_gradient for shard in shards]
        flags += [buffer.has_pending_gradient for buffer in buffers]
        flags += [written, lost]
        frozen = bytes(shard.parameter.stop_gradient for shard in shards)
        present = bytes(shard.has_gradient for shard in shards)
        # Of 24 bits, so that each value and its negative fit an int32; where all have the same, the largest of both are opposite.
        alike = [self._journal, *(zlib.crc32(text) & 0xFFFFFF for text in (frozen, repr(settings).encode(), present)), given]
        agreed = communicator.max_of_integers(np.array([*flags, *alike, *(-value for value in alike)], dtype=np.int32)).tolist()
        unequal = [largest != -smallest for largest, smallest in zip(agreed[-10:-5], agreed[-5:], strict=True)]
        if sum(unequal) == 1 and unequal[_OF_PRESENCE]:
            unequal[_OF_PRESENCE] = not _settle_presence(communicator, shards)
        for is_unequal, problem in zip(unequal, _DIFFERENCES, strict=True):
            if is_unequal:
                raise ShardingError(f"weights or gradients would be mixed up, so nothing was stepped: the ranks {problem}")
        for shard in shards:
            shard.is_dropped = False
        self._journal = 0
        got, pending = agreed[: len(shards)], agreed[len(shards) : len(flags) - 2]
        return Agreed(list(map(bool, got)), list(map(bool, pending)), *agreed[len(flags) - 2 : len(flags)])


def _settle_presence(communicator: Communicator, shards: Sequence[ParameterShard]) -> bool:
    """Drop gradients that the ranks which keep a piece of them dropped; tell whether ranks agree then. A collective operation.

    ``if p.grad is not None: p.grad = None`` does nothing on a rank that keeps nothing of a parameter, since it sees no gradient.
    """
    kept = [shard.has_gradient and shard.range.numel > 0 for shard in shards]
    absent = [not shard.has_gradient for shard in shards]
    found = communicator.max_of_integers(np.array([*kept, *absent], dtype=np.int32)).astype(bool)
    is_kept, is_absent = found[: len(shards)], found[len(shards) :]
    if (is_kept & is_absent).any():
        return False
    for shard, kept_somewhere in zip(shards, is_kept.tolist(), strict=True):
        if not kept_somewhere:
            shard.has_gradient = False
    return True
