"""The registry over Paddle's fused buffers: an accumulator serves all parameters of a buffer, and each has a piece of it.

For models that Paddle's own ``paddle.distributed.fsdp.fully_shard`` cut. Paddle files an accumulator under the name of the fused buffer
that owns it, or of that one's master weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import MismatchError, ShardingError, UnsupportedOptimizerError, listing
from ..fsdp.paddle_runtime import PaddleBuffer, PaddleRuntime, PaddleShard, flat_weight, paddle_runtime, replicated_weight
from .catalog import CATALOG, OptimizerEntry, StateKind, state_name
from .registry import MASTER_WEIGHT_KEY, OptimizerState

_ELEMENTWISE = StateKind.ELEMENTWISE
_MOMENTS = {"moment1": _ELEMENTWISE, "moment2": _ELEMENTWISE}

FUSED_CATALOG: dict[str, OptimizerEntry] = {
    **CATALOG,
    "Adamax": OptimizerEntry({"moment": _ELEMENTWISE, "inf_norm": _ELEMENTWISE, "beta1_pow_acc": StateKind.SCALAR}),
    "RMSProp": OptimizerEntry({"momentum": _ELEMENTWISE, "mean_square": _ELEMENTWISE, "mean_grad": _ELEMENTWISE}),
    # Three numbers, of which Paddle keeps a copy an element, also unfused: so they are elementwise, and fit any run.
    "NAdam": OptimizerEntry({**_MOMENTS, "momentum_decay_pow": _ELEMENTWISE, "beta2_pow": _ELEMENTWISE, "mu_product": _ELEMENTWISE}),
    "Adadelta": OptimizerEntry({"avg_squared_grad": _ELEMENTWISE, "avg_squared_update": _ELEMENTWISE}),
    "Adagrad": OptimizerEntry({"moment": _ELEMENTWISE}),
}
"""The optimizers that can step fused buffers, and their states."""


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
        optimizer._create_accumulators(block, [buffer.live for buffer in runtime.buffers if buffer.trainable])


def fused_states(optimizer: Any) -> list[OptimizerState]:
    """Return the states that there are, of the parameters of which this rank keeps a piece.

    An elementwise state's tensor is a 1-D view of the fused accumulator; a scalar's is the one that all parameters of a buffer share.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
    """
    runtime = check_fused(optimizer)
    name, kinds = type(optimizer).__name__, fused_entry_of(optimizer).states
    owners = {_owner(optimizer, buffer): buffer for buffer in runtime.buffers}
    states: list[OptimizerState] = []
    for accumulator, tensors in optimizer._accumulators.items():
        state = state_name(optimizer, accumulator)
        for owner, tensor in tensors.items():
            if state not in kinds:
                raise UnsupportedOptimizerError(
                    f"{type(optimizer).__name__} keeps a state '{state}' that is not in the table of its states"
                )
            _check_shape(optimizer, state, kinds[state], owners[owner], tensor)
            states += _pieces(runtime, owners[owner], f"{state}_0", kinds[state], tensor)
    for buffer in runtime.buffers:
        master = optimizer._master_weights.get(buffer.live.name)
        if master is not None:
            _check_shape(optimizer, MASTER_WEIGHT_KEY, _ELEMENTWISE, buffer, master)
            states += _pieces(runtime, buffer, MASTER_WEIGHT_KEY, _ELEMENTWISE, master)
    return states


def weight_of(state: OptimizerState) -> ShardedWeight:
    """Describe a state of :func:`fused_states` for ``paddle.distributed.save_state_dict`` and ``load_state_dict``."""
    assert isinstance(state.shard, PaddleShard)
    if state.kind is StateKind.SCALAR:
        return replicated_weight(state.key, state.tensor)
    return flat_weight(state.key, state.shard, state.tensor)


@dataclass(frozen=True, eq=False)
class FusedLoad:
    """What to load an optimizer's states into: views for what is elementwise, and for scalars a copy of each parameter's own.

    A buffer has one tensor for a scalar of all its parameters, and what is loaded may hold different values for them.
    """

    optimizer: Any
    weights: dict[str, ShardedWeight]
    _scalars: Sequence[tuple[OptimizerState, paddle.Tensor]]

    def finish(self) -> None:
        """Put the loaded scalars into the optimizer.

        Raises:
            MismatchError: parameters of one buffer were loaded with different values of a scalar. The optimizer has some of the loaded
                states then.
        """
        loaded: dict[int, list[tuple[OptimizerState, paddle.Tensor]]] = defaultdict(list)
        for state, copy in self._scalars:
            loaded[id(state.tensor)].append((state, copy))
        differing = []
        for pairs in loaded.values():
            first = pairs[0][1].numpy().tobytes()
            differing += [f"{state.key} and {pairs[0][0].key}" for state, copy in pairs[1:] if copy.numpy().tobytes() != first]
        if differing:
            raise MismatchError(
                "a fused buffer of Paddle's has one value for all its parameters, and the checkpoint has different ones: "
                f"{listing(differing)}; the parameters did not step equally often. The optimizer holds a part of the checkpoint now: load "
                "another one, or shard the model with paddle_fsdp_ckpt.fully_shard and load this one"
            )
        with paddle.no_grad():
            for pairs in loaded.values():
                state, copy = pairs[0]
                paddle.assign(copy, state.tensor)


def begin_load(optimizer: Any) -> FusedLoad:
    """Create the states that there are not yet, and return what to load them into; call ``finish()`` after that.

    Raises:
        ShardingError: as :func:`optimizer_sharded_state_dict`.
        UnsupportedOptimizerError: the same.
    """
    init_optimizer_state(optimizer)
    weights: dict[str, ShardedWeight] = {}
    scalars: list[tuple[OptimizerState, paddle.Tensor]] = []
    for state in fused_states(optimizer):
        if state.kind is StateKind.SCALAR:
            copy = state.tensor.clone()
            scalars.append((state, copy))
            weights[state.key] = replicated_weight(state.key, copy)
        else:
            weights[state.key] = weight_of(state)
    return FusedLoad(optimizer, weights, scalars)


def check_fused(optimizer: Any) -> PaddleRuntime:
    """Return the runtime whose fused buffers an optimizer steps.

    Raises:
        ShardingError: no model is cut by Paddle's own ``fully_shard``, or its parameters are not those of that model.
        UnsupportedOptimizerError: it can't step fused buffers right.
    """
    fused_entry_of(optimizer)
    name = type(optimizer).__name__
    runtime = paddle_runtime()
    if runtime is None:
        raise ShardingError(f"{name}: no model in this process was cut by paddle.distributed.fsdp.fully_shard")
    groups = optimizer._param_groups or []
    if any(isinstance(group, dict) for group in groups):
        raise UnsupportedOptimizerError(
            f"{name}: with param groups Paddle steps all fused buffers once for each group, and ignores what the groups say; give it "
            "parameters=model.parameters(), or use paddle_fsdp_ckpt.fully_shard"
        )
    # Paddle makes new parameters in fully_shard; an optimizer made before that holds the old ones.
    trainable = {parameter.name for buffer in runtime.buffers if buffer.trainable for parameter in buffer.parameters}
    cut = {parameter.name for buffer in runtime.buffers for parameter in buffer.parameters}
    held = {one.name if one.name in cut else f"{one.name}.dist" for one in groups}
    if not held <= cut:
        raise ShardingError(
            f"{name} holds {len(held - cut)} parameters that are not of the model that paddle.distributed.fsdp.fully_shard cut: "
            f"{listing(sorted(one.removesuffix('.dist') for one in held - cut))}. Paddle lets every optimizer of the process step that "
            "model; use one model and one optimizer"
        )
    if not trainable <= held:
        slots = {shard.parameter.name: shard.slot.name for shard in runtime.shards}
        raise ShardingError(
            f"{name} doesn't hold {len(trainable - held)} of the model's trainable parameters, and Paddle would step them all the same: "
            f"{listing(sorted(slots[one] for one in trainable - held))}; give it model.parameters()"
        )
    owners = {_owner(optimizer, buffer) for buffer in runtime.buffers}
    strange = sorted({owner for tensors in optimizer._accumulators.values() for owner in tensors} - owners)
    if strange:
        raise UnsupportedOptimizerError(
            f"{name} has states of something else than fused buffers: {listing(strange)}; make it anew, so that it has not stepped before "
            "fully_shard"
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


def _owner(optimizer: Any, buffer: PaddleBuffer) -> str:
    name: str = buffer.live.name
    master = optimizer._master_weights.get(name)
    return name if master is None else str(master.name)


def _pieces(runtime: PaddleRuntime, buffer: PaddleBuffer, suffix: str, kind: StateKind, tensor: paddle.Tensor) -> Iterator[OptimizerState]:
    for shard in runtime.shards:
        if shard.buffer is buffer and shard.range.numel:
            yield OptimizerState(shard, suffix, kind, tensor if kind is StateKind.SCALAR else shard.view_of(tensor))


def _check_shape(optimizer: Any, state: str, kind: StateKind, buffer: PaddleBuffer, tensor: paddle.Tensor) -> None:
    shape = list(tensor.shape)
    if shape not in ([[], [1]] if kind is StateKind.SCALAR else [list(buffer.live.shape)]):
        raise UnsupportedOptimizerError(
            f"state '{state}' of {type(optimizer).__name__} for '{buffer.live.name}' has shape {shape}, and is {kind.value}; it can't be "
            "saved right"
        )
