"""Which whole values parameters were given on this rank, by ``set_value``, until the ranks compare what each was given."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import paddle

if TYPE_CHECKING:
    from .parameter_shard import ParameterShard

_SAMPLES = 1 << 16
"""How many elements of a value, about, stand for all of it."""


class GivenValues:
    """The values of one model's parameters.

    Args:
        are_compared: whether there are other ranks.
    """

    def __init__(self, *, are_compared: bool) -> None:
        self._are_compared = are_compared
        self._checksums: dict[int, int] = {}

    @property
    def checksum(self) -> int:
        """What stands for the values that were given last since the last step, in whatever order, in 24 bits; the same on every rank."""
        return zlib.crc32(repr(sorted(self._checksums.items())).encode()) & 0xFFFFFF

    def note(self, shard: ParameterShard, value: paddle.Tensor) -> None:
        """Remember the whole value that a parameter was given."""
        if self._are_compared:
            flat = value.detach().reshape([-1])
            if flat.shape[0] > _SAMPLES:
                flat = flat[:: flat.shape[0] // _SAMPLES]
            self._checksums[shard.index] = zlib.crc32(flat.numpy().tobytes())

    def forget(self, shards: Iterable[ParameterShard]) -> None:
        """These parameters have other values now, which fit on all ranks."""
        for shard in shards:
            self._checksums.pop(shard.index, None)

    def clear(self) -> None:
        """The ranks have compared."""
        self._checksums.clear()
