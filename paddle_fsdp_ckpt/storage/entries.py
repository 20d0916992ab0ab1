"""What a file says about each piece that it stores, in a form light enough for a million of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ..layout import Range
from ..pieces import Piece, check_piece

MAX_DIMENSIONS = 64
"""The most dimensions that a tensor in a checkpoint may have."""

MAX_NUMEL = 1 << 62
"""The most elements that a tensor in a checkpoint may have."""

Outline: TypeAlias = "tuple[tuple[int, ...], ...]"
"""A box as files describe it: ``(global_shape,)`` where it is the whole tensor, else ``(global_shape, global_offset, local_shape)``."""


class Box(NamedTuple):
    """The part of a tensor that a piece, or the flat range of one, is taken from; see :class:`~paddle_fsdp_ckpt.pieces.Piece`."""

    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    numel: int

    def part(self, key: str, dtype: str, start: int, stop: int) -> Piece:
        """Return the readable form of a flat range of the box; one over all of it is given as the box."""
        flat_range = None if stop - start == self.numel else Range(start, stop)
        return Piece(key, dtype, self.global_shape, self.global_offset, self.local_shape, flat_range)


Entry: TypeAlias = "tuple[str, str, Box, int, int, int]"
"""One stored piece: key, dtype, box, first and past-the-last element of the box (0 and ``box.numel`` for the whole of it, which is also
how a flat range over all of it reads), and first byte in the file."""

Stored: TypeAlias = "tuple[int, Box, int, int, int]"
"""A stored piece of a known key, without the key: position of its file in the index, box, first and past-the-last element of
the box, first byte in the file."""


def box_of(outline: Outline, key: str = "") -> Box:
    """Return the box that a file describes so; ``key`` names it for the messages.

    Raises:
        ValueError: there is no such box.
        TypeError: it is made of something else than shapes.
    """
    if len(outline) not in (1, 3):
        raise ValueError(f"{[list(part) for part in outline]} is not the description of a piece")
    if max(map(len, outline)) > MAX_DIMENSIONS:
        raise ValueError(f"a shape has {max(map(len, outline))} dimensions, and at most {MAX_DIMENSIONS} are allowed")
    if not all(type(number) is int for part in outline for number in part):
        raise ValueError(f"{[list(part) for part in outline]} holds something else than whole numbers")
    global_shape = outline[0]
    if max(global_shape, default=0) > MAX_NUMEL or math.prod(global_shape) > MAX_NUMEL:
        raise ValueError(f"a tensor of more than {MAX_NUMEL} elements")
    _, offset, local_shape = outline if len(outline) == 3 else (global_shape, (0,) * len(global_shape), global_shape)
    check_piece(Piece(key, "", global_shape, offset, local_shape, Range(0, 0)))
    return Box(global_shape, offset, local_shape, math.prod(local_shape))


def keys_between(entries: Sequence[Entry], size: int, start: int, stop: int) -> list[str]:
    """Return the keys of which a file of ``size`` bytes has some of the bytes ``[start, stop)``; ``entries`` is all it stores, in order."""
    ends = [*(entry[-1] for entry in entries[1:]), size]
    return [entry[0] for entry, end in zip(entries, ends, strict=True) if entry[-1] < stop and start < end] if entries else []
