"""A unit: flat buffers that are gathered and released together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import ShardingError
from .live_buffer import LiveBuffer
from .parameter_shard import ParameterShard

if TYPE_CHECKING:
    from .recomputation import RunningBackward
    from .runtime import Runtime


class Unit:
    """Flat buffers that are gathered and released together.

    Attributes:
        generation: counts the changes of this rank's data, so that weights saved before a change are told from the new ones.
        uses: how many forwards of layers that need the unit are running.
        held: needed until the outermost forward ends, because a parameter was used outside its layer's forward.
        held_by: needed until this ends, for the same reason.
        backward_calls: backwards of its layers that are still to come.
        in_backward: a backward has begun for it, since the last step or forward.
    """

    def __init__(self, runtime: Runtime, name: str, index: int) -> None:
        self._runtime = weakref.ref(runtime)
        self.name = name
        self.index = index
        self.buffers: list[LiveBuffer] = []
        self.generation = 0
        self.uses = 0
        self.held = False
        self.held_by: RunningBackward | None = None
        self.backward_calls = 0
        self.in_backward = False
        self.is_filled = False

    @property
    def runtime(self) -> Runtime:
        """The runtime of the unit's model."""
        runtime = self._runtime()
        assert runtime is not None
        return runtime

    @property
    def is_gathered(self) -> bool:
        """Whether the whole buffers are in memory."""
        return self.buffers[0].whole is not None

    @property
    def shards(self) -> list[ParameterShard]:
        """All parameters of the unit."""
        return [shard for buffer in self.buffers for shard in buffer.shards]

    def gather(self) -> None:
        """Fetch the whole buffers. A collective operation."""
        for buffer in self.buffers:
            buffer.gather()

    def prefetch(self) -> None:
        """Begin to fetch the whole buffers. A collective operation."""
        for buffer in self.buffers:
            buffer.prefetch()

    def drop_prefetched(self) -> None:
        """Let go of what :meth:`prefetch` fetched."""
        for buffer in self.buffers:
            buffer.drop_prefetched()

    def fill(self) -> None:
        """Make the parameters whole; the buffers must be gathered."""
        if not self.is_filled:
            for buffer in self.buffers:
                for shard in buffer.shards:
                    assert buffer.whole is not None
                    shard.fill(buffer.whole)
            self.is_filled = True

    def park(self) -> None:
        """Take the parameters' data away; the buffers may stay gathered."""
        if self.is_filled:
            self.is_filled = False
            changed = [shard for shard in self.shards if shard.park()]
            if changed:
                raise ShardingError(
                    f"{changed[0].describe()}: it was changed in place while it was whole, which would be lost; change it with "
                    "set_value, or inside `with paddle_fsdp_ckpt.local_parameters(model):`"
                )

    def release(self) -> None:
        """Let go of the whole buffers."""
        try:
            self.park()
        finally:
            for buffer in self.buffers:
                buffer.release()

    def changed(self, shards: Iterable[ParameterShard]) -> None:
        """Note that this rank's data of these parameters changed: whatever was gathered is out of date."""
        self.generation += 1
        for shard in shards:
            shard.changes += 1
        self.release()

    def reduce_gradients(self, mean: bool, finish: bool) -> None:
        """Reduce the gradients of the buffers that train, also those that got none here. A collective operation.

        Args:
            mean: or sum.
            finish: or only begin, for :meth:`finish_reductions`.
        """
        for buffer in self.buffers:
            if any(not shard.parameter.stop_gradient for shard in buffer.shards):
                buffer.reduce_gradient(mean, finish)

    def finish_reductions(self) -> None:
        """Complete what :meth:`reduce_gradients` began. A collective operation."""
        for buffer in self.buffers:
            buffer.finish_reduction()
