"""Tell how a model and its optimizers are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..fsdp import default_ranks, paddle_group, paddle_runtime, paddle_runtime_of, runtime_of
from ..optim import binding_of, check_bound, entry_of, fused, init_optimizer_state, optimizer_shards, optimizer_states
from .cut_by_paddle import CutByPaddle
from .cut_by_us import CutByUs
from .plain import Plain
from .sharding import Sharding


def sharding_of(model: nn.Layer) -> Sharding:
    """Return how a model is kept.

    Raises:
        ShardingError: Paddle's own ``fully_shard`` cut it in a way that can't be read.
    """
    runtime = runtime_of(model)
    if runtime is not None:
        return CutByUs(runtime)
    by_paddle = paddle_runtime_of(model)
    return Plain() if by_paddle is None else CutByPaddle(by_paddle)


def sharding_of_optimizers(optimizers: Sequence[Any]) -> Sharding:
    """Return how what optimizers step is kept, where no model is given.

    Raises:
        ShardingError: an optimizer steps nothing that is cut, or Paddle's own ``fully_shard`` cut it in a way that can't be read.
        UnsupportedOptimizerError: an optimizer's states are not known.
    """
    if any(is_fused(one) for one in optimizers):
        by_paddle = paddle_runtime()
        assert by_paddle is not None
        return CutByPaddle(by_paddle)
    for one in optimizers:
        entry_of(one)
    for one in optimizers:
        check_bound(one)
    return CutByUs(optimizer_shards(optimizers[0])[0].unit.runtime)


def is_fused(optimizer: Any) -> bool:
    """Tell whether an optimizer steps a model that Paddle's own ``fully_shard`` cut.

    Raises:
        ShardingError: that model is cut in a way that can't be read.
    """
    return binding_of(optimizer) is None and fused.steps_fused_buffers(optimizer)


def ranks_of(model: object, optimizers: Sequence[object]) -> tuple[int, ...]:
    """Return the job's ranks that train these, by default all; none without a process group.

    Whatever they are: what is wrong with them must be said where the ranks meet.

    Raises:
        ShardingError: the processes of the job don't know of each other, or fleet was set up with another kind of parallelism.
    """
    if isinstance(model, Mapping):
        runtimes = [runtime_of(one) for _, one in sorted(model.items(), key=lambda pair: str(pair[0])) if isinstance(one, nn.Layer)]
        return next((one.communicator.ranks for one in runtimes if one is not None), None) or default_ranks()
    if isinstance(model, nn.Layer):
        runtime = runtime_of(model)
        if runtime is not None:
            return runtime.communicator.ranks
        group = paddle_group(model)
        return default_ranks() if group is None else tuple(group.ranks)
    steppers = [one for one in optimizers if isinstance(one, paddle.optimizer.Optimizer)] if model is None else []
    bound = [one for one in steppers if binding_of(one) is not None]
    if bound:
        return optimizer_shards(bound[0])[0].unit.runtime.communicator.ranks
    group = paddle_group() if steppers else None
    return default_ranks() if group is None else tuple(group.ranks)


def init_states(optimizer: Any) -> None:
    """Create the states of an optimizer over what is cut."""
    if is_fused(optimizer):
        fused.check_process([optimizer])
        fused.init_optimizer_state(optimizer)
    else:
        init_optimizer_state(optimizer)


def states_of(optimizer: Any) -> dict[str, ShardedWeight]:
    """Return the states of an optimizer over what is cut."""
    if is_fused(optimizer):
        fused.check_process([optimizer])
        return fused.optimizer_sharded_state_dict(optimizer)
    check_bound(optimizer)
    binding = binding_of(optimizer)
    if binding is not None and not binding.has_states:
        init_optimizer_state(optimizer)
    sharding = CutByUs(optimizer_shards(optimizer)[0].unit.runtime)
    return {state.key: sharding.weight_of(state) for state in optimizer_states(optimizer)}
