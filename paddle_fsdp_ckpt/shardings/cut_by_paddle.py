"""A model that Paddle's own runtime cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..fsdp import Communicator, PaddleRuntime
from ..optim import OptimizerState, SteppedParameter, fused, let_masters_follow
from .sharding import FlatShard, Sharding, StateLoad


@dataclass(frozen=True)
class CutByPaddle(Sharding):
    """A model that Paddle's own ``paddle.distributed.fsdp.fully_shard`` cut."""

    runtime: PaddleRuntime
    masters_follow_singly = False

    @property
    def communicator(self) -> Communicator:
        """Over the group that Paddle cut it over."""
        return Communicator(self.runtime.group)

    def flat_shards(self) -> list[FlatShard]:
        """Return the shards of Paddle's fused buffers."""
        return [FlatShard(one.layout, one.live, (one.trainable,) * len(one.parameters)) for one in self.runtime.buffers]

    def model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return views of the fused buffers' shards, and whole buffers."""
        return self.runtime.model_weights()

    def warn_of_cuts(self) -> None:
        """Paddle cuts anywhere."""
        self.runtime.warn_of_cuts()

    def held_by(self, optimizers: Sequence[Any], model: nn.Layer | None) -> list[Sequence[SteppedParameter]]:
        """Return the parameters in fused buffers, where nothing else of the process makes their training wrong."""
        if optimizers:
            fused.check_process(optimizers)
        return [fused.held_shards(one) for one in optimizers]

    def states(self, optimizer: Any, parameters: Sequence[SteppedParameter]) -> list[OptimizerState]:
        """Return views of the fused accumulators."""
        return list(fused.fused_states(optimizer))

    def weight_of(self, state: OptimizerState) -> ShardedWeight:
        """Describe a view of a fused accumulator, or a scalar."""
        return fused.weight_of(state)

    def begin_load(self, optimizer: Any, parameters: Sequence[SteppedParameter], stored: Collection[str]) -> StateLoad:
        """Return views of the fused accumulators, and copies of what a buffer has once."""
        return fused.begin_load(optimizer, stored)

    def has_gradient(self, parameter: SteppedParameter) -> bool:
        """Fused gradients are never absent."""
        return not parameter.parameter.stop_gradient

    def reset_gradient(self, parameter: SteppedParameter, present: bool) -> None:
        """:meth:`values_written` has set all to zero."""

    def values_written(
        self, model: nn.Layer | None, optimizers: Sequence[Any], stepped: Sequence[SteppedParameter], kept: Collection[str] = ()
    ) -> None:
        """Let go of gathered buffers and gradients, and let the master weights of other optimizers follow."""
        if model is not None:
            let_masters_follow(self.runtime, optimizers)
        self.runtime.values_written()
