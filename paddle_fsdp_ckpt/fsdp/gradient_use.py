"""Which gradients a step has used, and whether backwards add to those: what tells whether a save loses some that a step still needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parameter_shard import ParameterShard


class GradientUse:
    """The loop's habits, as far as this rank saw them.

    Attributes:
        adds_to_used: a backward added to gradients that a step had used before, as where nobody clears them at each step. It is so until
            such gradients were cleared twice, and none was added to between.
    """

    def __init__(self) -> None:
        self.adds_to_used = False
        self._added = False
        self._cleared = False

    def awaits_step(self, shards: Iterable[ParameterShard]) -> bool:
        """Tell whether a later step will use a gradient that one of these parameters has."""
        return any(shard.is_unused or (shard.is_left and self.adds_to_used) for shard in shards)

    def step_uses(self, shards: Iterable[ParameterShard]) -> None:
        """A step is about to use the gradients that these parameters have."""
        if self._cleared:
            # A loop that clears now and then, though not after each step, adds to some between.
            self.adds_to_used, self._added, self._cleared = self._added, False, False
        for shard in shards:
            # A rank that keeps nothing of it may not learn that others drop it.
            shard.is_unused, shard.is_left = False, shard.has_gradient and not shard.is_zero and shard.range.numel > 0

    def added_to_used(self) -> None:
        """A backward added to a gradient that a step had used."""
        self.adds_to_used = self._added = True

    def cleared_used(self) -> None:
        """A gradient was cleared that a step had used."""
        self._cleared = True
