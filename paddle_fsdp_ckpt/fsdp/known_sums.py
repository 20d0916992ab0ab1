"""What is remembered of checksums of a sharded model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class KnownSums:
    """Sums of the elements of this rank's pieces, so that none is computed or sent again while the pieces don't change.

    Attributes:
        mine: first name of a parameter -> how often this rank's piece of it had changed then, and the sum.
        told: digest of the sums that rank 0 heard last of this rank.
        heard: on rank 0, of each rank: the digest and the sums that it heard last.
        are_trusted: whether nobody can write to the pieces without its being counted.
    """

    mine: dict[str, tuple[int, int]] = field(default_factory=dict)
    told: str | None = None
    heard: dict[int, tuple[str, Sequence[int]]] = field(default_factory=dict)
    are_trusted: bool = True
