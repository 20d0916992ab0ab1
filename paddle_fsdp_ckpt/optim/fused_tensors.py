"""What an optimizer's updates step where Paddle's own runtime cut the model: whole fused buffers, or parts of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import paddle

from ..fsdp.paddle_runtime import PaddleBuffer, PaddleRuntime
from ..layout import Range

_SPLIT_ATTRIBUTE = "_fused_decay_split"


@dataclass(frozen=True, eq=False)
class FusedTensor:
    """What one fused update steps.

    Attributes:
        live: this rank's 1-D shard of a buffer, or a view of a range of it.
        buffer: the buffer.
        within: that range, counted from the start of this rank's shard.
    """

    live: paddle.Tensor
    buffer: PaddleBuffer
    within: Range

    def slot_names(self, rank: int) -> list[str]:
        """Return the parameters of which something is in it."""
        within = self.within.shift(self.buffer.layout.shard(rank).start)
        return [slot.name for slot in self.buffer.layout.slots if slot.range.intersect(within).numel]


class Split(Protocol):
    """What an optimizer whose updates were split carries."""

    @property
    def raw_context(self) -> Any:
        """Paddle's context of the model for which they were split."""
        ...

    @property
    def tensors(self) -> Sequence[FusedTensor]:
        """What each update steps."""
        ...


def split_of(optimizer: Any) -> Split | None:
    """Return how an optimizer's updates were split, or None."""
    split: Split | None = optimizer.__dict__.get(_SPLIT_ATTRIBUTE)
    return split


def set_split(optimizer: Any, split: Split) -> None:
    """Let an optimizer carry how its updates are split."""
    optimizer.__dict__[_SPLIT_ATTRIBUTE] = split


def fused_tensors(optimizer: Any, runtime: PaddleRuntime) -> list[FusedTensor]:
    """Return what the optimizer's updates step."""
    split = split_of(optimizer)
    if split is not None:
        return list(split.tensors)
    return [FusedTensor(one.live, one, Range(0, one.layout.shard_numel)) for one in runtime.buffers if one.trainable]


def owner_of(optimizer: Any, fused: FusedTensor) -> str:
    """Return the name under which the states of a fused tensor are filed: its master weight's where there is one."""
    name: str = fused.live.name
    master = optimizer._master_weights.get(name)
    return name if master is None else str(master.name)


def held_names(optimizer: Any, cut: Collection[str]) -> dict[str, str]:
    """Return the names of the parameters that an optimizer holds, and those of the same parameters once they are cut.

    Paddle's auto-parallel mode makes new parameters in ``fully_shard``; an optimizer made before that holds the old ones.
    """
    return {one.name: one.name if one.name in cut else f"{one.name}.dist" for one in optimizer._param_groups or []}


def real_decay(optimizer: Any, runtime: PaddleRuntime) -> dict[str, bool]:
    """Return whether each parameter that is cut decays, by Paddle's names.

    The optimizer's callback is asked with the name of the parameter that it holds. One marked ``no_weight_decay`` doesn't, where this
    Paddle takes notice of that.
    """
    exempt = {parameter.name for buffer in runtime.buffers if buffer.no_decay for parameter in buffer.parameters}
    names = {parameter.name for buffer in runtime.buffers for parameter in buffer.parameters}
    held = held_names(optimizer, names)
    return {cut: cut not in exempt and bool(optimizer._apply_decay_param_fun(own)) for own, cut in held.items()}


def trainable_slots(runtime: PaddleRuntime) -> Iterator[tuple[PaddleBuffer, str, Any]]:
    """Yield each parameter that optimizers step: its buffer, its structured name, and Paddle's parameter."""
    for buffer in runtime.buffers:
        if buffer.trainable:
            for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
                yield buffer, slot.name, parameter
