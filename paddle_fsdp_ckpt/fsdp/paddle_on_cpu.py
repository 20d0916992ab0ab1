"""Let Paddle's own ``paddle.distributed.fsdp.fully_shard`` run on CPU and gloo, for development and tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
import paddle.distributed as dist

from ..errors import ShardingError


@contextmanager
def paddle_runtime_on_cpu() -> Iterator[None]:
    """Inside the block, Paddle 3.3's auto-parallel ``fully_shard`` cuts and trains on CPU. Paddle is as before outside of it.

    What it changes: slots are aligned as on a GPU, as Paddle has no alignment for CPU; ``paddle.distributed.reduce_scatter``, which gloo
    lacks, is an all_reduce of which each rank keeps its part; what ``Tensor._local_value`` returned last stays alive, as Paddle 3.3.1's
    ``shard_params`` sets the dims of the tensor in it, which was freed by then, and now and then ended the process so; and on leaving, the
    context that the block's ``fully_shard`` registered is taken out again, so that other optimizers of the process no longer step it. A
    model that was cut inside can't train outside.

    Raises:
        ShardingError: Paddle is on another device, or a model is cut already.
    """
    from paddle.distributed.auto_parallel import fully_shard_fusion as fusion

    if not paddle.get_device().startswith("cpu"):
        raise ShardingError(f"this is for CPU, and Paddle runs on {paddle.get_device()}: there its fully_shard runs as it is")
    if fusion.get_fsdp_context() is not None:
        raise ShardingError("a model is cut by paddle.distributed.fsdp.fully_shard already, and a process has room for one")
    device_type, reduce_scatter = fusion.get_current_device_type, dist.reduce_scatter
    local_value = paddle.Tensor._local_value
    last: list[paddle.Tensor] = []

    def keep_local_value(tensor: paddle.Tensor) -> paddle.Tensor:
        last[:] = [local_value(tensor)]
        return last[0]

    fusion.get_current_device_type = lambda: "gpu"
    dist.reduce_scatter = _reduce_scatter
    paddle.Tensor._local_value = keep_local_value
    try:
        yield
    finally:
        fusion.get_current_device_type, dist.reduce_scatter = device_type, reduce_scatter
        paddle.Tensor._local_value = local_value
        fusion.register_fsdp_context(None)


class _Done:
    """The task of a collective that is over."""

    def wait(self) -> bool:
        return True


def _reduce_scatter(tensor: Any, tensor_or_tensor_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any) -> _Done:
    whole = tensor_or_tensor_list.clone()  # the output is the head of the input
    group = dist.get_group(0) if group is None else group
    dist.all_reduce(whole, op=op, group=group, sync_op=True)
    numel = tensor.shape[0]
    paddle.assign(whole._slice(group.rank * numel, (group.rank + 1) * numel), tensor)
    return _Done()
