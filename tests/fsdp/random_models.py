"""Random models, to meet what nobody thought of: nesting, recompute, tied and borrowed weights, layers called twice, side losses."""

from __future__ import annotations

import random
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from training_runs import Run

from paddle_fsdp_ckpt.fsdp import runtime_of

WIDTH = 6


class RandomLayer(nn.Layer):
    """A random program over its own parameters, its children, and weights that it shares with other layers or borrows for a moment."""

    def __init__(self, choose: random.Random, depth: int, weights: list[Any]) -> None:
        super().__init__()
        self.weight = None
        if choose.random() < 0.6:
            self.weight = self.create_parameter([WIDTH, WIDTH])
            weights.append(self.weight)
        elif weights and choose.random() < 0.5:
            self.weight = choose.choice(weights)
        self.bias = self.create_parameter([WIDTH], is_bias=True) if choose.random() < 0.5 else None
        self.norm = nn.LayerNorm(WIDTH) if choose.random() < 0.5 else None
        self.children_ = nn.LayerList([RandomLayer(choose, depth - 1, weights) for _ in range(choose.randint(0, 3) if depth else 0)])
        self.lone = RandomLayer(choose, depth - 1, weights) if depth and choose.random() < 0.4 else None
        self.recomputed = [choose.random() < 0.25 for _ in self.children_]
        self.calls = [2 if choose.random() < 0.2 else 1 for _ in self.children_]
        self.borrows, self.leaves_loss, self.recomputes_itself = choose.random() < 0.2, choose.random() < 0.2, choose.random() < 0.15

    def own(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x * 1.0
        if self.norm is not None:
            x = self.norm(x)
        if self.weight is not None:
            x = x + F.gelu(x.matmul(self.weight))
        return x if self.bias is None else x + self.bias

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        borrowed = self.children_[0].weight if self.borrows and len(self.children_) else None
        x = recompute(self.own, x) if self.recomputes_itself else self.own(x)
        for child, recomputed, calls in zip(self.children_, self.recomputed, self.calls, strict=True):
            for _ in range(calls):
                x = recompute(child, x) if recomputed else child(x)
        if self.lone is not None:
            x = x + 0.5 * self.lone(x)
        if borrowed is not None:
            x = x + F.tanh(x.matmul(borrowed.T))
        if self.leaves_loss:
            self.loss = (x * 0.1).square().mean()
        return x


def random_training(seed: int, run: Run) -> None:
    """Build a random model and train it by a random loop."""
    choose = random.Random(seed)
    paddle.seed(seed)
    model = RandomLayer(choose, 3, [])
    model.head = nn.Linear(WIDTH, 3)
    for parameter in model.parameters():
        parameter.stop_gradient = choose.random() < 0.15
    layers = [layer for layer in model.sublayers(include_self=True) if isinstance(layer, RandomLayer)]
    recomputes = any(any(layer.recomputed) or layer.recomputes_itself for layer in layers)
    clip = choose.choice([None, nn.ClipGradByGlobalNorm(0.05)])
    name, options = choose.choice([("SGD", {}), ("Momentum", {}), ("AdamW", {"epsilon": 1e-4})])

    def make(model: nn.Layer) -> Any:
        return getattr(paddle.optimizer, name)(0.02, parameters=model.parameters(), grad_clip=clip, **options)

    optimizer = run.start(model, make, unit_layers=choose.choice([None, None, [], [nn.Linear]]))

    def loss_of(step: int) -> paddle.Tensor:
        y = model(run.images(step, 4, WIDTH))
        # A loss that a layer leaves inside recompute belongs to a graph that is gone.
        on_the_side = [] if recomputes else [layer.loss for layer in layers if layer.leaves_loss]
        return paddle.add_n([y.square().mean(), model.head(y).mean(), *on_the_side])

    set_to_zero = choose.random() < 0.5
    for step in range(3):
        for _ in range(choose.randint(1, 2)):
            if choose.random() < 0.3:
                with paddle.no_grad():
                    run.log(loss_of(step + 7))
            if choose.random() < 0.2:
                loss_of(step + 9)
            loss = loss_of(step)
            if choose.random() < 0.2:
                loss = loss + loss_of(step + 5)
            loss.backward()
            run.log(loss)
            if choose.random() < 0.5:
                run.note_gradients(model)
            if choose.random() < 0.1:
                optimizer.clear_grad(set_to_zero=set_to_zero)
        if choose.random() < 0.2:
            parameter = choose.choice(model.parameters())
            parameter.stop_gradient = not parameter.stop_gradient
        optimizer.step()
        optimizer.clear_grad(set_to_zero=set_to_zero)
    run.note_weights(model)
    runtime = runtime_of(model)
    assert runtime is None or run.world_size == 1 or runtime.memory_bytes()[1] == 0
