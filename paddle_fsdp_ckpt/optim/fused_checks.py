"""What an optimizer that steps Paddle's fused buffers can't honour: refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle import nn

from ..errors import ShardingError, UnsupportedOptimizerError, listing
from ..fsdp.paddle_runtime import PaddleRuntime, paddle_runtime
from .catalog import CATALOG, OptimizerEntry
from .fused_tensors import fused_tensors, held_names, owner_of, real_decay, split_of, trainable_slots

FUSED_CATALOG: dict[str, OptimizerEntry] = {
    name: CATALOG[name]
    for name in ("Adam", "AdamW", "Momentum", "SGD", "Adamax", "RMSProp", "NAdam", "RAdam", "Adadelta", "Adagrad", "Rprop")
}
"""The optimizers that can step fused buffers, and their states."""

_REFUSED = {
    "ASGD": "it steps them right, but the gradients that it remembers of one parameter are no one piece of those of a buffer, and can't be "
    "saved or loaded in place",
    "Lamb": "its trust ratio takes the norms of this rank's part of a buffer for those of a parameter",
    "LBFGS": "it works on the gradients of parameters, and there are none",
}


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
    owners = {owner_of(optimizer, one) for one in fused_tensors(optimizer, runtime)}
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
    is_paddles = cls.__module__.startswith("paddle.optimizer")
    entry = FUSED_CATALOG.get(cls.__name__) if is_paddles else None
    if entry is None:
        reason = f": {_REFUSED[cls.__name__]}" if is_paddles and cls.__name__ in _REFUSED else ""
        raise UnsupportedOptimizerError(
            f"{cls.__module__}.{cls.__name__} can't step the fused buffers of paddle.distributed.fsdp.fully_shard right{reason}; supported "
            f"are {', '.join(FUSED_CATALOG)} of paddle.optimizer, and the others with paddle_fsdp_ckpt.fully_shard"
        )
    return entry


def check_gradients(runtime: PaddleRuntime) -> None:
    """Raise where the last gradients of a buffer were lost, because not all of its parameters got one.

    Raises:
        ShardingError: it names the parameters of those buffers.
    """
    incomplete = {id(group.params_buffer.data_buffer): group for group in runtime.context.incomplete_gradients()}
    lost = [
        f"{len(buffer.parameters) - group.grads_use_cnt} of '{buffer.live.name}' ({listing(slot.name for slot in buffer.layout.slots)})"
        for buffer in runtime.buffers
        if (group := incomplete.get(id(buffer.live))) is not None
    ]
    if lost:
        raise ShardingError(
            "in the last backward some parameters of Paddle's fused buffers got no gradient, and Paddle loses those of the whole buffer "
            f"then: {listing(lost)}. The training went wrong there: call repair_paddle_runtime(model, optimizer) before the first step, or "
            "use paddle_fsdp_ckpt.fully_shard; the weights alone are saved without the optimizer"
        )


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
    trainable = {parameter.name for _, _, parameter in trainable_slots(runtime)}
    held = held_names(optimizer, slots)
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


def _check_decay(optimizer: Any, runtime: PaddleRuntime) -> None:
    ask, split = getattr(optimizer, "_apply_decay_param_fun", None), split_of(optimizer)
    if split is not None and split.raw_context is not runtime.context.raw:
        raise UnsupportedOptimizerError(f"{type(optimizer).__name__}: its weight decay was split for another model; make it anew")
    if ask is None or split is not None:
        return
    decays = real_decay(optimizer, runtime)
    by_name = runtime.context.answers_decay_by_name and not getattr(optimizer, "_fsdp_decay_fun_bound", False)
    answers = {
        # A Paddle that will ask for each parameter, at the first step, has one answer for a buffer all the same.
        id(buffer): all(decays[parameter.name] for parameter in buffer.parameters) if by_name else bool(ask(buffer.live.name))
        for buffer in runtime.buffers
        if buffer.trainable
    }
    wrong = [name for buffer, name, parameter in trainable_slots(runtime) if decays[parameter.name] != answers[id(buffer)]]
    if wrong:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}: Paddle asks apply_decay_param_fun with the names of fused buffers, so weight decay is wrong for "
            f"{len(wrong)} parameters: {listing(wrong)}; call split_weight_decay(model, optimizer) before the first step"
        )
