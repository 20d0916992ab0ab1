"""What ``load_huggingface`` did, for the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import counted, listing
from .loading.report import RESIZED, Resized


class OtherShape(NamedTuple):
    """A parameter or buffer that kept its values, since what it would come from has another shape.

    Attributes:
        key: its name in the model; of several, the first of which that is so.
        stored: name of each tensor that it would come from -> the whole shape that this has in the files.
        now: its own shape.
    """

    key: str
    stored: dict[str, tuple[int, ...]]
    now: tuple[int, ...]

    def __str__(self) -> str:
        stored = listing(f"'{name}' {list(shape)}" for name, shape in self.stored.items())
        return f"'{self.key}': {stored} there, {list(self.now)} here"


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
        other_shape: parameters and buffers that kept their values, since what they would come from has another shape, as
            ``allow_other_shape`` allows.
        resized: parameters and buffers of which what they come from has another size in one dimension, as ``resize`` allows: the leading
            rows, or columns, that both have were loaded.
    """

    path: Path
    tensors: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unused_options: tuple[str, ...] = ()
    other_shape: tuple[OtherShape, ...] = ()
    resized: tuple[Resized, ...] = ()

    def __str__(self) -> str:
        lists: list[tuple[Sequence[str], str, str]] = [
            (self.missing, "key missing, left as it was", "keys missing, left as they were"),
            (
                [str(one) for one in self.other_shape],
                "key of another shape there, left as it was",
                "keys of another shape there, left as they were",
            ),
            ([str(one) for one in self.resized], *RESIZED),
            (self.unexpected, "tensor left out", "tensors left out"),
            (self.unused_options, "option not needed", "options not needed"),
        ]
        lines = [f"loaded '{self.path}': {counted(self.tensors, 'tensor')}"]
        lines += [f"{counted(len(items), one, several)}: {listing(items)}" for items, one, several in lists if items]
        return "\n- ".join(lines)
