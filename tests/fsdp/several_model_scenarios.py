"""Several models and optimizers in one process."""

from __future__ import annotations

import functools

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, AdamW
from scenario_table import Scenarios, adamw, sgd
from training_models import (
    Block,
    Net,
)
from training_runs import VOCABULARY, Run, language_loss

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario


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
        run.step(model, optimizer, loss)
    run.note_weights(model)
