"""Run one training twice, unfused on the global batch and sharded on this rank's part of it, and compare.

A *scenario* is a function of a :class:`Run`: it builds models and optimizers, and trains. What it logs and notes is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from harness import this_rank
from paddle import nn

from paddle_fsdp_ckpt.fsdp import named_parameters, runtime_of
from paddle_fsdp_ckpt.optim import bind_optimizer
from paddle_fsdp_ckpt.training import fully_shard

GLOBAL_BATCH = 12
VOCABULARY = 13

OptimizerMaker = Callable[[nn.Layer], Any]


@dataclass
class Piece:
    """A range of a flattened tensor; no values where there is no tensor."""

    start: int
    stop: int
    values: np.ndarray | None


Note = dict[str, Piece]


@dataclass
class Run:
    """One run of a scenario.

    Attributes:
        sharded: whether this is the run to be tried, or the unfused one that says what is right.
        options: for ``fully_shard``.
        losses: the losses over the global batch.
        notes: gradients and weights by name: whole ones, or this rank's pieces.
    """

    sharded: bool
    options: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    notes: list[tuple[str, Note]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        if not self.sharded:
            return 0
        return this_rank().rank if self._group is None else max(0, self._group.rank)

    @property
    def world_size(self) -> int:
        if not self.sharded:
            return 1
        return this_rank().world_size if self._group is None else int(self._group.nranks)

    @property
    def _group(self) -> Any:
        """The ranks that share the global batch; None for all."""
        return None if "replicate_group" in self.options else self.options.get("group")

    def batch(self, step: int) -> paddle.Tensor:
        """This rank's part of the step's tokens, [rows, 5] int64."""
        return self.part(np.random.RandomState(step).randint(0, VOCABULARY, [GLOBAL_BATCH, 5]))

    def images(self, step: int, *shape: int) -> paddle.Tensor:
        """This rank's part of the step's random input."""
        values = np.random.RandomState(step).standard_normal([GLOBAL_BATCH, *shape])
        return self.part(values.astype(paddle.get_default_dtype()))

    def part(self, values: np.ndarray) -> paddle.Tensor:
        """This rank's rows."""
        rows = len(values) // self.world_size
        return paddle.to_tensor(values[self.rank * rows : (self.rank + 1) * rows])

    def start(self, model: nn.Layer, make: OptimizerMaker, **options: Any) -> Any:
        """Make the optimizer and shard the model; in which order depends on the world size, so that each is tried."""
        if not self.sharded:
            return make(model)
        options |= self.options
        order = ("before", "before, bound later", "after", "before", "after")[this_rank().world_size]
        if order == "after":
            fully_shard(model, **options)
            optimizer = make(model)
            bind_optimizer(optimizer)
            return optimizer
        optimizer = make(model)
        if order == "before":
            fully_shard(model, optimizer=optimizer, **options)
        else:
            fully_shard(model, **options)
            bind_optimizer(optimizer)
        return optimizer

    def log(self, loss: paddle.Tensor) -> None:
        """Note a loss that is a mean over the batch."""
        value = loss.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(value, group=self._group)
        self.losses.append(value.item() / self.world_size)

    def train(
        self,
        model: nn.Layer,
        optimizer: Any,
        steps: int = 3,
        loss: Callable[[Run, nn.Layer, int], paddle.Tensor] | None = None,
        first: int = 0,
    ) -> None:
        """The plain loop; notes the gradients of each step, and the weights at the end."""
        for step in range(first, first + steps):
            self.step(model, optimizer, (loss or language_loss)(self, model, step))
        self.note_weights(model)

    def step(self, model: nn.Layer, optimizer: Any, loss: paddle.Tensor, *, set_to_zero: bool = True) -> None:
        """Take a step with a loss, and note the gradients before it."""
        loss.backward()
        self.note_gradients(model)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=set_to_zero)
        self.log(loss)

    def note_gradients(self, model: nn.Layer) -> None:
        """Note every parameter's gradient; an error where ranks disagree on whether there is one shows as a difference."""
        self.notes.append(("gradients", self._pieces(model, _gradient)))

    def note_weights(self, model: nn.Layer) -> None:
        """Note every parameter's values."""
        self.notes.append(("weights", self._pieces(model, _weight)))

    def _pieces(self, model: nn.Layer, value: Callable[[Any], np.ndarray | None]) -> Note:
        runtime = runtime_of(model)
        if runtime is None:
            named = [(name, one.parameter) for one in named_parameters(model) for name in one.names]
            return {name: Piece(0, int(p.size), value(p)) for name, p in named}
        return {s.slot.name: Piece(s.range.start, s.range.stop, value(s.parameter)) for s in runtime.shards}


Scenario = Callable[[Run], None]


def compare(scenario: Scenario, dtype: str, **options: Any) -> None:
    """Run a scenario both ways on this rank, sharded with these options of ``fully_shard``, and raise where the two differ."""
    paddle.set_default_dtype(dtype)
    tolerance = 1e-10 if dtype == "float64" else 1e-5
    runs = []
    for sharded in (False, True):
        paddle.seed(7)
        np.random.seed(7)
        run = Run(sharded, options)
        scenario(run)
        runs.append(run)
    right, tried = runs
    assert len(right.losses) > 0 or len(right.notes) > 0
    assert len(tried.notes) == len(right.notes)
    for number, ((what, wanted), (_, pieces)) in enumerate(zip(right.notes, tried.notes, strict=True)):
        assert pieces.keys() <= wanted.keys()
        for name, piece in pieces.items():
            _compare_piece(f"{what} of {name} in note {number}", wanted[name].values, piece, tolerance)
    np.testing.assert_allclose(tried.losses, right.losses, rtol=tolerance, atol=tolerance)


def _compare_piece(what: str, wanted: np.ndarray | None, piece: Piece, tolerance: float) -> None:
    if piece.start == piece.stop:
        return
    assert (wanted is None) == (piece.values is None), f"{what}: right {wanted}, got {piece.values}"
    if wanted is not None and piece.values is not None:
        part = wanted.reshape(-1)[piece.start : piece.stop]
        scale = max(float(np.abs(wanted).max()), 1e-6)
        np.testing.assert_allclose(piece.values, part, rtol=0, atol=tolerance * scale, err_msg=what)


def language_loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    """Mean cross entropy of predicting the tokens themselves."""
    tokens = run.batch(step)
    return nn.functional.cross_entropy(model(tokens).reshape([-1, VOCABULARY]), tokens.reshape([-1]))


def _gradient(parameter: Any) -> np.ndarray | None:
    gradient = parameter.grad
    return None if gradient is None else gradient.numpy().copy()


def _weight(parameter: Any) -> np.ndarray | None:
    shard = parameter.__dict__.get("_shard") if hasattr(parameter, "__dict__") else None
    if shard is None:
        return parameter.numpy().copy()  # type: ignore[no-any-return]
    return shard.local.numpy().copy()  # type: ignore[no-any-return]
