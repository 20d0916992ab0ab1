"""Which parameters of a sharded model have lost their values on this rank, by a write that did not come where it should."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import ShardingError

if TYPE_CHECKING:
    from .parameter_shard import ParameterShard


class LostValues:
    """The parameters of one model, until they are given values again."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}

    def note(self, shards: Iterable[ParameterShard], message: str) -> None:
        """These have lost them; the message says how, and the way out."""
        for shard in shards:
            self._said.setdefault(shard.index, message)

    def forget(self, shards: Iterable[ParameterShard]) -> None:
        """These were given whole values."""
        for shard in shards if self._said else ():
            self._said.pop(shard.index, None)

    def has(self, shard: ParameterShard) -> bool:
        """Tell whether a parameter is one of them."""
        return shard.index in self._said

    def error(self) -> ShardingError | None:
        """Return what says how one lost them; None where none did."""
        return next((ShardingError(message) for message in self._said.values()), None)

    def check(self) -> None:
        """Raise where there is one.

        Raises:
            ShardingError: it says what was done.
        """
        error = self.error()
        if error is not None:
            raise error

    def vote(self, shards: Sequence[ParameterShard]) -> int:
        """Return 1 + the index of one, or of a parameter whose gradient was lost, for the ranks to compare; 0 where there is none."""
        if self._said:
            return 1 + max(self._said)
        return max((1 + shard.index for shard in shards if shard.lost_gradient() is not None), default=0)

    def raise_voted(self, shards: Sequence[ParameterShard], voted: int) -> None:
        """Raise this rank's own error, or one that names the parameter which another rank voted for.

        Raises:
            ShardingError: always.
        """
        self.check()
        for shard in shards:
            shard.check_lent_gradient()
        raise ShardingError(
            f"{shards[voted - 1].describe()}: on another rank its values or its gradient were lost, by a write of another dtype or shape; "
            "the error there says how. Nothing was stepped"
        )
