"""Recomputed blocks, losses of more than the output, several forwards or backwards, buffers, and errors in the middle of a forward."""

from __future__ import annotations

import functools

import paddle
from paddle import nn
from paddle.nn import functional as F
from scenario_table import Scenarios, adamw, raise_error, sgd
from training_models import (
    Images,
    Nested,
    Net,
    Recomputed,
    SideOutputs,
)
from training_runs import VOCABULARY, Run, language_loss

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario
_add = SCENARIOS.add


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
        run.step(model, optimizer, loss)
    run.note_weights(model)


@scenario
def exception_in_the_middle_of_a_forward(run: Run) -> None:
    model = Net(3, "matmul")
    optimizer = run.start(model, sgd)
    run.train(model, optimizer, 1)
    for block in (model.blocks[1], model.blocks[2].down, model.norm):
        hook = block.register_forward_pre_hook(raise_error)
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
