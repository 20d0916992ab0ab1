"""The text that the demo trains on: bytes as tokens, and batches that depend on nothing but the step's number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCABULARY = 256
"""How many tokens there are: one for each value of a byte."""

BATCH_SIZE = 6
"""Sequences a step over all ranks: 6, 3 or 2 for each of 1, 2 or 3 ranks."""

LENGTH = 128
"""Bytes a sequence."""

_SEED = 20

Tokens = npt.NDArray[np.int64]
"""Token numbers, one row a sequence."""


def read_corpus(path: Path | None = None) -> npt.NDArray[np.uint8]:
    """Return the bytes of a file, or of Python's help topics, which every Python brings along."""
    return np.frombuffer(path.read_bytes() if path is not None else _help_topics(), dtype=np.uint8)


def _help_topics() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


@dataclass(frozen=True)
class Batches:
    """Batches of equally long sequences, cut from a corpus at random places.

    A step's batch depends on the seed and the step only, so that it is the same at every world size and after a resume;
    the ranks share it in equal parts.

    Attributes:
        corpus: the text as bytes.
        batch_size: sequences a step, over all ranks.
        length: tokens a sequence.
        seed: which random places.
    """

    corpus: npt.NDArray[np.uint8]
    batch_size: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.corpus) <= self.length:
            raise ValueError(f"the text has {len(self.corpus)} bytes; sequences of {self.length} need at least {self.length + 1}")

    def whole(self, step: int) -> Tokens:
        """Return all sequences of a step, each one token longer than ``length``: inputs and labels overlap."""
        starts = np.random.default_rng([self.seed, step]).integers(0, len(self.corpus) - self.length, size=self.batch_size)
        return self.corpus[starts[:, None] + np.arange(self.length + 1)].astype(np.int64)

    def part(self, step: int, rank: int, world_size: int) -> tuple[Tokens, Tokens]:
        """Return one rank's share of a step: the inputs, and for each input the token that follows it."""
        if self.batch_size % world_size:
            raise ValueError(f"{self.batch_size} sequences a step can't be shared equally by {world_size} ranks")
        share = self.batch_size // world_size
        sequences = self.whole(step)[rank * share : (rank + 1) * share]
        return sequences[:, :-1], sequences[:, 1:]


def open_batches(path: Path | None) -> Batches:
    """Return the batches that the demo trains on, cut from a file or from Python's help topics.

    Raises:
        OSError: the file can't be read.
        ValueError: it is too short for one sequence.
    """
    return Batches(read_corpus(path), BATCH_SIZE, LENGTH, _SEED)
