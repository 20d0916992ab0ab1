"""Training loops: accumulation, evaluation between steps, values that are set, schedules."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.optimizer import SGD, Adam
from scenario_table import Scenarios, adamw, sgd
from training_models import (
    WIDTH,
    Net,
    Recomputed,
)
from training_runs import VOCABULARY, Run, language_loss

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario


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
def gradients_changed_between_backward_and_apply_gradients(run: Run) -> None:
    for options in ({}, {"weight_decay": 0.1, "grad_clip": nn.ClipGradByGlobalNorm(0.05)}):
        model = Net(3)
        optimizer = run.start(model, lambda model, options=options: SGD(0.3, parameters=model.parameters(), **options))
        for step in range(3):
            loss = language_loss(run, model, step)
            loss.backward()
            pairs = optimizer.backward(loss)
            skipped = id(model.blocks[1].up.weight)
            optimizer.apply_gradients([(p, g * 0.5) for p, g in pairs if id(p) != skipped])
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
