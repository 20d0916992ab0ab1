"""Every optimizer of the catalog with its options, and what runs on the ranks to train, save and load it; README's table shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle
from harness import StatePiece, assemble, assert_equal_states
from harness.training import held, train_on_rows
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.optim import CATALOG

ROWS = 12
MORE = 3
"""Steps after the save."""


@dataclass(frozen=True)
class Variant:
    """An optimizer class, and how it is made.

    Attributes:
        cls: the class, of ``paddle.optimizer``.
        option: what is special about it; empty for the plain one.
        options: arguments of the constructor.
        dtype: of the model's parameters; with master weights where it is bfloat16.
    """

    cls: str
    option: str
    options: dict[str, Any]
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.cls} {self.option}".strip()

    @property
    def steps(self) -> int:
        """Steps before the save; RAdam leaves its warm-up after 5."""
        return 8 if self.cls == "RAdam" else 3

    def make(self, parameters: Sequence[Any]) -> Any:
        optimizer = getattr(paddle.optimizer, self.cls)(**{"learning_rate": 0.02, **self.options, "parameters": parameters})
        optimizer._multi_precision = self.dtype != "float32"
        return optimizer


REQUIRED: dict[str, dict[str, Any]] = {"ASGD": {"batch_num": 2}}
# Where a gradient is near 0, Adam and its kin would amplify the order of summation, and parity would show that.
STEADY = {cls: {"epsilon": 1e-4} for cls in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "Adam": {"amsgrad": {"amsgrad": True}, "weight_decay": {"weight_decay": 0.1}},
    "AdamW": {"amsgrad": {"amsgrad": True}, "grad_clip": {"grad_clip": nn.ClipGradByGlobalNorm(0.05)}},
    "Momentum": {"use_nesterov and weight_decay": {"use_nesterov": True, "weight_decay": 0.1}},
    "RMSProp": {"centered": {"centered": True, "momentum": 0.5}},
    "Adagrad": {"initial_accumulator_value": {"initial_accumulator_value": 0.1}},
    "ASGD": {"batch_num=1": {"batch_num": 1}},
}
IN_BFLOAT16 = ("Rprop", "SGD")
"""Those that Paddle 3.3's CPU wheel can step in bfloat16. There are master weights then, which these kernels don't look at."""


def _variants() -> dict[str, Variant]:
    found = []
    for cls in CATALOG:
        usual = {**REQUIRED.get(cls, {}), **STEADY.get(cls, {})}
        found += [Variant(cls, "", usual), Variant(cls, "named", {**usual, "name": "opt"})]
        found += [Variant(cls, option, {**usual, **options}) for option, options in OPTIONS.get(cls, {}).items()]
        if cls in IN_BFLOAT16:
            found.append(Variant(cls, "bfloat16", usual, "bfloat16"))
    return {variant.name: variant for variant in found}


VARIANTS = _variants()


class Part(nn.Layer):
    """A layer whose parameters of any dtype are used in float32, as the CPU wheel's matmul is for that only."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([features, outputs])
        self.bias = self.create_parameter([outputs], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        out = x @ self.weight.astype("float32") + self.bias.astype("float32")
        return out * self.scale.astype("float32") if hasattr(self, "scale") else out


class Small(nn.Layer):
    """Parameters that are cut, whole and absent on a rank, one of a single element, and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Part(3, 75)
        self.down = Part(75, 8)  # so that on 2 ranks, and on 3, it is cut
        self.down.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(0.75))
        self.unused = Part(2, 3)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def build(variant: str, seed: int, sharded: bool = True) -> tuple[nn.Layer, Any]:
    """Make a model and its optimizer; other seeds give other weights."""
    paddle.seed(seed)
    model = Small()
    model.to(dtype=VARIANTS[variant].dtype)
    optimizer = VARIANTS[variant].make(model.parameters())
    if sharded:
        ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


def train(model: nn.Layer, optimizer: Any, first: int, last: int) -> list[float]:
    """Train over the steps first to last, and return the losses over the global batch."""
    return train_on_rows(
        lambda x: (model(x) - x.sum(-1, keepdim=True)).square().mean(),
        optimizer,
        range(first, last),
        lambda step: np.random.RandomState(step).standard_normal([ROWS, 3]).astype("float32"),
        alone=runtime_of(model) is None,
    )


State = dict[str, StatePiece]


def whole(ranks: Sequence[State]) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    """Put the ranks' pieces together: values and exact shape of each key."""
    return assemble(ranks), {key: piece.global_shape for state in ranks for key, piece in state.items()}


def assert_same_pieces(one: State, other: State) -> None:
    """What a rank holds, bit for bit."""
    assert_equal_states({key: piece.values for key, piece in one.items()}, {key: piece.values for key, piece in other.items()})
    assert [replace(piece, values=None) for piece in one.values()] == [replace(piece, values=None) for piece in other.values()]


def train_and_save(variant: str, path: str) -> tuple[State, list[float], State]:
    """Train, compare with a plain run of this process, save, and go on: what was saved; losses and state of the uninterrupted run."""
    steps = VARIANTS[variant].steps
    plain, theirs = build(variant, 1, sharded=False)
    right = train(plain, theirs, 0, steps)
    model, optimizer = build(variant, 1)
    losses = train(model, optimizer, 0, steps)
    low_precision = VARIANTS[variant].dtype != "float32"
    np.testing.assert_allclose(losses, right, rtol=2e-2 if low_precision else 1e-5)
    if not low_precision:
        _compare_weights(model, plain)
    before = held(model, optimizer)
    ckpt.save(path, model=model, optimizer=optimizer, step=steps)
    saved = held(model, optimizer)
    assert_same_pieces(before, saved)
    losses = train(model, optimizer, steps, steps + MORE)
    return saved, losses, held(model, optimizer)


def _compare_weights(model: nn.Layer, plain: nn.Layer) -> None:
    runtime = runtime_of(model)
    assert runtime is not None
    wanted = {name: parameter.numpy().reshape(-1) for name, parameter in plain.named_parameters()}
    for one in runtime.shards:
        part = wanted[one.slot.name]
        scale = float(np.abs(part).max()) + 1e-3
        np.testing.assert_allclose(
            one.local.numpy(), part[one.range.start : one.range.stop], rtol=0, atol=1e-4 * scale, err_msg=one.slot.name
        )


def load_and_train(variant: str, path: str) -> tuple[State, list[float], State]:
    """Load into other weights, and go on."""
    model, optimizer = build(variant, 99)
    report = ckpt.load(path, model=model, optimizer=optimizer)
    stateless = variant in ("SGD", "SGD named")
    assert stateless or sorted(report.without_state) == ["unused.bias", "unused.weight"]
    loaded = held(model, optimizer)
    steps = VARIANTS[variant].steps
    return loaded, train(model, optimizer, steps, steps + MORE), held(model, optimizer)


def load_and_save(variant: str, path: str, target: str) -> State:
    """Load into an optimizer that has stepped already, and save again."""
    model, optimizer = build(variant, 98)
    train(model, optimizer, 50, 51)
    ckpt.load(path, model=model, optimizer=optimizer)
    ckpt.save(target, model=model, optimizer=optimizer)
    return held(model, optimizer)
