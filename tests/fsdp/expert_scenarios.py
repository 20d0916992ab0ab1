"""Mixtures of experts with a learned router, and ordinary trouble: what must train like one process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.recompute import recompute
from paddle.nn import functional as F
from paddle.optimizer import SGD, AdamW
from training_models import WIDTH, Block
from training_runs import VOCABULARY, Run, Scenario

EXPERTS = 4
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class LayerExperts(nn.Layer):
    """One layer an expert; one that gets no token isn't run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.LayerList([Block() for _ in range(EXPERTS)])

    def forward(self, x: paddle.Tensor, choice: np.ndarray) -> paddle.Tensor:
        out = paddle.zeros_like(x)
        for number in sorted(set(choice.tolist())):
            mine = paddle.to_tensor(np.flatnonzero(choice == number))
            out = out + paddle.scatter(paddle.zeros_like(x), mine, self.experts[number](paddle.gather(x, mine)))
        return out


class StackedExperts(nn.Layer):
    """All experts' matrices in one 3-D parameter each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self.create_parameter([EXPERTS, WIDTH, 9])
        self.down = self.create_parameter([EXPERTS, 9, WIDTH])

    def forward(self, x: paddle.Tensor, choice: np.ndarray) -> paddle.Tensor:
        order = np.argsort(choice, kind="stable")
        pieces = []
        for number in sorted(set(choice.tolist())):
            mine = paddle.gather(x, paddle.to_tensor(np.flatnonzero(choice == number)))
            pieces.append(F.gelu(mine.matmul(self.up[number])).matmul(self.down[number]))
        return paddle.gather(paddle.concat(pieces), paddle.to_tensor(np.argsort(order)))


class MoEBlock(nn.Layer):
    """A router that weighs the one expert to which it sends a token, and leaves a loss of its own on itself."""

    def __init__(self, experts: nn.Layer, usable: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias_attr=False)
        self.experts = experts
        self.usable = usable

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        hidden = self.norm(x)
        weights = F.softmax(self.router(hidden), axis=-1)
        self.aux_loss = weights.mean(0).square().sum()
        choice = weights[:, : self.usable].argmax(-1)
        weight = (weights * F.one_hot(choice, EXPERTS).astype(weights.dtype)).sum(-1, keepdim=True)
        return x + weight * self.experts(hidden, choice.numpy())


class MoE(nn.Layer):
    """Two MoE blocks; experts from ``usable`` on never get a token."""

    def __init__(self, experts: type[nn.Layer], usable: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.LayerList([MoEBlock(experts(), usable) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens.flatten())
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _experts(run: Run, kind: type[nn.Layer], usable: int, frozen_router: bool) -> None:
    """Train, and evaluate on one row of each rank in between, which may reach one expert or another."""
    model = MoE(kind, usable)
    for block in model.blocks:
        block.router.weight.stop_gradient = frozen_router
    start = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    optimizer = run.start(model, lambda m: AdamW(0.01, epsilon=1e-6, parameters=m.parameters(), weight_decay=0.1))
    share = 0.0 if frozen_router else 0.1

    def loss_of(tokens: paddle.Tensor) -> paddle.Tensor:
        return F.cross_entropy(model(tokens), tokens.flatten())

    for step in range(3):
        with paddle.no_grad():
            run.log(loss_of(run.batch(step + 50)))
        loss = loss_of(run.batch(step))
        # An auxiliary loss of the mean over the tokens is another number on each rank's part, so only its gradients' mean is compared.
        (loss + share * _router_loss(run, model, step)).backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        run.log(loss)
    run.note_weights(model)
    unused = [f"blocks.{block}.experts.experts.{expert}.up.weight" for block in range(2) for expert in range(usable, EXPERTS)]
    _, weights = run.notes[-1]
    for name in unused if kind is LayerExperts else []:
        if name in weights and weights[name].values is not None:
            piece = weights[name]
            np.testing.assert_array_equal(piece.values.reshape(-1), start[name].reshape(-1)[piece.start : piece.stop])  # type: ignore[union-attr]


def _router_loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    """The blocks' losses over the same tokens on every rank, from a forward of their own."""
    model(paddle.to_tensor(np.random.RandomState(step + 99).randint(0, VOCABULARY, [3, 5])))
    return paddle.add_n([block.aux_loss for block in model.blocks])


for _name, _kind in (("layers", LayerExperts), ("stacked", StackedExperts)):
    for _frozen in (False, True):
        _function = functools.partial(_experts, kind=_kind, usable=3, frozen_router=_frozen)
        SCENARIOS[f"{_name}_{'frozen' if _frozen else 'learned'}_router"] = _function


@scenario
def hooks_on_parameters(run: Run) -> None:
    """Hooks of the user on parameters see and change whole gradients, put on before or after sharding."""
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))
    seen: list[list[int]] = []

    def double(gradient: paddle.Tensor) -> paddle.Tensor:
        seen.append(list(gradient.shape))
        return gradient * 2

    model[0].up.weight.register_hook(double)
    removed = model[0].up.bias.register_hook(double)
    optimizer = run.start(model, lambda m: SGD(0.1, parameters=m.parameters()))
    model[1].down.weight.register_hook(double)
    removed.remove()
    run.train(model, optimizer, loss=lambda run, model, step: model(run.images(step, WIDTH)).square().mean())
    assert sorted(seen) == sorted([[WIDTH, 2 * WIDTH + 1], [2 * WIDTH + 1, WIDTH]] * 3)


class Trouble(nn.Layer):
    """A LayerList in two parents, spectral and weight norm, recompute by its other name, outputs that are None or in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.weighed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.left, self.right = nn.Layer(), nn.Layer()
        self.left.layers = nn.LayerList([Block(), Block()])
        self.right.layers = self.left.layers

    def forward(self, x: paddle.Tensor, *, again: bool) -> dict[str, Any]:
        x = F.tanh(self.normed(self.weighed(x)))
        for layer in self.left.layers:
            x = recompute(layer, x)
        for layer in self.right.layers:
            x = layer(x)
        return {"out": x, "again": self.left.layers[0](x) if again else None}


@scenario
def ordinary_trouble(run: Run) -> None:
    model = Trouble()

    def loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
        outputs = model(run.images(step, WIDTH), again=step % 2 == 0)
        return outputs["out"].square().mean() + (0 if outputs["again"] is None else outputs["again"].mean())

    run.train(model, run.start(model, lambda m: SGD(0.1, parameters=m.parameters())), loss=loss)


class Force(nn.Layer):
    """The gradient of an energy by its inputs, taken inside the forward, and trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(4, 9), nn.Linear(9, 7), nn.Linear(7, 1)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x.detach()
        x.stop_gradient = False
        y = F.tanh(self.layers[1](F.tanh(self.layers[0](x))))
        return paddle.grad(self.layers[2](y).sum(), x, create_graph=True)[0]


@scenario
def gradients_inside_a_forward(run: Run) -> None:
    model = Force()
    optimizer = run.start(model, lambda m: SGD(0.1, parameters=m.parameters()))
    run.train(model, optimizer, loss=lambda run, model, step: model(run.images(step, 4)).square().mean())
