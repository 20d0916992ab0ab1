"""Read a model that Paddle's own ``paddle.distributed.fsdp.fully_shard`` cut: its flat buffers as our layout, and this rank's live views.

Everything here is read from Paddle's context anew at each call, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import ShardingError, listing
from ..layout import ITEM_SIZES, FlatBuffer, Layout, Range, Slot, stock_loads_exactly
from ..warn import warn_caller
from .paddle_contexts import PaddleContext, check_not_cut_before, registered_context
from .sharded_weights import elementwise, replicated
from .tensors import dtype_name
from .units import named_buffers, named_parameters


@dataclass(frozen=True, eq=False)
class PaddleBuffer:
    """One of Paddle's fused buffers.

    Attributes:
        layout: where everything lies.
        live: ``data_buffer``, this rank's 1-D shard; the tensor that optimizers step.
        parameters: Paddle's parameters, one a slot.
        trainable: whether optimizers step it.
        no_decay: whether its parameters were marked ``no_weight_decay``, of which only the development version takes notice.
    """

    layout: FlatBuffer
    live: paddle.Tensor
    parameters: tuple[Any, ...]
    trainable: bool
    no_decay: bool


@dataclass(frozen=True, eq=False)
class PaddleShard:
    """A parameter in one of Paddle's fused buffers, and what this rank keeps of it.

    Attributes:
        buffer: the fused buffer.
        slot: its place there.
        range: this rank's part, counted from the parameter's own first element; ``Range(0, 0)`` where there is none.
        parameter: Paddle's parameter, which has data only while it is gathered.
        rank: this rank's position.
    """

    buffer: PaddleBuffer
    slot: Slot
    range: Range
    parameter: Any
    rank: int

    @property
    def in_shard(self) -> Range:
        """Where this rank's part lies in the rank's shard, and so in each accumulator of the buffer."""
        return self.range.shift(self.slot.offset - self.buffer.layout.shard(self.rank).start) if self.range.numel else Range(0, 0)

    @property
    def local(self) -> paddle.Tensor:
        """The live 1-D view of this rank's part, which must not be empty."""
        return self.view_of(self.buffer.live)

    def view_of(self, fused: paddle.Tensor) -> paddle.Tensor:
        """Return the 1-D view of this rank's part of a tensor that is cut like the buffer; the part must not be empty."""
        return fused._slice(self.in_shard.start, self.in_shard.stop)

    def weight(self, key: str, piece: paddle.Tensor) -> ShardedWeight:
        """Describe the 1-D piece of something elementwise that this rank keeps for the parameter."""
        return elementwise(key, piece, self.slot, self.range, self.buffer.layout.world_size)


@dataclass(frozen=True, eq=False)
class PaddleRuntime:
    """A model as Paddle's own runtime cut it.

    Attributes:
        context: where it is registered.
        model: the model.
        layout: all fused buffers.
        buffers: the live ones, in the layout's order.
        rank: this rank's position among those that the model is cut over.
        group: Paddle's group of these ranks.
        shards: all parameters.
    """

    context: PaddleContext
    model: nn.Layer
    layout: Layout
    buffers: tuple[PaddleBuffer, ...]
    rank: int
    group: Any
    shards: tuple[PaddleShard, ...]

    def model_weights(self) -> dict[str, ShardedWeight]:
        """Return views of this rank's part of all parameters, and the persistable buffers, whole."""
        weights: dict[str, ShardedWeight] = {}
        for shard in self.shards:
            if shard.range.numel:
                weights.update({name: shard.weight(name, shard.local) for name in shard.slot.names})
        weights.update({name: replicated(name, buffer) for name, buffer in named_buffers(self.model)})
        return weights

    def warn_of_cuts(self) -> None:
        """Warn of parameters that stock Paddle would restore wrongly, as it was cut here."""
        _warn_of_cuts(self)

    def values_written(self) -> None:
        """Let go of all that was gathered from the weights before, and of gradients of theirs. All ranks must call it, between steps.

        Paddle keeps gathered buffers for the next use, also across steps; after a load they are out of date.
        """
        self.context.drop_gradients()
        self.context.let_go_of_weights()


def paddle_runtime() -> PaddleRuntime | None:
    """Return what Paddle's own ``fully_shard`` cut in this process, or None where it cut nothing.

    Raises:
        ShardingError: this Paddle's runtime lacks something that is relied on, or the model is cut in a way that can't be read.
    """
    context = registered_context()
    return None if context is None else _read(context)


def paddle_runtime_of(model: nn.Layer) -> PaddleRuntime | None:
    """Return the runtime of a model that Paddle's own ``fully_shard`` cut, or None for any other model.

    Raises:
        ShardingError: as :func:`paddle_runtime`; or it was cut, and Paddle knows another model now, or none.
    """
    context = registered_context()
    if context is not None and getattr(context.raw, "model", None) is model:
        return _read(context)
    check_not_cut_before(f"this {type(model).__name__}", model.parameters())
    return None


def paddle_group(model: object = None) -> Any:
    """Return the group over which Paddle's own ``fully_shard`` cut a model, by default any; None where it didn't. It raises nothing."""
    context = registered_context()
    if context is None or model not in (None, getattr(context.raw, "model", None)):
        return None
    return getattr(getattr(context.raw, "buffer_manager", None), "_fsdp_group", None)


def sharded_state_dict(model: nn.Layer) -> dict[str, ShardedWeight]:
    """Return this rank's part of the parameters and persistable buffers of a model that Paddle's own ``fully_shard`` cut.

    The same keys and descriptions as our own runtime gives, see :func:`paddle_fsdp_ckpt.sharded_state_dict`. After something was loaded
    into them call ``paddle_runtime_of(model).values_written()``.

    Raises:
        ShardingError: Paddle's own ``fully_shard`` did not cut this model, or did in a way that can't be read.
    """
    runtime = paddle_runtime_of(model)
    if runtime is None:
        raise ShardingError(f"{type(model).__name__} is not the model that paddle.distributed.fsdp.fully_shard cut in this process")
    runtime.warn_of_cuts()
    return runtime.model_weights()


def _read(context: PaddleContext) -> PaddleRuntime:
    context.check()
    model, group, rank = context.raw.model, context.group, context.rank
    names = {id(named.parameter): tuple(sorted(named.names)) for named in named_parameters(model)}
    buffers = tuple(_buffer(one, names, group.nranks, context.written_for) for one in context.buffer_groups)
    _check_complete(model, buffers, names)
    shards = tuple(_shards(buffers, rank))
    layout = Layout(tuple(buffer.layout for buffer in buffers), group.nranks)
    return PaddleRuntime(context, model, layout, buffers, rank, group, shards)


def _shards(buffers: Sequence[PaddleBuffer], rank: int) -> Iterator[PaddleShard]:
    for buffer in buffers:
        for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
            yield PaddleShard(buffer, slot, buffer.layout.local_range(slot, rank), parameter, rank)


def _buffer(group: Any, names: dict[int, tuple[str, ...]], world_size: int, written_for: str) -> PaddleBuffer:
    fused = group.params_buffer
    live = fused.data_buffer
    unnamed = [parameter.name for parameter in group.params if id(parameter) not in names]
    if unnamed:
        raise ShardingError(
            f"Paddle's fused buffer '{live.name}' holds what is no parameter of the model now: {listing(unnamed)}; Paddle can't cut "
            "running statistics, nor may parameters be replaced after fully_shard. Use paddle_fsdp_ckpt.fully_shard for this model"
        )
    placed = sorted(((int(fused.param_offsets[parameter.name]), parameter) for parameter in group.params), key=lambda pair: pair[0])
    slots = tuple(Slot(names[id(parameter)], tuple(parameter.shape), offset) for offset, parameter in placed)
    dtype = dtype_name(live)
    total = int(fused.total_buffer_size)
    shard_numel = -(-total // world_size)
    ends = [*(slot.offset for slot in slots[1:]), total]
    problems = [f"'{slot.name}' overlaps what comes after it" for slot, end in zip(slots, ends, strict=True) if slot.range.stop > end]
    if int(fused.fsdp_degree) != world_size:
        problems.append(f"it is cut over {fused.fsdp_degree} ranks, and the group has {world_size}")
    if list(live.shape) != [shard_numel] or total % world_size:
        problems.append(f"this rank's shard has shape {list(live.shape)}, not a {world_size}th of {total} elements")
    if dtype not in ITEM_SIZES:
        problems.append(f"its dtype is {dtype}")
    if problems:
        raise ShardingError(
            f"Paddle's fused buffer '{live.name}' is not cut as in Paddle {written_for}, and {paddle.__version__} is installed: "
            f"{listing(problems)}; use Paddle {written_for}, or paddle_fsdp_ckpt.fully_shard"
        )
    layout = FlatBuffer(live.name, dtype, slots, shard_numel, world_size)
    return PaddleBuffer(
        layout, live, tuple(parameter for _, parameter in placed), not live.stop_gradient, bool(getattr(group, "no_decay", False))
    )


def _check_complete(model: nn.Layer, buffers: Sequence[PaddleBuffer], names: dict[int, tuple[str, ...]]) -> None:
    held = [parameter for buffer in buffers for parameter in buffer.parameters]
    left_out = [name for one, (name, *_) in names.items() if one not in {id(parameter) for parameter in held}]
    if left_out:
        raise ShardingError(
            f"{type(model).__name__} has parameters that Paddle's fully_shard did not cut: {listing(left_out)}; change the model first, "
            "then cut it"
        )
    replaced = [name for name, tensor in named_buffers(model) if tensor.is_dist()]
    if replaced:
        raise ShardingError(f"buffers distributed by Paddle: {listing(replaced)}; keep buffers whole on every rank")


def _warn_of_cuts(runtime: PaddleRuntime) -> None:
    bad = []
    for buffer in runtime.buffers:
        for slot in buffer.layout.slots:
            pieces = [buffer.layout.local_range(slot, rank) for rank in range(runtime.layout.world_size)]
            filled = [piece for piece in pieces if piece.numel]
            if len(filled) > 1 and not stock_loads_exactly(slot.shape, filled):
                bad.append(slot.name)
    if bad:
        warn_caller(
            f"Paddle's fully_shard cut {len(bad)} parameters where paddle.distributed.load_state_dict restores them wrongly, without an "
            f"error: {listing(bad)}. Load them with paddle_fsdp_ckpt.load, which restores them right, or use paddle_fsdp_ckpt.fully_shard, "
            "which cuts elsewhere"
        )
