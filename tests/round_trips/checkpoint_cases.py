"""Models and optimizers whose checkpoints are tried, and what runs on the ranks to train, save and load them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from harness import StatePiece, assemble, hybrid_groups
from harness.models import Block
from harness.training import held, train_on_tokens
from paddle import nn
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt

GLOBAL_BATCH = 12
VOCABULARY = 13


class Tied(nn.Layer):
    """Tokens in, logits out; the head is the embedding."""

    def __init__(self, width: int = 10, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.LayerList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, VOCABULARY, bias_attr=False)
        self.head.weight = paddle.create_parameter([width, VOCABULARY], paddle.get_default_dtype())
        self.out = nn.Embedding(VOCABULARY, width)
        self.out.weight = self.embed.weight

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + paddle.matmul(x, self.out.weight, transpose_y=True)


class Tiny(nn.Layer):
    """Parameters of 1, 3, 6 and 7 elements: smaller than the world, and most shards empty."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 1)
        for size in (1, 3, 6, 7):
            self.add_parameter(f"p{size}", self.create_parameter([size], default_initializer=nn.initializer.Normal()))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.table(tokens) * self.p1
        mixed = (x * self.p3).sum(-1, keepdim=True) * self.p6
        return F.pad(paddle.concat([mixed, x * self.p7], -1), [0, 0], data_format="NCL")


class Convolutions(nn.Layer):
    """4-D and 3-D weights that are really cut, and BatchNorm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.first = nn.Conv2D(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2D(16)
        self.second = nn.Conv2D(16, 8, 3, padding=1)
        self.third = nn.Conv1D(16, 12, 5, padding=2)
        self.head = nn.Linear(8 + 12, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        planes = self.second(F.relu(self.norm(self.first(x.unsqueeze(1)))))
        lines = self.third(x.transpose([0, 2, 1])).transpose([0, 2, 1])
        return self.head(paddle.concat([planes.mean(-1).transpose([0, 2, 1]), lines], -1))


class Partly(Tied):
    """A frozen block between trainable ones, and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.unused = nn.Linear(5, 7)
        for parameter in self.blocks[1].parameters():
            parameter.stop_gradient = True


class Fading(Tied):
    """A layer that only the first steps use: Paddle's clear_grad() leaves it zeros for a gradient, so its momentum goes on moving it."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        scores = super().forward(tokens)
        return self.early(scores) if self.step < 2 else scores


MODELS: dict[str, Callable[[], nn.Layer]] = {"tied": Tied, "tiny": Tiny, "convolutions": Convolutions, "partly": Partly, "fading": Fading}


def _groups(model: nn.Layer) -> list[dict[str, Any]]:
    parameters = model.parameters()
    return [
        {"params": parameters[::2], "weight_decay": 0.1, "learning_rate": 0.5},
        {"params": parameters[1::2], "weight_decay": 0.0, "beta1": 0.7},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Layer], Any]] = {
    "adamw": lambda m: paddle.optimizer.AdamW(0.01, parameters=m.parameters(), weight_decay=0.1, grad_clip=nn.ClipGradByGlobalNorm(0.5)),
    "adamw named": lambda m: paddle.optimizer.AdamW(0.01, parameters=m.parameters(), name="opt"),
    "adamw amsgrad": lambda m: paddle.optimizer.AdamW(0.01, parameters=m.parameters(), amsgrad=True),
    "adamw groups": lambda m: paddle.optimizer.AdamW(0.01, parameters=_groups(m)),
    "adam": lambda m: paddle.optimizer.Adam(0.01, parameters=m.parameters()),
    "adam amsgrad named": lambda m: paddle.optimizer.Adam(0.01, parameters=m.parameters(), amsgrad=True, name="a_b"),
    "momentum": lambda m: paddle.optimizer.Momentum(0.05, parameters=m.parameters(), use_nesterov=True, name="moment1"),
    "sgd": lambda m: paddle.optimizer.SGD(0.1, parameters=m.parameters()),
    "adamax": lambda m: paddle.optimizer.Adamax(0.01, parameters=m.parameters(), weight_decay=0.1),
    "adamax named": lambda m: paddle.optimizer.Adamax(0.01, parameters=m.parameters(), name="moment"),
    "nadam": lambda m: paddle.optimizer.NAdam(0.01, parameters=m.parameters()),
    "nadam named": lambda m: paddle.optimizer.NAdam(0.01, parameters=m.parameters(), name="opt"),
    "radam": lambda m: paddle.optimizer.RAdam(0.01, parameters=m.parameters(), weight_decay=0.1),
    "radam named": lambda m: paddle.optimizer.RAdam(0.01, parameters=m.parameters(), name="rho"),
    "rmsprop": lambda m: paddle.optimizer.RMSProp(0.01, parameters=m.parameters()),
    "rmsprop momentum": lambda m: paddle.optimizer.RMSProp(0.01, momentum=0.9, parameters=m.parameters()),
    "rmsprop centered named": lambda m: paddle.optimizer.RMSProp(0.01, momentum=0.5, centered=True, parameters=m.parameters(), name="mean"),
    "adadelta": lambda m: paddle.optimizer.Adadelta(0.5, parameters=m.parameters()),
    "adadelta named": lambda m: paddle.optimizer.Adadelta(0.5, parameters=m.parameters(), name="_avg"),
    "adagrad": lambda m: paddle.optimizer.Adagrad(0.05, parameters=m.parameters(), initial_accumulator_value=0.1),
    "adagrad named": lambda m: paddle.optimizer.Adagrad(0.05, parameters=m.parameters(), name="opt"),
    "rprop": lambda m: paddle.optimizer.Rprop(0.01, parameters=m.parameters()),
    "rprop named": lambda m: paddle.optimizer.Rprop(0.01, (1e-3, 0.02), parameters=m.parameters(), name="prevs"),
    "asgd": lambda m: paddle.optimizer.ASGD(0.1, 4, parameters=m.parameters(), weight_decay=0.1),
    "asgd named": lambda m: paddle.optimizer.ASGD(0.1, parameters=m.parameters(), name="y"),
}


@dataclass
class Outcome:
    """What a rank has to tell: losses, what it holds, and the report of a load."""

    losses: list[float]
    state: dict[str, StatePiece]
    report: Any = None


def build(model: str, optimizer: str, seed: int = 1, shards: int = 0) -> tuple[nn.Layer, Any]:
    """Make and shard a model; other seeds give other weights. With ``shards``, replicas of so many ranks train it."""
    paddle.seed(seed)
    made = MODELS[model]()
    stepper = OPTIMIZERS[optimizer](made)
    ckpt.fully_shard(made, optimizer=stepper, **(hybrid_groups(shards) if shards else {}))
    return made, stepper


def train(model: nn.Layer, optimizer: Any, first: int, last: int) -> list[float]:
    """Train over the steps first to last, and return the losses over the global batch."""
    losses = []
    for step in range(first, last):
        model.step = step

        def loss_of(tokens: paddle.Tensor) -> paddle.Tensor:
            return F.cross_entropy(model(tokens).reshape([-1, VOCABULARY]), tokens.reshape([-1]))

        losses += train_on_tokens(loss_of, optimizer, range(step, step + 1), vocabulary=VOCABULARY, shape=(GLOBAL_BATCH, 5))
    return losses


def train_and_save(model: str, optimizer: str, path: str, steps: int, more: int, shards: int = 0) -> tuple[Outcome, Outcome]:
    """Train, save, and go on: what was saved, and where the uninterrupted run got to."""
    made, stepper = build(model, optimizer, shards=shards)
    losses = train(made, stepper, 0, steps)
    before = held(made, stepper)
    ckpt.save(path, model=made, optimizer=stepper, step=steps, extra_state={"epoch": 3, "nested": [1.5, None, "x"]})
    saved = Outcome(losses, held(made, stepper))
    assert before.keys() == saved.state.keys()
    for key, piece in before.items():
        np.testing.assert_array_equal(piece.values, saved.state[key].values, err_msg=f"saving changed {key}")
    return saved, Outcome(train(made, stepper, steps, steps + more), held(made, stepper))


def load_and_train(
    model: str, optimizer: str, path: str, steps: int, more: int, stale_steps: int = 0, shards: int = 0
) -> tuple[Outcome, Outcome]:
    """Load into a model with other weights (and an optimizer that has stepped already), and go on."""
    made, stepper = build(model, optimizer, seed=99, shards=shards)
    train(made, stepper, 50, 50 + stale_steps)
    report = ckpt.load(path, model=made, optimizer=stepper)
    loaded = Outcome([], held(made, stepper), report)
    return loaded, Outcome(train(made, stepper, steps, steps + more), held(made, stepper))


def whole(outcomes: list[Outcome]) -> dict[str, np.ndarray]:
    """Put the ranks' pieces together."""
    return assemble([outcome.state for outcome in outcomes])
