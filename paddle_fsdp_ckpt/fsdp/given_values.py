"""Which whole values parameters were given on this rank, by ``set_value``, until the ranks compare what each was given."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import paddle
from xxhash import xxh3_64

from ..host_memory import chunks_of

if TYPE_CHECKING:
    from .parameter_shard import ParameterShard


class GivenValues:
    """The values of one model's parameters.

    Args:
        are_compared: whether there are other ranks.
    """

    def __init__(self, *, are_compared: bool) -> None:
        self._are_compared = are_compared
        self._digests: dict[int, str] = {}

    @property
    def checksum(self) -> int:
        """What stands for the values that were given last since the last step, in whatever order, in 24 bits; the same on every rank."""
        return zlib.crc32(repr(sorted(self._digests.items())).encode()) & 0xFFFFFF

    def note(self, shard: ParameterShard, value: paddle.Tensor) -> None:
        """Remember the whole value that a parameter was given."""
        if self._are_compared:
            digest = xxh3_64()
            for part in chunks_of(value):
                digest.update(part)
            self._digests[shard.index] = digest.hexdigest()

    def forget(self, shards: Iterable[ParameterShard]) -> None:
        """These parameters have other values now, which fit on all ranks."""
        for shard in shards:
            self._digests.pop(shard.index, None)

    def clear(self) -> None:
        """The ranks have compared."""
        self._digests.clear()
