"""Optimizers and their options, and clipping."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn
from paddle.optimizer import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Momentum, NAdam, RAdam, RMSProp, Rprop
from scenario_table import Scenarios, adamw, sgd
from training_models import (
    Net,
    Odd,
)
from training_runs import Run, language_loss

from paddle_fsdp_ckpt import clip_grad_norm_

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario
_add = SCENARIOS.add


def _optimizer(name: str, make: Callable[[nn.Layer], Any]) -> None:
    _add(f"optimizer_{name}", functools.partial(Net, 2), make, steps=4)


def _all(cls: Any, *args: Any, **options: Any) -> Callable[[nn.Layer], Any]:
    return lambda model: cls(*args, parameters=model.parameters(), **options)


_optimizer("sgd_l2", _all(SGD, 0.2, weight_decay=0.1))
_optimizer("sgd_l1", _all(SGD, 0.2, weight_decay=paddle.regularizer.L1Decay(0.01)))
_optimizer("momentum", _all(Momentum, 0.1, 0.9))
_optimizer("momentum_nesterov_l2", _all(Momentum, 0.1, 0.9, use_nesterov=True, weight_decay=paddle.regularizer.L2Decay(0.1)))
_optimizer("momentum_l1", _all(Momentum, 0.1, 0.9, weight_decay=paddle.regularizer.L1Decay(0.01)))
_optimizer("adam", _all(Adam, 0.01))
_optimizer("adam_amsgrad_l2", _all(Adam, 0.01, amsgrad=True, weight_decay=0.1))
_optimizer("adam_lazy", _all(Adam, 0.01, lazy_mode=True))
_optimizer("adamw_amsgrad", _all(AdamW, 0.01, amsgrad=True))
_optimizer("adamw_named", _all(AdamW, 0.01, name="mine"))
_optimizer("clip_by_norm", _all(SGD, 0.3, grad_clip=nn.ClipGradByNorm(0.02)))
_optimizer("clip_by_value", _all(SGD, 0.3, grad_clip=nn.ClipGradByValue(0.01)))
_optimizer("clip_by_global_norm", _all(SGD, 0.3, grad_clip=nn.ClipGradByGlobalNorm(0.1)))
_optimizer("clip_by_global_norm_not_reached", _all(SGD, 0.3, grad_clip=nn.ClipGradByGlobalNorm(1e3, auto_skip_clip=True)))


@functools.partial(_optimizer, "decay_function")
def _decay_function(model: nn.Layer) -> Any:
    decayed = {p.name for n, p in model.named_parameters() if not n.endswith("bias") and "norm" not in n}
    return AdamW(0.01, parameters=model.parameters(), weight_decay=5.0, apply_decay_param_fun=lambda name: name in decayed)


@functools.partial(_optimizer, "groups")
def _groups(model: nn.Layer) -> Any:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    blocks = [p for n, p in model.named_parameters() if n.startswith("blocks") and not n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.startswith("blocks") and not n.endswith("bias")]
    return AdamW(
        0.01,
        parameters=[
            {"params": biases, "weight_decay": 0.0, "learning_rate": 0.5},
            {"params": blocks, "grad_clip": nn.ClipGradByGlobalNorm(0.02), "beta1": 0.5, "beta2": 0.7},
            {"params": rest, "weight_decay": 3.0, "grad_clip": nn.ClipGradByValue(0.003), "epsilon": 1e-5},
        ],
        weight_decay=0.5,
        grad_clip=nn.ClipGradByGlobalNorm(0.1),
    )


@functools.partial(_optimizer, "momentum_groups")
def _momentum_groups(model: nn.Layer) -> Any:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.2, "momentum": 0.5, "learning_rate": 0.1}, {"params": rest}]
    return Momentum(0.1, 0.9, parameters=groups, weight_decay=0.01)


def _all_and_groups(what: str, cls: Any, *args: Any, group: dict[str, Any], steps: int = 5, **options: Any) -> None:
    """Add an optimizer over a model with cut, whole and empty pieces, and another one with param groups."""

    def in_groups(model: nn.Layer) -> Any:
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        return cls(*args, parameters=[{"params": biases, "learning_rate": 0.5, **group}, {"params": rest}], **options)

    for suffix, make in (("", _all(cls, *args, **options)), ("_groups", in_groups)):
        _add(f"optimizer_{what}{suffix}", functools.partial(Net, 2, None, Odd), make, steps=steps)


_all_and_groups("adamax", Adamax, 0.01, epsilon=1e-6, group={"beta1": 0.5, "beta2": 0.7, "weight_decay": 0.3})
_all_and_groups("nadam", NAdam, 0.01, epsilon=1e-6, weight_decay=0.1, group={"beta1": 0.5, "beta2": 0.7, "momentum_decay": 0.1})
_all_and_groups("radam", RAdam, 0.01, epsilon=1e-6, group={"beta1": 0.5, "beta2": 0.9, "weight_decay": 0.3}, steps=9)
_all_and_groups("rmsprop", RMSProp, 0.01, group={"rho": 0.5, "momentum": 0.3, "centered": True})
_all_and_groups("rmsprop_momentum", RMSProp, 0.01, momentum=0.9, weight_decay=0.1, group={"epsilon": 1e-4})
_all_and_groups("rmsprop_centered", RMSProp, 0.01, momentum=0.5, centered=True, name="mine", group={"centered": False})
_all_and_groups("adadelta", Adadelta, 0.5, name="mine", group={"rho": 0.5, "epsilon": 1e-3, "weight_decay": 0.3})
_all_and_groups("adagrad", Adagrad, 0.05, initial_accumulator_value=0.1, group={"epsilon": 1e-3, "initial_accumulator_value": 0.5})
_all_and_groups("rprop", Rprop, 0.01, (1e-3, 0.02), grad_clip=nn.ClipGradByGlobalNorm(0.1), group={})
_all_and_groups("asgd", ASGD, 0.1, 3, grad_clip=nn.ClipGradByGlobalNorm(0.1), group={"weight_decay": 0.3})


@scenario
def parameter_attributes(run: Run) -> None:
    for make in (_all(SGD, 0.3, weight_decay=0.2, grad_clip=nn.ClipGradByGlobalNorm(0.05)), _all(Momentum, 0.3), adamw):
        attribute = paddle.ParamAttr(learning_rate=0.25, regularizer=paddle.regularizer.L2Decay(0.5), need_clip=False)
        other = paddle.ParamAttr(regularizer=paddle.regularizer.L1Decay(0.05))
        model = nn.Sequential(nn.Linear(7, 9, weight_attr=attribute, bias_attr=other), nn.GELU(), nn.Linear(9, 3, bias_attr=attribute))
        run.train(model, run.start(model, make), loss=lambda run, model, step: model(run.images(step, 7)).square().mean())


@scenario
def clip_set_later(run: Run) -> None:
    model = Net(2)
    optimizer = run.start(model, sgd)
    run.train(model, optimizer, 1)
    for step, clip in enumerate((nn.ClipGradByGlobalNorm(0.05), nn.ClipGradByNorm(0.01), None), 1):
        optimizer._grad_clip = clip
        run.train(model, optimizer, 1, first=step)
        assert optimizer._grad_clip is clip


@scenario
def parameters_given_to_the_optimizer_later_and_taken_away(run: Run) -> None:
    clip = nn.ClipGradByGlobalNorm(0.05)
    for grouped in (True, False):
        model = Net(3)
        head = [p for n, p in model.named_parameters() if n.startswith("head")]
        rest = [p for n, p in model.named_parameters() if not n.startswith("head")]
        held = [{"params": head, "weight_decay": 0.1, "grad_clip": clip}] if grouped else list(head)
        optimizer = run.start(model, lambda model, held=held: Momentum(0.1, 0.9, parameters=held, grad_clip=clip))
        run.train(model, optimizer, 2)
        if grouped:
            optimizer._add_param_group({"params": rest, "weight_decay": 0.2, "grad_clip": clip})
        else:
            optimizer._parameter_list.extend(rest)
        run.train(model, optimizer, 2, first=2)
        if not grouped:
            del optimizer._parameter_list[:2]
            run.train(model, optimizer, 2, first=4)


@scenario
def gradients_clipped_by_hand(run: Run) -> None:
    """The norm, and the gradients clipped by it, are those of Paddle's own function on whole gradients."""
    model = Net(2, tied="matmul")
    optimizer = run.start(model, sgd)
    clip = clip_grad_norm_ if run.sharded else nn.utils.clip_grad_norm_
    for step, (norm_type, most) in enumerate([(2, 0.1), (1, 0.5), (math.inf, 0.01), (2.0, math.inf), (2, 1e3)]):
        loss = language_loss(run, model, step)
        loss.backward()
        run.log(loss)
        run.losses.append(clip(model.parameters(), most, norm_type).item())
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad()
    run.note_weights(model)
