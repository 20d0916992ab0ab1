"""What ``load_huggingface`` did, for the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import counted, listing


@dataclass(frozen=True)
class HuggingFaceLoadReport:
    """What :func:`~.load_huggingface` did; the same on all ranks.

    Attributes:
        path: the directory of the Hugging Face model.
        tensors: how many tensors of its files were read into the model, by all ranks together.
        missing: parameters and buffers that kept their values, since the files lack what they would come from, or no rule of the recipe
            takes them, as ``allow_missing`` allows.
        unexpected: tensors of the files that went nowhere, as ``allow_unexpected`` allows.
        unused_options: patterns that nothing needed; perhaps they are misspelt.
    """

    path: Path
    tensors: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unused_options: tuple[str, ...] = ()

    def __str__(self) -> str:
        lists: list[tuple[Sequence[str], str, str]] = [
            (self.missing, "key missing, left as it was", "keys missing, left as they were"),
            (self.unexpected, "tensor left out", "tensors left out"),
            (self.unused_options, "option not needed", "options not needed"),
        ]
        lines = [f"loaded '{self.path}': {counted(self.tensors, 'tensor')}"]
        lines += [f"{counted(len(items), one, several)}: {listing(items)}" for items, one, several in lists if items]
        return "\n- ".join(lines)
