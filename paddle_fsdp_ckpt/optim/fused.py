"""The registry over Paddle's fused buffers: an accumulator serves all parameters of a buffer, and each has a piece of it.

For models that Paddle's own ``paddle.distributed.fsdp.fully_shard`` cut. Paddle files an accumulator under the name of the fused buffer
that owns it, or of that one's master weight.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import CheckpointError, MismatchError, ShardingError, UnsupportedOptimizerError, listing
from ..fsdp.paddle_runtime import PaddleBuffer, PaddleRuntime, PaddleShard, flat_weight, paddle_runtime, replicated_weight
from ..layout import Range
from .catalog import CATALOG, OptimizerEntry, StateKind, state_name
from .registry import MASTER_WEIGHT_KEY, OptimizerState

_SPLIT_ATTRIBUTE = "_fused_decay_split"
_ELEMENTWISE = StateKind.ELEMENTWISE

FUSED_CATALOG: dict[str, OptimizerEntry] = {
    name: CATALOG[name] for name in ("Adam", "AdamW", "Momentum", "SGD", "Adamax", "RMSProp", "NAdam", "RAdam", "Adadelta", "Adagrad")
}
"""The optimizers that can step fused buffers, and their states."""

_REPEATED = {"NAdam": ("momentum_decay_pow", "beta2_pow", "mu_product"), "RAdam": ("beta1_pow", "beta2_pow", "rho")}
"""Numbers of which Paddle keeps a copy an element, unfused too, so that their keys are elementwise. A fused buffer has one value in all its
copies, and RAdam reads the first, which may be padding."""


def optimizer_sharded_state_dict(optimizer: Any) -> dict[str, ShardedWeight]:
    """Return this rank's part of the states of an optimizer that steps fused buffers; states that don't exist yet are made first.

    The same keys and descriptions as our own runtime gives, see :func:`paddle_fsdp_ckpt.optimizer_sharded_state_dict`.

    Raises:
        ShardingError: its parameters are not those of the model that Paddle's own ``fully_shard`` cut.
        UnsupportedOptimizerError: it can't step fused buffers right, or has a state that is not known.
    """
    init_optimizer_state(optimizer)
    return {state.key: weight_of(state) for state in fused_states(optimizer)}


def init_optimizer_state(optimizer: Any) -> None:
    """Create the states of an optimizer for all trainable fused buffers, as its first step would; those that are there stay.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
    """
    runtime = check_fused(optimizer)
    block = paddle.static.default_main_program().global_block()
    with paddle.no_grad():
        optimizer._create_accumulators(block, [one.live for one in _fused_tensors(optimizer, runtime)])


def fused_states(optimizer: Any) -> list[OptimizerState]:
    """Return the states that there are, of the parameters of which this rank keeps a piece.

    An elementwise state's tensor is a 1-D view of the fused accumulator; a scalar's is the one that all parameters of a buffer share.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
    """
    return [state for state, _ in _states_and_owners(optimizer)]


def _states_and_owners(optimizer: Any) -> Iterator[tuple[OptimizerState, paddle.Tensor]]:
    """Yield each state with the live tensor that holds it, and those of the other parameters of its buffer."""
    runtime = check_fused(optimizer)
    kinds = fused_entry_of(optimizer).states
    fused = _fused_tensors(optimizer, runtime)
    owned = {_owner(optimizer, one): one for one in fused}
    shards: dict[str, list[PaddleShard]] = defaultdict(list)
    for shard in runtime.shards:
        shards[shard.buffer.layout.name].append(shard)
    for accumulator, tensors in optimizer._accumulators.items():
        state = state_name(optimizer, accumulator)
        if tensors and state not in kinds:
            raise UnsupportedOptimizerError(f"{type(optimizer).__name__} keeps a state '{state}' that is not in the table of its states")
        for owner, tensor in tensors.items():
            yield from _pieces(shards[owned[owner].buffer.layout.name], owned[owner], f"{state}_0", kinds[state], tensor)
    for one in fused:
        master = optimizer._master_weights.get(one.live.name)
        if master is not None:
            yield from _pieces(shards[one.buffer.layout.name], one, MASTER_WEIGHT_KEY, _ELEMENTWISE, master)


def weight_of(state: OptimizerState) -> ShardedWeight:
    """Describe a state of :func:`fused_states` for ``paddle.distributed.save_state_dict`` and ``load_state_dict``."""
    assert isinstance(state.shard, PaddleShard)
    if state.kind is StateKind.SCALAR:
        return replicated_weight(state.key, state.tensor)
    return flat_weight(state.key, state.shard, state.tensor)


def states_written(optimizer: Any) -> None:
    """Complete what was loaded into the views of an optimizer's states: padding, which no key has, follows the loaded values.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
        MismatchError: parameters of one buffer were loaded with different values of what the buffer has once. The optimizer has the
            loaded states then, and can't go on from them.
    """
    repeated = [f"{state}_0" for state in _REPEATED.get(type(optimizer).__name__, ())]
    fused: dict[int, list[tuple[str, paddle.Tensor]]] = defaultdict(list)
    owners: dict[int, paddle.Tensor] = {}
    for state, owner in _states_and_owners(optimizer):
        if state.suffix in repeated:
            fused[id(owner)].append((state.key, state.tensor))
            owners[id(owner)] = owner
    for pieces in fused.values():
        _check_one_value([(key, piece._slice(0, 1), piece) for key, piece in pieces], _PARTLY_LOADED)
    with paddle.no_grad():
        for one, pieces in fused.items():
            owners[one].fill_(pieces[0][1]._slice(0, 1).item())


@dataclass(frozen=True, eq=False)
class FusedLoad:
    """What to load an optimizer's states into: views for what is elementwise, and for scalars a copy of each parameter's own.

    A buffer has one tensor for a scalar of all its parameters, and what is loaded may hold different values for them.

    Attributes:
        optimizer: the optimizer.
        weights: where each key's values go.
        copies: the scalars again, and one element of what is repeated, to be read first for :meth:`check`.
    """

    optimizer: Any
    weights: dict[str, ShardedWeight]
    copies: dict[str, ShardedWeight]
    _scalars: Sequence[tuple[OptimizerState, paddle.Tensor]]
    _owners: dict[str, int]

    def check(self) -> None:
        """Judge what was read into the copies.

        Raises:
            MismatchError: parameters of one buffer have different values of what the buffer has once. Nothing was changed.
        """
        read: dict[int, list[tuple[str, paddle.Tensor, paddle.Tensor]]] = defaultdict(list)
        for key, weight in self.copies.items():
            read[self._owners[key]].append((key, weight.local_tensor, weight.local_tensor))
        for values in read.values():
            _check_one_value(values, "Nothing was changed")

    def finish(self) -> None:
        """Put the loaded scalars into the optimizer, and complete the rest by :func:`states_written`.

        Raises:
            MismatchError: as :func:`states_written`.
        """
        loaded: dict[int, list[tuple[OptimizerState, paddle.Tensor]]] = defaultdict(list)
        for state, copy in self._scalars:
            loaded[id(state.tensor)].append((state, copy))
        for pairs in loaded.values():
            _check_one_value([(state.key, copy, copy) for state, copy in pairs], _PARTLY_LOADED)
        with paddle.no_grad():
            for pairs in loaded.values():
                state, copy = pairs[0]
                paddle.assign(copy, state.tensor)
        states_written(self.optimizer)


_PARTLY_LOADED = "The optimizer holds a part of the checkpoint now"


def _check_one_value(loaded: Sequence[tuple[str, paddle.Tensor, paddle.Tensor]], consequence: str) -> None:
    """Raise unless all values of all last members are the first middle one, bit for bit."""
    key, first, _ = loaded[0]
    differing = [f"{other} and {key}" for other, _, values in loaded if bool((values != first).any().item())]
    if differing:
        raise MismatchError(
            "a fused buffer of Paddle's has one value for all its parameters, and the checkpoint has different ones: "
            f"{listing(differing)}; the parameters did not step equally often. {consequence}: load another one, or shard the model with "
            "paddle_fsdp_ckpt.fully_shard and load this one"
        )


def begin_load(optimizer: Any, stored: Collection[str] | None = None) -> FusedLoad:
    """Create the states that there are not yet, and return what to load them into; call ``finish()`` after that.

    Args:
        optimizer: the optimizer.
        stored: the names of the parameters for which there are states to load; fused updates of others have none afterwards.
            By default all.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
        MismatchError: there are states for some parameters of a fused update, and not for others.
    """
    init_optimizer_state(optimizer)
    if stored is not None:
        _drop_absent(optimizer, stored)
    repeated = [f"{state}_0" for state in _REPEATED.get(type(optimizer).__name__, ())]
    weights: dict[str, ShardedWeight] = {}
    copies: dict[str, ShardedWeight] = {}
    scalars: list[tuple[OptimizerState, paddle.Tensor]] = []
    owners: dict[str, int] = {}
    for state, owner in _states_and_owners(optimizer):
        key = state.key
        if state.kind is StateKind.SCALAR:
            copy = state.tensor.clone()
            scalars.append((state, copy))
            weights[key] = copies[key] = replicated_weight(key, copy)
            owners[key] = id(owner)
            continue
        weights[key] = weight_of(state)
        if state.suffix in repeated:
            shape, first = state.shard.slot.shape, state.shard.range.start
            one = state.tensor._slice(0, 1).clone()
            copies[key] = ShardedWeight(key, one, shape, shape, (0,) * len(shape), True, slice(first, first + 1))
            owners[key] = id(owner)
    return FusedLoad(optimizer, weights, copies, scalars, owners)


def _drop_absent(optimizer: Any, stored: Collection[str]) -> None:
    """Let fused updates have no states, none of whose parameters is in ``stored``."""
    runtime = check_fused(optimizer)
    for one in _fused_tensors(optimizer, runtime):
        start = one.buffer.layout.shard(runtime.rank).start
        names = [slot.name for slot in one.buffer.layout.slots if slot.range.intersect(one.within.shift(start)).numel]
        absent = [name for name in names if name not in stored]
        if len(absent) < len(names) and absent:
            raise MismatchError(
                f"the checkpoint has states for some parameters of Paddle's fused buffer '{one.buffer.layout.name}' and none for "
                f"{listing(absent)}, which had no gradient yet; the buffer steps all of them alike. Nothing was changed: shard the model "
                "with paddle_fsdp_ckpt.fully_shard, or load the model only, with optimizer=None"
            )
        if absent or not names:  # padding alone starts afresh
            owner = _owner(optimizer, one)
            for tensors in optimizer._accumulators.values():
                tensors.pop(owner, None)
            optimizer._master_weights.pop(one.live.name, None)
            optimizer._already_create_accumulator.discard(one.live.name)


def let_masters_follow(runtime: PaddleRuntime, loaded: Sequence[Any]) -> None:
    """Give the master weights of all optimizers that step this model, but those in ``loaded``, the values of its weights.

    Paddle's runtime doesn't know the optimizers of its model, so they are looked for in memory.
    """
    if all(buffer.layout.dtype not in ("float16", "bfloat16") for buffer in runtime.buffers):
        return
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), paddle.optimizer.Optimizer)]
    for optimizer in optimizers:
        if any(optimizer is one for one in loaded) or not optimizer._master_weights:
            continue
        try:
            check_fused(optimizer)
        except CheckpointError:  # it steps something else, or can't step this
            continue
        with paddle.no_grad():
            for fused in _fused_tensors(optimizer, runtime):
                master = optimizer._master_weights.get(fused.live.name)
                if master is not None:
                    paddle.assign(fused.live.astype(master.dtype), master)


def held_shards(optimizer: Any) -> list[PaddleShard]:
    """Return the parameters in fused buffers that an optimizer holds, in its order.

    Raises:
        ShardingError: as :func:`check_fused`.
        UnsupportedOptimizerError: the same.
    """
    shards = {shard.parameter.name: shard for shard in check_fused(optimizer).shards}
    return [shards[cut] for cut in _held(optimizer, shards).values()]


def steps_fused_buffers(optimizer: Any) -> bool:
    """Tell whether an optimizer holds parameters of the model that Paddle's own ``fully_shard`` cut in this process.

    Raises:
        ShardingError: that model is cut in a way that can't be read.
    """
    runtime = paddle_runtime()
    if runtime is None:
        return False
    cut = {shard.parameter.name for shard in runtime.shards}
    groups = optimizer._param_groups or []
    held = [one for group in groups for one in (group["params"] if isinstance(group, dict) else [group])]
    return any(one.name in cut or f"{one.name}.dist" in cut for one in held)


def split_weight_decay(model: nn.Layer, optimizer: Any) -> None:
    """Let ``apply_decay_param_fun`` decide for each parameter of a model that Paddle's own ``fully_shard`` cut, as it does unfused.

    Paddle asks it with the fused buffer's name, once for all its parameters. Here it is asked with the name of each parameter that the
    optimizer holds, and where the parameters of a buffer differ, the optimizer steps the buffer in several parts, each of parameters of
    one kind. Only this optimizer object is changed; the buffers and their communication stay.

    Args:
        model: cut by Paddle's own ``fully_shard``.
        optimizer: an AdamW that has not stepped yet. One without ``apply_decay_param_fun`` stays as it is.

    Raises:
        ShardingError: as :func:`check_fused`.
        UnsupportedOptimizerError: it has states already.
    """
    runtime = check_fused(optimizer, decay=False)
    if runtime.model is not model:
        raise ShardingError(f"split_weight_decay: the {type(model).__name__} given is not the model that Paddle's fully_shard cut")
    if getattr(optimizer, "_apply_decay_param_fun", None) is None or _SPLIT_ATTRIBUTE in optimizer.__dict__:
        return
    if any(optimizer._accumulators.values()) or optimizer._master_weights:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has states of whole fused buffers already; call split_weight_decay before its first step"
        )
    optimizer.__dict__[_SPLIT_ATTRIBUTE] = _DecaySplit(optimizer, runtime)


def check_fused(optimizer: Any, *, decay: bool = True) -> PaddleRuntime:
    """Return the runtime whose fused buffers an optimizer steps.

    Args:
        optimizer: the optimizer.
        decay: check ``apply_decay_param_fun`` too.

    Raises:
        ShardingError: no model is cut by Paddle's own ``fully_shard``, or its parameters are not those of that model.
        UnsupportedOptimizerError: it, or a setting of it or of its parameters, can't step fused buffers right.
    """
    fused_entry_of(optimizer)
    runtime = paddle_runtime()
    if runtime is None:
        raise ShardingError(f"{type(optimizer).__name__}: no model in this process was cut by paddle.distributed.fsdp.fully_shard")
    problems = [*_problems_of_optimizer(optimizer), *_problems_of_parameters(optimizer, runtime)]
    if problems:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} can't step the fused buffers of Paddle's fully_shard right: {'; '.join(problems)}. Change that, "
            "or use paddle_fsdp_ckpt.fully_shard"
        )
    _check_parameters(optimizer, runtime)
    if decay:
        _check_decay(optimizer, runtime)
    owners = {_owner(optimizer, one) for one in _fused_tensors(optimizer, runtime)}
    strange = sorted({owner for tensors in optimizer._accumulators.values() for owner in tensors} - owners)
    if strange:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has states of something else than fused buffers: {listing(strange)}; make it anew, so that it has "
            "not stepped before fully_shard"
        )
    return runtime


def fused_entry_of(optimizer: Any) -> OptimizerEntry:
    """Return the states of an optimizer that can step fused buffers.

    Raises:
        UnsupportedOptimizerError: it can't, or is not known.
    """
    cls = type(optimizer)
    entry = FUSED_CATALOG.get(cls.__name__) if cls.__module__.startswith("paddle.optimizer") else None
    if entry is None:
        raise UnsupportedOptimizerError(
            f"{cls.__module__}.{cls.__name__} can't step the fused buffers of paddle.distributed.fsdp.fully_shard right; supported are "
            f"{', '.join(FUSED_CATALOG)} of paddle.optimizer"
        )
    return entry


def _problems_of_optimizer(optimizer: Any) -> Iterator[str]:
    if any(isinstance(group, dict) for group in optimizer._param_groups or []):
        yield "with param groups Paddle steps all buffers once for each group, and ignores what the groups say"
    clip = optimizer._grad_clip
    if clip is not None and type(clip) not in (nn.ClipGradByGlobalNorm, nn.ClipGradByValue):
        yield f"{type(clip).__name__} takes the norm of this rank's part of a buffer for that of a parameter"
    if getattr(optimizer, "_lr_ratio", None) is not None:
        yield "lr_ratio is asked with a buffer, not with a parameter"
    if getattr(optimizer, "_use_multi_tensor", False):
        yield "use_multi_tensor=True keeps its states elsewhere"


def _problems_of_parameters(optimizer: Any, runtime: PaddleRuntime) -> Iterator[str]:
    for buffer in runtime.buffers:
        if not buffer.trainable:
            continue
        named = [(slot.name, parameter) for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True)]
        rates = {name: (parameter.optimize_attr or {}).get("learning_rate", 1.0) for name, parameter in named}
        if len(set(rates.values())) > 1:
            rate = (buffer.live.optimize_attr or {}).get("learning_rate", 1.0)
            yield f"its learning rate for all of '{buffer.live.name}' is {rate} times its own, and ParamAttr says otherwise for " + listing(
                name for name, own in rates.items() if own != rate
            )
        regularized = [name for name, parameter in named if getattr(parameter, "regularizer", None) is not None]
        if regularized:
            yield f"the regularizers of single parameters are lost: {listing(regularized)}"
        unclipped = [name for name, parameter in named if not getattr(parameter, "need_clip", True)]
        if unclipped and optimizer._grad_clip is not None:
            yield f"need_clip=False is lost: {listing(unclipped)}"


def _check_parameters(optimizer: Any, runtime: PaddleRuntime) -> None:
    """Raise unless the optimizer holds the trainable parameters of the model that is cut, and no others."""
    name = type(optimizer).__name__
    slots = {shard.parameter.name: shard.slot.name for shard in runtime.shards}
    trainable = {one.name for buffer in runtime.buffers if buffer.trainable for one in buffer.parameters}
    held = _held(optimizer, slots)
    foreign = sorted(own for own, cut in held.items() if cut not in slots)
    if foreign:
        raise ShardingError(
            f"{name} holds {len(foreign)} parameters that are not of the model that paddle.distributed.fsdp.fully_shard cut: "
            f"{listing(foreign)}. Paddle lets every optimizer of the process step that model; use one model and one optimizer"
        )
    left_out = trainable - set(held.values())
    if left_out:
        raise ShardingError(
            f"{name} doesn't hold {len(left_out)} of the model's trainable parameters, and Paddle would step them all the same: "
            f"{listing(sorted(slots[one] for one in left_out))}; give it model.parameters()"
        )


def _held(optimizer: Any, cut: Collection[str]) -> dict[str, str]:
    """Return the names of the parameters that an optimizer holds, and those of the same parameters once they are cut.

    Paddle makes new parameters in ``fully_shard``; an optimizer made before that holds the old ones.
    """
    return {one.name: one.name if one.name in cut else f"{one.name}.dist" for one in optimizer._param_groups or []}


def _check_decay(optimizer: Any, runtime: PaddleRuntime) -> None:
    ask, split = getattr(optimizer, "_apply_decay_param_fun", None), optimizer.__dict__.get(_SPLIT_ATTRIBUTE)
    if split is not None and split.context is not runtime.context:
        raise UnsupportedOptimizerError(f"{type(optimizer).__name__}: its weight decay was split for another model; make it anew")
    if ask is None or split is not None:
        return
    decays = _real_decay(optimizer, runtime)
    wrong = [
        slot.name
        for buffer in runtime.buffers
        if buffer.trainable
        for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True)
        if decays[parameter.name] != bool(ask(buffer.live.name))
    ]
    if wrong:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}: Paddle asks apply_decay_param_fun with the names of fused buffers, so weight decay is wrong for "
            f"{len(wrong)} parameters: {listing(wrong)}; call split_weight_decay(model, optimizer) before the first step"
        )


def _real_decay(optimizer: Any, runtime: PaddleRuntime) -> dict[str, bool]:
    """Return what the callback says of each parameter that is cut, asked with the name of the one that the optimizer holds."""
    names = {parameter.name for buffer in runtime.buffers for parameter in buffer.parameters}
    return {cut: bool(optimizer._apply_decay_param_fun(own)) for own, cut in _held(optimizer, names).items()}


@dataclass(frozen=True, eq=False)
class _FusedTensor:
    """What one fused update steps: a buffer's shard, or a range of it."""

    live: paddle.Tensor
    buffer: PaddleBuffer
    within: Range


class _DecaySplit:
    """On one optimizer: fused updates that each cover parameters of one kind, and a callback that knows which."""

    def __init__(self, optimizer: Any, runtime: PaddleRuntime) -> None:
        self.context = runtime.context
        self.tensors: list[_FusedTensor] = []
        self._decays: dict[str, bool] = {}
        real = _real_decay(optimizer, runtime)
        for buffer in runtime.buffers:
            if buffer.trainable:
                kinds = [real[parameter.name] for parameter in buffer.parameters]
                for one, kind in _cut_by_kind(buffer, kinds, runtime.rank):
                    self.tensors.append(one)
                    self._decays[one.live.name] = kind
        self._step: Callable[..., Any] = optimizer._create_optimization_pass
        optimizer._apply_decay_param_fun = self._decays.__getitem__
        optimizer._create_optimization_pass = self._step_parts

    def _step_parts(self, parameters_and_grads: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = {buffer.name: gradient for buffer, gradient in parameters_and_grads}
        parts = []
        for one in self.tensors:
            gradient = gradients[one.buffer.live.name]
            whole = one.within.numel == one.buffer.layout.shard_numel
            parts.append((one.live, gradient if whole else gradient._slice(one.within.start, one.within.stop)))
        return self._step(parts, *args, **kwargs)


def _cut_by_kind(buffer: PaddleBuffer, kinds: Sequence[bool], rank: int) -> Iterator[tuple[_FusedTensor, bool]]:
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
        yield _FusedTensor(live, buffer, within), kinds[first]


def _fused_tensors(optimizer: Any, runtime: PaddleRuntime) -> list[_FusedTensor]:
    """Return what the optimizer's updates step."""
    split = optimizer.__dict__.get(_SPLIT_ATTRIBUTE)
    if split is not None:
        return list(split.tensors)
    return [_FusedTensor(one.live, one, Range(0, one.layout.shard_numel)) for one in runtime.buffers if one.trainable]


def _owner(optimizer: Any, fused: _FusedTensor) -> str:
    """Return the name under which the states of a fused tensor are filed: its master weight's where there is one."""
    name: str = fused.live.name
    master = optimizer._master_weights.get(name)
    return name if master is None else str(master.name)


def _pieces(
    shards: Sequence[PaddleShard], fused: _FusedTensor, suffix: str, kind: StateKind, tensor: paddle.Tensor
) -> Iterator[tuple[OptimizerState, paddle.Tensor]]:
    shape = list(tensor.shape)
    if shape not in ([[], [1]] if kind is StateKind.SCALAR else [[fused.within.numel]]):
        raise UnsupportedOptimizerError(
            f"state '{suffix}' of '{fused.live.name}' has shape {shape}, and is {kind.value}; it can't be saved right"
        )
    for shard in shards:
        place = shard.in_shard.intersect(fused.within)
        if place.numel:
            place = place.shift(-fused.within.start)
            piece = tensor if kind is StateKind.SCALAR else tensor._slice(place.start, place.stop)
            yield OptimizerState(shard, suffix, kind, piece), tensor
