"""What must train like one unfused process on the same global batch: one function a scenario."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from harness import this_rank
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from paddle.optimizer import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Momentum, NAdam, RAdam, RMSProp, Rprop
from training_models import (
    WIDTH,
    AttentionBlock,
    Block,
    Collections,
    ExpertNet,
    Images,
    LoRALinear,
    Nested,
    Nestedly,
    Net,
    Odd,
    PartlyWithoutGradient,
    Recomputed,
    Recurrent,
    SavingBlock,
    SideOutputs,
    Transformer,
    Unused,
    WeirdlyNamedThing,
    WithSideOutputs,
)
from training_runs import VOCABULARY, Run, Scenario, language_loss

from paddle_fsdp_ckpt import clip_grad_norm_

SCENARIOS: dict[str, Scenario] = {}

FLOAT32 = {"optimizer_clip_by_norm", "clip_set_later", "blocks_5", "gradient_accumulation"}
"""Run in float32, as Paddle has no float64 kernel for them on CPU, or to have tried it; the others in float64, where differences show."""


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def sgd(model: nn.Layer) -> Any:
    return SGD(0.3, parameters=model.parameters())


def adamw(model: nn.Layer) -> Any:
    clip = nn.ClipGradByGlobalNorm(0.5)
    # Where the true gradient is 0, Adam would amplify the order of summation.
    return AdamW(0.01, epsilon=1e-6, parameters=model.parameters(), weight_decay=0.1, grad_clip=clip)


def _add(name: str, build: Callable[[], nn.Layer], make: Callable[[nn.Layer], Any] = sgd, **train: Any) -> None:
    """Add a scenario that is nothing but a model, an optimizer and the plain loop."""

    def run_it(run: Run) -> None:
        model = build()
        run.train(model, run.start(model, make), **train)

    SCENARIOS[name] = run_it


# Models.

for _count in (1, 2, 5, 12):
    _add(f"blocks_{_count}", functools.partial(Net, _count))
_add("blocks_of_any_name", functools.partial(Net, 2, None, WeirdlyNamedThing), adamw)
_add("attention_blocks", functools.partial(Net, 3, None, AttentionBlock), adamw)
_add("tied_by_matmul_in_the_root", functools.partial(Net, 2, "matmul"), adamw)
_add("tied_by_matmul_in_the_root_sgd", functools.partial(Net, 3, "matmul"))
_add("tied_by_the_same_parameter", functools.partial(Net, 2, "same"), adamw)
_add("tied_by_the_same_parameter_sgd", functools.partial(Net, 2, "same"))
_add("parameters_smaller_than_the_world", functools.partial(Net, 2, None, Odd))
_add("parameters_smaller_than_the_world_adamw", functools.partial(Net, 2, None, Odd), adamw)
_add("pylayers_that_save_weights", functools.partial(Net, 2, None, SavingBlock))


def _adapters(model: nn.Layer) -> Any:
    return adamw(model)


def _lora() -> nn.Layer:
    model = Net(3, None, LoRALinear)
    for layer in (model.embed, model.norm, model.head):
        for parameter in layer.parameters():
            parameter.stop_gradient = True
    return model


_add("everything_frozen_but_adapters", _lora, sgd)
_add("everything_frozen_but_adapters_adamw", _lora, adamw)


def _frozen(which: Callable[[str], bool], tied: str | None = None) -> nn.Layer:
    model = Net(3, tied)
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = which(name)
    return model


_add("first_frozen", lambda: _frozen(lambda name: name.startswith(("embed", "blocks.0"))))
_add("between_frozen", lambda: _frozen(lambda name: name.startswith("blocks.1")))
_add("last_frozen", lambda: _frozen(lambda name: name.startswith(("blocks.2", "norm", "head"))))
_add("biases_frozen", lambda: _frozen(lambda name: name.endswith("bias")))
_add("all_but_biases_frozen", lambda: _frozen(lambda name: not name.endswith("bias")), adamw)
_add("tied_and_frozen", lambda: _frozen(lambda name: name.startswith("embed"), "same"))
_add("one_trains", lambda: _frozen(lambda name: name != "blocks.1.up.weight"), adamw)


@scenario
def freeze_and_unfreeze(run: Run) -> None:
    model = Net(3)
    first, later = model.blocks[1].parameters(), model.embed.parameters()
    for parameter in later:
        parameter.stop_gradient = True
    optimizer = run.start(model, lambda model: AdamW(0.01, parameters=model.parameters()))
    run.train(model, optimizer, 2)
    for parameter in first:
        parameter.stop_gradient = True
    run.train(model, optimizer, 2, first=2)
    for parameter in [*first, *later]:
        parameter.stop_gradient = False
    run.train(model, optimizer, 2, first=4)


def _branch_loss(used: Callable[[Run, int], bool]) -> Callable[[Run, nn.Layer, int], paddle.Tensor]:
    def loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
        tokens = run.batch(step)
        return F.cross_entropy(model(tokens, used(run, step)).reshape([-1, VOCABULARY]), tokens.reshape([-1]))

    return loss


@scenario
def parameters_unused_for_ever_or_in_a_step(run: Run) -> None:
    model = Unused()
    run.train(model, run.start(model, adamw), 4, _branch_loss(lambda _, step: step % 2 == 1))


@scenario
def parameters_unused_in_a_step_and_gradients_dropped(run: Run) -> None:
    model = Unused()
    optimizer = run.start(model, lambda model: Momentum(0.1, parameters=model.parameters()))
    for step in range(4):
        loss = _branch_loss(lambda _, step: step % 2 == 1)(run, model, step)
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        run.log(loss)
    run.note_weights(model)


@scenario
def parameters_unused_on_one_rank(run: Run) -> None:
    model = Unused()
    optimizer = run.start(model, adamw)
    for step in range(3):
        tokens = run.batch(step)
        if run.sharded:
            loss = F.cross_entropy(model(tokens, run.rank == 0).reshape([-1, VOCABULARY]), tokens.reshape([-1]))
        else:
            loss = _by_parts(model, tokens)
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        run.log(loss)
    run.note_weights(model)


def _by_parts(model: nn.Layer, tokens: paddle.Tensor) -> paddle.Tensor:
    parts = tokens.split(this_rank().world_size)
    losses = [F.cross_entropy(model(part, number == 0).reshape([-1, VOCABULARY]), part.reshape([-1])) for number, part in enumerate(parts)]
    return paddle.add_n(losses) / len(losses)


# Experts: a rank's tokens miss some, or all ranks' do.

_add(
    "experts_missed_by_a_rank",
    lambda: ExpertNet(lambda tokens: tokens[:, :1].expand([-1, 5]) % 4),
    sgd,
    loss=lambda r, m, s: _flat_loss(r, m, s),
)
_add("experts_missed_by_all", lambda: ExpertNet(lambda tokens: tokens % 2), adamw, loss=lambda r, m, s: _flat_loss(r, m, s))


def _flat_loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    tokens = run.batch(step)
    return F.cross_entropy(model(tokens), tokens.reshape([-1]))


# Odd uses.

_add("recompute_around_blocks", functools.partial(Recomputed, False))
_add("recompute_inside_blocks", functools.partial(Recomputed, True))
_add("recompute_around_blocks_not_reentrant", functools.partial(Recomputed, False, use_reentrant=False))


def _side_loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    loss = language_loss(run, model, step)
    return loss + 0.1 * paddle.add_n([block.aux_loss for block in model.blocks]) + 0.3 * model.penalty


_add("side_outputs_in_the_loss", SideOutputs, sgd, loss=_side_loss)
_add("side_outputs_in_the_loss_adamw", SideOutputs, adamw, loss=_side_loss)


def _nested_loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    tokens = run.batch(step)
    logits, nothing = model(tokens)
    assert nothing is None
    return F.cross_entropy(logits.reshape([-1, VOCABULARY]), tokens.reshape([-1]))


_add("nested_outputs_and_layers_called_twice", Nested, sgd, loss=_nested_loss)


def _twice_loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    return language_loss(run, model, step) + 0.5 * language_loss(run, model, step + 100)


_add("two_forwards_then_backward", functools.partial(Net, 2, "matmul"), sgd, loss=_twice_loss)


def _image_loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    return model(run.images(step, 3, 5, 5)).square().mean()


_add("convolutions", Images, sgd, loss=_image_loss)
_add("convolutions_adamw", Images, adamw, loss=_image_loss)


@scenario
def batch_norm_in_eval_mode(run: Run) -> None:
    model = Images(norm=True)
    model.eval()
    model.norm._mean.set_value(paddle.full([16], 0.2 if run.rank == 0 else 99.0))
    run.train(model, run.start(model, sgd), loss=_image_loss)


@scenario
def retain_graph(run: Run) -> None:
    model = Net(3, "matmul")
    optimizer = run.start(model, sgd)
    for step in range(2):
        # Not cross entropy: its backward in Paddle 3.3 overwrites the softmax that the graph keeps.
        loss = model(run.batch(step)).square().mean()
        loss.backward(retain_graph=True)
        run.note_gradients(model)
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)


@scenario
def exception_in_the_middle_of_a_forward(run: Run) -> None:
    model = Net(3, "matmul")
    optimizer = run.start(model, sgd)
    run.train(model, optimizer, 1)
    for block in (model.blocks[1], model.blocks[2].down, model.norm):
        hook = block.register_forward_pre_hook(_raise)
        for mode in (paddle.no_grad, paddle.enable_grad):
            try:
                with mode():
                    language_loss(run, model, 1)
            except ZeroDivisionError:
                run.log(paddle.zeros([]))
        hook.remove()
        with paddle.no_grad():
            run.log(language_loss(run, model, 5))
        run.train(model, optimizer, 1, first=1)
    assert len(run.losses) == 13


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


# Loops.


@scenario
def gradient_accumulation(run: Run) -> None:
    _accumulate(run, Net(2, "matmul"))


@scenario
def gradient_accumulation_with_recompute_not_reentrant(run: Run) -> None:
    _accumulate(run, Recomputed(True, use_reentrant=False))


def _accumulate(run: Run, model: nn.Layer) -> None:
    optimizer = run.start(model, adamw)
    for step in range(3):
        for micro in range(3):
            loss = language_loss(run, model, 10 * step + micro) / 3
            loss.backward()
            if micro != 1:
                run.note_gradients(model)
            run.log(loss)
        optimizer.step()
        optimizer.clear_grad()
    run.note_weights(model)


@scenario
def clear_grad_without_a_step(run: Run) -> None:
    for set_to_zero in (True, False):
        for look in (True, False):
            model = Net(2, "same")
            optimizer = run.start(model, sgd)
            for step in range(3):
                loss = language_loss(run, model, step)
                loss.backward()
                if look:
                    run.note_gradients(model)
                optimizer.clear_grad(set_to_zero=set_to_zero)
                run.note_gradients(model)
                run.log(loss)
            model.blocks[0].clear_gradients()
            run.train(model, optimizer, 2)


@scenario
def evaluation_between_steps(run: Run) -> None:
    model = Net(2, "matmul")
    optimizer = run.start(model, sgd)
    for step in range(3):
        model.eval()
        run.log(language_loss(run, model, 50))
        with paddle.no_grad():
            run.log(language_loss(run, model, 51))
        model.train()
        loss = language_loss(run, model, step)
        with paddle.no_grad():
            run.log(language_loss(run, model, 52))
        loss.backward()
        run.log(language_loss(run, model, 53))
        with paddle.no_grad():
            run.log(language_loss(run, model, 54))
        run.note_gradients(model)
        optimizer.step()
        with paddle.no_grad():
            run.log(language_loss(run, model, 55))
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)


@scenario
def set_value_between_steps(run: Run) -> None:
    model = Net(2)
    optimizer = run.start(model, sgd)
    run.train(model, optimizer, 1)
    weight = paddle.linspace(-1, 1, VOCABULARY * WIDTH, dtype=paddle.get_default_dtype()).reshape([VOCABULARY, WIDTH])
    model.embed.weight.set_value(weight)
    model.blocks[0].up.bias.set_value((weight.flatten()[:13] * 2).numpy())
    with paddle.no_grad():
        run.log(language_loss(run, model, 1))
    run.train(model, optimizer, 2, first=1)


@scenario
def minimize(run: Run) -> None:
    model = Net(2)
    optimizer = run.start(model, lambda model: Adam(0.01, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.3)))
    for step in range(3):
        loss = language_loss(run, model, step)
        loss.backward()
        optimizer.minimize(loss)
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)


@scenario
def learning_rate_schedules(run: Run) -> None:
    model = Net(2)
    schedule = paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.CosineAnnealingDecay(0.3, 5), 3, 0.0, 0.3)
    optimizer = run.start(model, lambda model: SGD(schedule, parameters=model.parameters()))
    for step in range(5):
        loss = language_loss(run, model, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)
    optimizer._learning_rate = 0.05
    run.train(model, optimizer, 2)


# Several models and optimizers.


@scenario
def generator_and_discriminator(run: Run) -> None:
    generator, discriminator = (
        nn.Sequential(nn.Linear(4, 9), nn.Tanh(), Block(9)),
        nn.Sequential(nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 1)),
    )
    make = functools.partial(AdamW, 0.01, beta1=0.5)
    first = run.start(generator, lambda model: make(parameters=model.parameters()))
    second = run.start(discriminator, lambda model: make(parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.2)))
    for step in range(3):
        fake = generator(run.images(step, 4))
        loss = (F.softplus(discriminator(fake.detach())) + F.softplus(-discriminator(run.images(step + 9, 9)))).mean()
        loss.backward()
        run.note_gradients(discriminator)
        second.step()
        second.clear_grad()
        run.log(loss)
        loss = F.softplus(-discriminator(fake)).mean()
        loss.backward()
        run.note_gradients(generator)
        first.step()
        first.clear_grad()
        second.clear_grad()
        run.log(loss)
    run.note_weights(generator)
    run.note_weights(discriminator)


@scenario
def one_optimizer_over_two_models(run: Run) -> None:
    from paddle_fsdp_ckpt.optim import bind_optimizer
    from paddle_fsdp_ckpt.training import fully_shard

    encoder, decoder = Net(2), nn.Sequential(nn.Linear(VOCABULARY, 5), nn.Linear(5, VOCABULARY))
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = SGD(0.3, parameters=parameters, grad_clip=nn.ClipGradByGlobalNorm(0.1))
    if run.sharded:
        fully_shard(encoder, **run.options)
        fully_shard(decoder, **run.options)
        bind_optimizer(optimizer)
        bind_optimizer(optimizer)
    for step in range(3):
        tokens = run.batch(step)
        loss = F.cross_entropy(decoder(encoder(tokens)).reshape([-1, VOCABULARY]), tokens.reshape([-1]))
        loss.backward()
        run.note_gradients(encoder)
        optimizer.step()
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(encoder)
    run.note_weights(decoder)


@scenario
def two_optimizers_over_halves_of_a_model(run: Run) -> None:
    from paddle_fsdp_ckpt.training import fully_shard

    model = Net(3)
    halves = [[p for n, p in model.named_parameters() if ("up" in n) == flag] for flag in (True, False)]
    first = SGD(0.2, parameters=halves[0], grad_clip=nn.ClipGradByGlobalNorm(0.2))
    second = AdamW(0.02, parameters=halves[1])
    if run.sharded:
        fully_shard(model, optimizer=[first, second], **run.options)
    for step in range(4):
        loss = language_loss(run, model, step)
        loss.backward()
        run.note_gradients(model)
        first.step()
        if step % 2:
            second.step()
            second.clear_grad()
        first.clear_grad()
        run.log(loss)
    run.note_gradients(model)
    run.note_weights(model)


@scenario
def ordinary_model_in_the_same_process(run: Run) -> None:
    ordinary = Net(2)
    theirs = adamw(ordinary)
    model = Net(2)
    optimizer = run.start(model, sgd)
    tokens = paddle.arange(10).reshape([2, 5])
    for step in range(3):
        loss = language_loss(run, model, step)
        other = F.cross_entropy(ordinary(tokens).reshape([-1, VOCABULARY]), tokens.reshape([-1]))
        other.backward()
        theirs.step()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        theirs.clear_grad()
        run.log(loss)
        run.losses.append(other.item())
    run.note_weights(model)


@scenario
def frozen_teacher(run: Run) -> None:
    from paddle_fsdp_ckpt.training import fully_shard

    teacher, model = Net(2), Net(2)
    for parameter in teacher.parameters():
        parameter.stop_gradient = True
    if run.sharded:
        fully_shard(teacher, **run.options)
    optimizer = run.start(model, sgd)
    for step in range(3):
        x = model.embed(run.batch(step))
        for one, other in zip(teacher.blocks, model.blocks, strict=True):
            x = other(one(x))
        loss = x.square().mean()
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)


# Optimizers and their options.


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


# More kinds of layers.

_add("recurrent_layers", Recurrent)
_add("paddles_transformer", Transformer)
_add("collections_and_shared_layers", Collections)
_add("recompute_at_two_levels", Nestedly)
_add("partly_without_gradient", PartlyWithoutGradient)


@scenario
def batch_norm_in_training(run: Run) -> None:
    """Each rank normalises its own rows, so the right values come from a forward of each part."""
    model = Images(norm=True)
    optimizer = run.start(model, sgd)
    for step in range(2):
        if run.sharded:
            loss = model(run.images(step, 3, 5, 5)).square().mean()
        else:
            parts = run.images(step, 3, 5, 5).split(this_rank().world_size)
            losses = [model(part).square().mean() for part in parts]
            loss = paddle.add_n(losses) / len(losses)
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)
    if not run.sharded or run.world_size == 1:
        run.losses += [model.norm._mean.numpy().sum().item()] if this_rank().world_size == 1 else []
    assert np.abs(model.norm._mean.numpy()).max() > 0, "the running mean was lost"


@scenario
def recompute_around_the_whole_model(run: Run) -> None:
    _recompute_all(run, Recomputed(True))


@scenario
def recompute_around_what_is_recomputed_otherwise(run: Run) -> None:
    _recompute_all(run, Recomputed(True, use_reentrant=False))


@scenario
def recompute_not_reentrant_around_the_whole_model(run: Run) -> None:
    _recompute_all(run, Net(3), use_reentrant=False)


def _recompute_all(run: Run, inner: nn.Layer, use_reentrant: bool = True) -> None:
    model = inner
    optimizer = run.start(model, sgd)
    for step in range(4):
        tokens = run.batch(step)
        start = paddle.zeros([1])
        start.stop_gradient = False
        logits = recompute(lambda start, tokens: inner(tokens) + start, start, tokens, use_reentrant=use_reentrant)
        loss = F.cross_entropy(logits.reshape([-1, VOCABULARY]), tokens.reshape([-1]))
        loss.backward()
        run.note_gradients(model)
        if step != 1:  # once accumulated
            optimizer.step()
            optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)


@scenario
def recompute_not_reentrant_with_side_outputs(run: Run) -> None:
    """Backwards of several blocks are under way together."""
    model = WithSideOutputs(4)
    run.train(model, run.start(model, sgd), loss=_with_side_outputs)


def _with_side_outputs(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    tokens = run.batch(step)
    logits, side = model(tokens)
    return F.cross_entropy(logits.reshape([-1, VOCABULARY]), tokens.reshape([-1])) + 0.1 * side


@scenario
def exception_in_the_middle_of_a_backward(run: Run) -> None:
    model = Net(3)
    optimizer = run.start(model, sgd)
    run.train(model, optimizer, 1)
    for number in (2, 0):
        hook = model.blocks[number].register_forward_post_hook(lambda layer, inputs, out: out.register_hook(_raise) and None)
        loss = language_loss(run, model, 1)
        try:
            loss.backward()
        except OSError:
            run.log(paddle.zeros([]))
        hook.remove()
        del loss
        optimizer.clear_grad()
        run.train(model, optimizer, 1, first=1)
    assert len(run.losses) == 5


@scenario
def saved_tensor_hooks_of_the_user(run: Run) -> None:
    model = Net(3, "matmul", AttentionBlock)
    optimizer = run.start(model, sgd)
    for step in range(2):
        with paddle.autograd.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            loss = language_loss(run, model, step)
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad()
        run.log(loss)


@scenario
def gradients_of_inputs(run: Run) -> None:
    """``paddle.grad`` through a model, and a penalty on that gradient."""
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = run.start(model, sgd)
    for step in range(3):
        x = run.images(step, 4)
        x.stop_gradient = False
        (gradient,) = paddle.grad(model(x).sum(), x)
        run.log(gradient.square().mean())
        (gradient,) = paddle.grad(model(x).sum(), x, create_graph=True)
        loss = model(x).mean() + gradient.square().sum(-1).mean()
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)


@scenario
def sharded_model_inside_a_layer_that_is_sharded_too(run: Run) -> None:
    """An adapter around a frozen base that was sharded by itself, reached by a plain attribute."""
    from paddle_fsdp_ckpt.training import fully_shard

    class Around(nn.Layer):
        def __init__(self, base: nn.Layer) -> None:
            super().__init__()
            self.__dict__["base"] = base
            self.first, self.last = Block(), Block()

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return self.last(self.base(self.first(x)))

    base = nn.Sequential(Block(), Block())
    model = Around(base)
    first = SGD(0.1, parameters=base.parameters())
    if run.sharded:
        fully_shard(base, optimizer=first, **run.options)
    second = run.start(model, sgd)
    for step in range(3):
        loss = model(run.images(step, WIDTH)).square().mean()
        loss.backward()
        run.note_gradients(model)
        run.note_gradients(base)
        first.step()
        second.step()
        first.clear_grad()
        second.clear_grad()
        run.log(loss)
    run.note_weights(model)
    run.note_weights(base)
