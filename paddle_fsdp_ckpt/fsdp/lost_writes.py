"""Find what was written to whole weights inside a forward, and would be lost when they are let go of.

Paddle counts most changes in place, and a unit looks at the counts; some initializers and raw kernels, such as ``exponential_``, count
nothing. So each rank compares its own slice of the whole buffer with what it keeps: together the ranks see every element.
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
        self._written: dict[int, paddle.Tensor] = {}

    def look(self, unit: Unit) -> None:
        """Compare what is gathered of a unit with what this rank keeps of it. No collective operation, and the device isn't waited for."""
        for buffer in unit.buffers:
            if buffer.whole is not None and not buffer.communicator.alone:
                now, before = _is_written(buffer, buffer.whole), self._written.get(unit.index)
                self._written[unit.index] = now if before is None else before.logical_or(now)

    def take(self) -> int:
        """Return 1 + the index of a unit that was written to, or 0, and forget it."""
        written, self._written = self._written, {}
        if not written:
            return 0
        answers = paddle.stack(list(written.values())).numpy()
        return max((index + 1 for index, answer in zip(written, answers, strict=True) if answer), default=0)


def _is_written(buffer: LiveBuffer, whole: paddle.Tensor) -> paddle.Tensor:
    mine = buffer.layout.shard(buffer.communicator.rank)
    # As integers, so that a NaN is equal to itself; of the same size, since Paddle 3.3.1 views a slice at a wrong place otherwise.
    bits = _BITS[int(whole.element_size())]
    with paddle.no_grad():
        return (whole._slice(mine.start, mine.stop).view(bits) != buffer.shard.view(bits)).any()
