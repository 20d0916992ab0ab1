"""Turn a model's parameters into flat buffers, cut over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.base.framework import EagerParamBase

from ..errors import CheckpointError, ShardingError, listing
from ..layout import ITEM_SIZES, build_flat_buffer
from ..warn import warn_caller
from .aliases import Joined, check_memory, collect_aliases, join_aliases, joined_pairs, other_tensors
from .hooks import ModelHooks
from .live_buffer import LiveBuffer
from .parameter import MAIN_GRAD, ShardedParameter
from .runtime import RUNTIME_ATTRIBUTE, GradientReduction, Runtime, runtime_of
from .tensors import dtype_name, initialize_if_lazy, is_lazy
from .topology import open_communicator
from .unit import Unit
from .units import ModelPlan, NamedParameter, UnitPlan, check_names, join, named_buffers, named_parameters, plan_units, walk

_HOOKS_ATTRIBUTE = "_fully_shard_hooks"


def shard_model(
    model: nn.Layer,
    *,
    group: dist.communication.group.Group | None,
    replicate_group: dist.communication.group.Group | None,
    unit_layers: Sequence[type[nn.Layer] | str] | None,
    gradient_reduction: GradientReduction,
    prefetch: int,
    check: Callable[[Collection[int], Sequence[Joined]], Sequence[str]],
) -> Runtime:
    """Do what ``fully_shard`` promises, save binding the optimizers.

    Args:
        model: changed only when everything was found good on every rank.
        group: as for ``fully_shard``.
        replicate_group: as for ``fully_shard``.
        unit_layers: as for ``fully_shard``.
        gradient_reduction: as for ``fully_shard``.
        prefetch: as for ``fully_shard``.
        check: called with the ids of the model's parameters, and those that will be made one, before anything changes; raises what
            speaks against that, and returns what must be the same on every rank.
    """
    communicator = open_communicator(group, replicate_group)
    described, error = "", None
    try:
        if gradient_reduction not in ("mean", "sum"):
            raise ShardingError(f"gradient_reduction is 'mean' or 'sum', not {gradient_reduction!r}")
        if type(prefetch) is not int or prefetch < 0:
            raise ShardingError(f"prefetch is a number of units, from 0 on, not {prefetch!r:.100}")
        parameters = check_model(model)
        plan = plan_units(model, unit_layers, parameters)
        objects = {id(one.parameter) for named in parameters for one in (named, *named.aliases)}
        others = check(objects | {id(buffer) for _, buffer in named_buffers(model)}, joined_pairs(parameters))
        described = repr((_describe(model, parameters), [_outline(unit) for unit in plan.units], gradient_reduction, prefetch, others))
    except CheckpointError as one:
        error = one
    communicator.raise_together(error)
    communicator.check_same("the model", described)
    _warn_of_aliases(parameters)
    join_aliases(model, parameters)
    return _shard(model, plan, Runtime(communicator, gradient_reduction, prefetch))


def _warn_of_aliases(parameters: Sequence[NamedParameter]) -> None:
    groups = [" = ".join(f"'{one}'" for one in named.names) for named in parameters if named.aliases]
    if groups:
        warn_caller(
            f"fully_shard: different Parameter objects that are the same memory were made one parameter: {listing(groups)}. It has the "
            "settings and hooks of the first object, and is stepped once, with the sum of the gradients of all its uses (Paddle would step "
            "it once for each object: the same for SGD without weight decay and clipping, and another thing for the rest)"
        )


def _describe(model: nn.Layer, parameters: Sequence[NamedParameter]) -> object:
    return (
        [
            (named.names, named.parameter.shape, str(named.parameter.dtype), named.parameter.stop_gradient, named.parameter.grad is None)
            for named in parameters
        ],
        [(name, buffer.shape, str(buffer.dtype)) for name, buffer in named_buffers(model)],
    )


def _outline(unit: UnitPlan) -> object:
    return unit.name, [named.names[0] for named in unit.parameters]


@contextmanager
def local_parameters(model: nn.Layer) -> Iterator[None]:
    """Inside the block each parameter of a sharded model is this rank's piece of it: 1-D, sharing the shard's memory.

    For elementwise work on the weights without an optimizer. A rank's piece may be empty. What is written stays, in the parameter's own
    dtype: by ``p.copy_(values)``, which checks shape and dtype, or, under ``paddle.no_grad()``, ``p[:] = values``, ``p.lerp_(...)``,
    ``p.scale_(...)`` and the like.

    Raises:
        ShardingError: the model is not sharded; or, when the block ends, a parameter was made a tensor of another dtype or shape, as by
            ``paddle.assign(float64_values, p)``. No rank steps, saves or hands out weights then before the parameter is given values.
    """
    runtime = runtime_of(model)
    if runtime is None:
        raise ShardingError("local_parameters: the model is not sharded; call fully_shard first")
    try:
        with runtime.showing_local(runtime.shards):
            yield
    finally:
        runtime.parameters_written(runtime.shards, maybe=True)
        runtime.gradient_use.step_uses(runtime.shards)  # this is where those step who do it by hand


def _shard(model: nn.Layer, plan: ModelPlan, runtime: Runtime) -> Runtime:
    communicator = runtime.communicator
    hooks = ModelHooks(runtime)
    live: dict[int, Unit] = {}
    index = 0
    for number, unit_plan in enumerate(plan.units):
        unit = live[id(unit_plan)] = Unit(runtime, unit_plan.name, number)
        runtime.units.append(unit)
        for name, members in _by_kind(unit_plan).items():
            layout = build_flat_buffer(
                name, dtype_name(members[0].parameter), [(m.names, m.parameter.shape) for m in members], communicator.world_size
            )
            buffer = LiveBuffer(unit, layout, [m.parameter for m in members], index, communicator)
            unit.buffers.append(buffer)
            for shard, member in zip(buffer.shards, members, strict=True):
                member.parameter.__class__ = ShardedParameter
                member.parameter._shard = shard
            index += len(members)
    for _, buffer_tensor in named_buffers(model):
        initialize_if_lazy(buffer_tensor)
        communicator.broadcast(buffer_tensor)
        if isinstance(buffer_tensor, EagerParamBase):
            buffer_tensor._stays_whole = True
            runtime.statistics.append(buffer_tensor)
    for hooked in plan.hooked:
        hooks.watch_layer(hooked.layer, [live[id(unit_plan)] for unit_plan in hooked.units])
    hooks.watch_model(model)
    for layer in {id(layer): layer for _, layer in walk(model)}.values():
        hooks.watch_parameters(layer)
        hooks.refuse_copies(layer)
    model.__dict__[RUNTIME_ATTRIBUTE] = runtime
    model.__dict__[_HOOKS_ATTRIBUTE] = hooks
    return runtime


def unshard_model(model: nn.Layer) -> None:
    """Give every rank the whole parameters, and leave the model as if it had never been sharded. A collective operation.

    Gradients are dropped. Optimizers that are bound must be unbound by the caller, who also has the last look at their states.

    Raises:
        ShardingError: the model is not sharded, was written to while it was, has lost weights on this rank, or is in use.
        RankFailedError: it has on another.
    """
    runtime = runtime_of(model)
    if runtime is None:
        raise ShardingError(f"unshard: this {type(model).__name__} is not what was given to fully_shard; there is nothing to undo")
    runtime.check_closable()
    runtime.release_all()
    runtime.check_unwritten()
    runtime.communicator.raise_together(runtime.lost.error())
    model.__dict__.pop(_HOOKS_ATTRIBUTE).close()
    for buffer in runtime.buffers:
        buffer.gather()
        assert buffer.whole is not None
        for shard in buffer.shards:
            shard.unshard(buffer.whole)
        buffer.release()
    for statistic in runtime.statistics:
        del statistic._stays_whole
    del model.__dict__[RUNTIME_ATTRIBUTE]


def _has_values(gradient: paddle.Tensor | None) -> bool:
    """Tell whether a gradient is other than the zeros that ``clear_grad()`` leaves."""
    if gradient is None:
        return False
    # Paddle has no any() of 16-bit numbers, and of sparse gradients nothing that compares.
    return gradient.is_selected_rows() or bool((gradient != 0).any().item())


def _by_kind(unit: UnitPlan) -> dict[str, list[NamedParameter]]:
    """Group a unit's parameters by what a flat buffer can't mix: dtype, and whether they train."""
    kinds: dict[str, list[NamedParameter]] = {}
    for named in unit.parameters:
        frozen = "/frozen" if named.parameter.stop_gradient else ""
        kinds.setdefault(f"{unit.name}/{dtype_name(named.parameter)}{frozen}", []).append(named)
    return kinds


def check_model(model: nn.Layer) -> list[NamedParameter]:
    """Return the parameters of a model that can be sharded, those that are the same memory as one.

    Raises:
        ShardingError: it has no parameters, is sharded already, or has parameters that can't be sharded.
    """
    if not isinstance(model, nn.Layer):
        raise ShardingError(f"fully_shard takes a paddle.nn.Layer, not {type(model).__name__}")
    parameters = named_parameters(model)
    if not parameters:
        raise ShardingError("the model has no parameters, so there is nothing to shard")
    check_names(parameters, named_buffers(model))
    ours = [named.names[0] for named in parameters if isinstance(named.parameter, ShardedParameter)]
    if ours:
        raise ShardingError(f"already sharded by this package: {listing(ours)}; call fully_shard once, on the whole model")
    theirs = [named.names[0] for named in parameters if named.parameter.is_dist() or hasattr(named.parameter, "_fusion_buffer")]
    if theirs:
        raise ShardingError(f"already distributed by Paddle: {listing(theirs)}; use one of the two, on a plain model")
    unknown = [f"{named.names[0]} ({dtype_name(named.parameter)})" for named in parameters if dtype_name(named.parameter) not in ITEM_SIZES]
    if unknown:
        raise ShardingError(f"parameters can be {', '.join(ITEM_SIZES)}; not so: {listing(unknown)}")
    empty = [named.names[0] for named in parameters if 0 in named.parameter.shape]
    if empty:
        raise ShardingError(f"parameters without elements: {listing(empty)}")
    lost = [named.names[0] for named in parameters if not named.parameter._is_initialized() and not is_lazy(named.parameter)]
    if lost:
        raise ShardingError(f"parameters without values: {listing(lost)}; give them values first, by set_value")
    started = [named.names[0] for named in parameters if _has_values(named.parameter.grad)]
    if started:
        raise ShardingError(f"parameters have gradients, which would be lost: {listing(started)}; step and call clear_grad() first")
    with_main_grad = [named.names[0] for named in parameters if hasattr(named.parameter, "main_grad")]
    if with_main_grad:
        raise ShardingError(f"parameters have main_grad: {listing(with_main_grad)}; {MAIN_GRAD}")
    training = sorted(
        join(prefix, name)
        for prefix, layer in walk(model)
        for name, one in layer._buffers.items()
        if one is not None and one.is_leaf and not one.stop_gradient
    )
    if training:
        raise ShardingError(
            f"buffers that train (stop_gradient=False), whose gradients nobody would reduce: {listing(training)}; make them parameters, by "
            "create_parameter, or set stop_gradient=True"
        )
    parameters = collect_aliases(parameters)
    check_memory(parameters, other_tensors(model, parameters))
    return parameters
