"""Backwards that are unlike the ordinary one: of a recomputed model, with an error, hooks, of inputs, of one model inside of another."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from paddle.optimizer import SGD
from scenario_table import Scenarios, raise_error, sgd
from training_models import (
    WIDTH,
    AttentionBlock,
    Block,
    Net,
    Recomputed,
    WithSideOutputs,
)
from training_runs import VOCABULARY, Run, language_loss

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario


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
        hook = model.blocks[number].register_forward_post_hook(lambda layer, inputs, out: out.register_hook(raise_error) and None)
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
        run.step(model, optimizer, loss)


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
        run.step(model, optimizer, loss)
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
