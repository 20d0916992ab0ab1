"""What else is in the process that Paddle's own runtime gets wrong: other optimizers, and loss scaling.

Paddle's runtime doesn't know the optimizers of its model, and lets each of the process step it; so they are looked for in memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
from paddle.amp import AmpScaler

from ..errors import CheckpointError, UnsupportedOptimizerError, listing
from ..fsdp.paddle_runtime import PaddleRuntime
from ..layout import LOW_PRECISION
from ..warn import warn_caller
from .fused_checks import check_fused
from .fused_tensors import fused_tensors

REPAIR_ATTRIBUTE = "_paddle_fsdp_ckpt_repair"
"""What Paddle's context has while a repair of its model is open."""


def is_repaired(runtime: PaddleRuntime) -> bool:
    """Tell whether a repair of this model is open, see :mod:`.fused_repair`."""
    return REPAIR_ATTRIBUTE in vars(runtime.context.raw)


def check_others(runtime: PaddleRuntime, optimizers: Sequence[Any]) -> None:
    """Refuse what the process has besides these optimizers that has made their training wrong, and warn of what may.

    Warnings are for other optimizers that did not step this model yet, as far as can be seen.

    Raises:
        UnsupportedOptimizerError: another model's optimizer has stepped the fused buffers instead of its own parameters; or there is a
            ``GradScaler`` that scales, which finds no gradients to unscale.
    """
    if any(True for _ in _others(runtime, optimizers)):
        gc.collect()  # what nothing refers to any more does no harm
    others = list(_others(runtime, optimizers))
    named = ", ".join(type(one).__name__ for one in optimizers)
    wrong = [text for text, is_certain in others if is_certain]
    if wrong:
        raise UnsupportedOptimizerError(
            f"{named}: with a model cut by paddle.distributed.fsdp.fully_shard, this process also has {listing(wrong)}. Do without, or use "
            "paddle_fsdp_ckpt.fully_shard"
        )
    if others and not is_repaired(runtime):
        warn_caller(
            f"{named}: with a model cut by paddle.distributed.fsdp.fully_shard, this process also has "
            f"{listing(text for text, _ in others)}. Let go of it, use paddle_fsdp_ckpt.fully_shard, or have "
            "such a step refused by paddle_fsdp_ckpt.repair_paddle_runtime"
        )


def let_masters_follow(runtime: PaddleRuntime, loaded: Sequence[Any]) -> None:
    """Give the master weights of all optimizers that step this model, but those in ``loaded``, the values of its weights."""
    if all(buffer.layout.dtype not in LOW_PRECISION for buffer in runtime.buffers):
        return
    for optimizer in _alive(paddle.optimizer.Optimizer):
        if any(optimizer is one for one in loaded) or not getattr(optimizer, "_master_weights", None):
            continue
        try:
            check_fused(optimizer)
        except CheckpointError:  # it steps something else, or can't step this
            continue
        with paddle.no_grad():
            for fused in fused_tensors(optimizer, runtime):
                master = optimizer._master_weights.get(fused.live.name)
                if master is not None:
                    paddle.assign(fused.live.astype(master.dtype), master)


def _others(runtime: PaddleRuntime, optimizers: Sequence[Any]) -> Iterator[tuple[str, bool]]:
    """Yield what there is, in words, and whether it has done harm."""
    own = {shard.parameter.name for shard in runtime.shards}
    for one in _alive(paddle.optimizer.Optimizer):
        names = _held(one)
        if names and not any(one is given for given in optimizers):
            is_foreign = not any(name in own or f"{name}.dist" in own for name in names)
            first = listing(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            text = f"another optimizer, {type(one).__name__} over {first}: each of its steps steps the fused buffers of that model"
            yield text + ", and nothing of its own" * is_foreign, is_foreign and _has_stepped(one, runtime)
    for one in _alive(AmpScaler):
        if getattr(one, "_enable", False):
            yield f"a {type(one).__name__} that is enabled: it finds no gradients of fused buffers, so that nothing is unscaled", True


def _has_stepped(optimizer: Any, runtime: PaddleRuntime) -> bool:
    """Tell whether an optimizer has states of this model's buffers; one that keeps no states can't be found out."""
    buffers = [buffer.live.name for buffer in runtime.buffers]
    owners = {owner for tensors in optimizer._accumulators.values() for owner in tensors} | set(optimizer._master_weights)
    return any(owner == name or owner.startswith(f"{name}_") for owner in owners for name in buffers)


def _held(optimizer: Any) -> list[str]:
    groups = getattr(optimizer, "_param_groups", None) or []  # one that could not be made has none
    return [one.name for group in groups for one in (group["params"] if isinstance(group, dict) else [group])]


def _alive(cls: type) -> list[Any]:
    # By the type, as some objects do something else when asked for their class.
    return [one for one in gc.get_objects() if issubclass(type(one), cls)]
