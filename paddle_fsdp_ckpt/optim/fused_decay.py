"""Weight decay on Paddle's fused buffers: each fused update covers parameters of one kind, those that decay or those that don't."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paddle import nn

from ..errors import ShardingError, UnsupportedOptimizerError
from ..fsdp.paddle_runtime import PaddleBuffer, PaddleRuntime
from ..layout import Range
from .fused_checks import check_fused
from .fused_others import check_others
from .fused_tensors import FusedTensor, real_decay, set_split, split_of


def split_weight_decay(model: nn.Layer, optimizer: Any) -> None:
    """Let ``apply_decay_param_fun`` decide for each parameter of a model that Paddle's own ``fully_shard`` cut, as it does unfused.

    Paddle asks it with the fused buffer's name, once for all its parameters. Here it is asked with the name of each parameter that the
    optimizer holds, and where the parameters of a buffer differ, the optimizer steps the buffer in several parts, each of parameters of
    one kind. Only this optimizer object is changed; the buffers and their communication stay.

    Args:
        model: cut by Paddle's own ``fully_shard``.
        optimizer: an AdamW that has not stepped yet. One without ``apply_decay_param_fun`` stays as it is.

    Raises:
        ShardingError: as :func:`~.fused_checks.check_fused`.
        UnsupportedOptimizerError: the same; or it has states already, or something else in the process has made its training wrong.
    """
    runtime = check_fused(optimizer, decay=False)
    if runtime.model is not model:
        raise ShardingError(f"split_weight_decay: the {type(model).__name__} given is not the model that Paddle's fully_shard cut")
    check_others(runtime, [optimizer])
    if getattr(optimizer, "_apply_decay_param_fun", None) is None or split_of(optimizer) is not None:
        return
    if any(optimizer._accumulators.values()) or optimizer._master_weights:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has states of whole fused buffers already; call split_weight_decay before its first step"
        )
    set_split(optimizer, _DecaySplit(optimizer, runtime))


class _DecaySplit:
    """On one optimizer: fused updates that each cover parameters of one kind, and a callback that knows which."""

    def __init__(self, optimizer: Any, runtime: PaddleRuntime) -> None:
        self.raw_context = runtime.context.raw
        self.tensors: list[FusedTensor] = []
        self._decays: dict[str, bool] = {}
        self._ask: Callable[[str], bool] = optimizer._apply_decay_param_fun
        real = real_decay(optimizer, runtime)
        for buffer in runtime.buffers:
            if buffer.trainable:
                kinds = [real[parameter.name] for parameter in buffer.parameters]
                for one, kind in _cut_by_kind(buffer, kinds, runtime.rank):
                    self.tensors.append(one)
                    self._decays[one.live.name] = kind
        self._step: Callable[..., Any] = optimizer._create_optimization_pass
        optimizer._apply_decay_param_fun = self._decays_for
        optimizer._create_optimization_pass = self._step_parts
        if runtime.context.answers_decay_by_name:
            optimizer._fsdp_decay_fun_bound = True  # else Paddle would ask for whole buffers at the first step, and refuse mixed ones

    def _decays_for(self, name: str) -> bool:
        return self._decays[name] if name in self._decays else self._ask(name)

    def _step_parts(self, parameters_and_grads: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = {buffer.name: gradient for buffer, gradient in parameters_and_grads}
        parts = []
        for one in self.tensors:
            gradient = gradients[one.buffer.live.name]
            whole = one.within.numel == one.buffer.layout.shard_numel
            parts.append((one.live, gradient if whole else gradient._slice(one.within.start, one.within.stop)))
        return self._step(parts, *args, **kwargs)


def _cut_by_kind(buffer: PaddleBuffer, kinds: Sequence[bool], rank: int) -> Iterator[tuple[FusedTensor, bool]]:
    """Yield the parts of this rank's shard whose parameters are of one kind; padding goes with the parameter before it."""
    shard = buffer.layout.shard(rank)
    slots = buffer.layout.slots
    starts = [i for i in range(len(slots)) if i == 0 or kinds[i] != kinds[i - 1]]
    for first, after in zip(starts, [*starts[1:], None], strict=True):
        stop = buffer.layout.numel if after is None else slots[after].offset
        within = Range(slots[first].offset, stop).intersect(shard)
        if not within.numel:
            continue
        within = within.shift(-shard.start)
        live = buffer.live
        if within.numel < shard.numel:
            live = live._slice(within.start, within.stop)
            live.name = f"{buffer.live.name}_part_{first}"
            live.stop_gradient = buffer.live.stop_gradient
            live.optimize_attr = buffer.live.optimize_attr
        yield FusedTensor(live, buffer, within), kinds[first]
