"""Find what was written to whole weights inside a forward, and would be lost when they are let go of.

Paddle counts most changes in place, and a unit looks at the counts; its initializers and raw kernels, such as ``exponential_``, count nothing.
So each rank compares its own slice of the whole buffer with what it keeps: together the ranks see every element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import paddle

if TYPE_CHECKING:
    from .live_buffer import LiveBuffer
    from .unit import Unit

_BITS = {2: "int16", 4: "int32", 8: "int64"}


class LostWrites:
    """The units of one model whose whole weights were written to since somebody asked."""

    def __init__(self) -> None:
        self._untouched: dict[int, paddle.Tensor] = {}

    def look(self, unit: Unit) -> None:
        """Compare what is gathered of a unit with what this rank keeps of it. No collective operation, and the device isn't waited for."""
        for buffer in unit.buffers:
            if buffer.whole is not None and not buffer.communicator.alone:
                now, before = _is_untouched(buffer, buffer.whole), self._untouched.get(unit.index)
                self._untouched[unit.index] = now if before is None else before.logical_and(now)

    def take(self) -> int:
        """Return 1 + the index of a unit that was written to, or 0, and forget it."""
        untouched, self._untouched = self._untouched, {}
        if not untouched:
            return 0
        answers = paddle.stack(list(untouched.values())).numpy()
        return max((index + 1 for index, answer in zip(untouched, answers, strict=True) if not answer), default=0)


def _is_untouched(buffer: LiveBuffer, whole: paddle.Tensor) -> paddle.Tensor:
    mine = buffer.layout.shard(buffer.communicator.rank)
    # As integers, so that a NaN is equal to itself.
    bits = _BITS[int(whole.element_size())]
    with paddle.no_grad():
        return paddle.equal_all(whole._slice(mine.start, mine.stop).view(bits), buffer.shard.view(bits))
