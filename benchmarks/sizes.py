"""How large the models are: parameters in bfloat16 with AdamW and master weights, so six keys and 14 bytes an element for each."""

from __future__ import annotations

from dataclasses import dataclass

KEYS_A_PARAMETER = 6
NBYTES_AN_ELEMENT = 14


@dataclass(frozen=True)
class Size:
    """A model of equal parameters.

    Attributes:
        parameters: how many.
        shape: of each.
        parameters_a_block: how many are gathered together.
    """

    parameters: int
    shape: tuple[int, int]
    parameters_a_block: int

    @property
    def keys(self) -> int:
        """How many keys parameters and states have."""
        return self.parameters * KEYS_A_PARAMETER

    def __str__(self) -> str:
        return f"{self.parameters:,} parameters of {list(self.shape)}: {self.keys:,} keys"

    @property
    def nbytes(self) -> int:
        """About how many bytes they have."""
        return self.parameters * self.shape[0] * self.shape[1] * NBYTES_AN_ELEMENT

    def blocks(self) -> list[int]:
        """Return how many parameters each block has."""
        return [min(self.parameters_a_block, self.parameters - first) for first in range(0, self.parameters, self.parameters_a_block)]


FULL = {
    "big": Size(100, (1024, 1024), 10),
    "many": Size(4_000, (48, 48), 10),
    "scale": Size(18_867, (4, 4), 9),  # as many parameters as Qwen3-30B-A3B
}
QUICK = {"big": Size(8, (64, 64), 4), "many": Size(20, (16, 16), 5), "scale": Size(40, (4, 4), 8)}
