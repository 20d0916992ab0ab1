"""What a checkpoint without its base says of one parameter of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .checksums import CHECKSUM_LENGTH

_TEXT = re.compile(rf"([a-z0-9]+) \[((?:[0-9]{{1,18}}(?:, [0-9]{{1,18}})*)?)\] ([0-9a-f]{{{CHECKSUM_LENGTH}}})", re.ASCII)


@dataclass(frozen=True)
class BaseParameter:
    """What a checkpoint without it says of a parameter of the base that it belongs to.

    Attributes:
        dtype: Paddle's dtype name.
        shape: of the whole tensor.
        checksum: of its values, see :mod:`.checksums`.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str

    def to_text(self) -> str:
        """Return the description in a line; :meth:`from_text` is the inverse."""
        return f"{self.dtype} {list(self.shape)} {self.checksum}"

    @classmethod
    def from_text(cls, text: str, name: str) -> BaseParameter:
        """Build a description from what :meth:`to_text` returned; ``name`` is the parameter's, for the message.

        Raises:
            ValueError: it is something else.
        """
        found = _TEXT.fullmatch(text)
        if not found:
            raise ValueError(f"base parameter '{name}' is {text!r:.100}, not dtype, shape and checksum")
        return cls(found[1], tuple(map(int, found[2].split(", "))) if found[2] else (), found[3])
