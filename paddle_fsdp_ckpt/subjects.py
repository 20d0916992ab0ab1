"""What ``save`` and ``load`` are given: a model and its optimizers, checked, with a structured name for each parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paddle import nn

from .errors import CheckpointError, ShardingError, listing
from .fsdp import ShardedParameter, check_names, dtype_name, named_buffers, named_parameters, paddle_runtime_of, runtime_of
from .optim import SteppedParameter, check_is_optimizer, describe_hyperparameters
from .shardings import Sharding, sharding_of, sharding_of_optimizers


@dataclass(frozen=True)
class Stepper:
    """An optimizer, and the parameters that it holds, in the order of its param groups."""

    optimizer: Any
    parameters: Sequence[SteppedParameter]
    sharding: Sharding

    @property
    def cls(self) -> str:
        """Name of the optimizer's class."""
        return type(self.optimizer).__name__

    @property
    def names(self) -> set[str]:
        """The names that carry state."""
        return {one.slot.name for one in self.parameters}

    def hyperparameters(self) -> list[Any]:
        """Return the optimizer's hyper-parameters, see :func:`~.optim.describe_hyperparameters`."""
        return describe_hyperparameters(self.optimizer, self.parameters)


@dataclass(frozen=True)
class Subjects:
    """A model, optimizers, or both, that belong together.

    Attributes:
        model: the model, or None.
        steppers: the optimizers.
        sharding: how the ranks keep them.
    """

    model: nn.Layer | None
    steppers: Sequence[Stepper]
    sharding: Sharding

    def model_keys(self) -> set[str]:
        """Return the keys of the model's parameters and buffers, on any rank; none where no model is given."""
        if self.model is None:
            return set()
        return {name for named in named_parameters(self.model) for name in named.names} | {name for name, _ in named_buffers(self.model)}

    def tied(self) -> list[list[str]]:
        """Return the sorted names of each tensor of the model that has several."""
        if self.model is None:
            return []
        names: dict[int, list[str]] = {id(named.parameter): list(named.names) for named in named_parameters(self.model)}
        for name, buffer in named_buffers(self.model):
            names.setdefault(id(buffer), []).append(name)
        return sorted(sorted(group) for group in names.values() if len(group) > 1)

    def digest(self) -> str:
        """Return a digest of what must be the same on every rank."""
        described: list[object] = [(one.cls, one.hyperparameters()) for one in self.steppers]
        if self.model is not None:
            # A sharded model was compared when it was sharded, and its parameters' shapes may be local now.
            described += [
                (named.names, named.parameter.shape if self.sharding.is_plain else [], dtype_name(named.parameter))
                for named in named_parameters(self.model)
            ]
            described += [(name, buffer.shape, dtype_name(buffer)) for name, buffer in named_buffers(self.model)]
        return hashlib.sha256(repr(described).encode()).hexdigest()


def check_subjects(model: nn.Layer | None, optimizers: Sequence[Any]) -> Subjects:
    """Check that a model and optimizers can be saved or loaded together.

    Raises:
        CheckpointError: nothing was given, or something else than a model and its optimizers.
        ShardingError: a part of a sharded model, an optimizer of another model or one that isn't bound.
        UnsupportedOptimizerError: an optimizer whose states are not known.
    """
    if model is None and not optimizers:
        raise CheckpointError("give a model, an optimizer, or both")
    if model is not None:
        check_tensors(model)
    for one in optimizers:
        check_is_optimizer(one)
    sharding = sharding_of_optimizers(optimizers) if model is None else sharding_of(model)
    held = sharding.held_by(optimizers, model)
    steppers = [Stepper(one, parameters, sharding) for one, parameters in zip(optimizers, held, strict=True)]
    _check_stepped_once(steppers)
    return Subjects(model, steppers, sharding)


def check_tensors(model: nn.Layer) -> None:
    """Raise where a model has tensors that we can't give or take whole.

    Raises:
        CheckpointError: it is no model.
        ShardingError: it is a part of a sharded model, holds one, or is distributed by somebody else.
    """
    if not isinstance(model, nn.Layer):
        raise CheckpointError(f"model: {type(model).__name__} is not a paddle.nn.Layer; give the model that was trained")
    if paddle_runtime_of(model) is not None:  # which has checked it
        return
    check_names(model)
    parameters = named_parameters(model)
    runtime = runtime_of(model)
    strange = [
        one.names[0]
        for one in parameters
        if isinstance(one.parameter, ShardedParameter) and one.parameter._shard.unit.runtime is not runtime
    ]
    if strange:
        raise ShardingError(
            f"{type(model).__name__} is a part of a sharded model, or holds one: {listing(strange)}; give the very layer that was given to "
            "fully_shard"
        )
    plain = [(one.names[0], one.parameter) for one in parameters if not isinstance(one.parameter, ShardedParameter)]
    if runtime is not None and plain:
        raise ShardingError(
            f"the sharded model has parameters that are not sharded: {listing(name for name, _ in plain)}; change the model "
            "first, then shard it"
        )
    plain += [(name, buffer) for name, buffer in named_buffers(model)]
    foreign = [
        name for name, tensor in plain if tensor.is_dist() or hasattr(tensor, "_fusion_buffer") or getattr(tensor, "is_distributed", False)
    ]
    if foreign:
        raise ShardingError(
            f"distributed by Paddle, so that a rank has only a part of them: {listing(foreign)}; this can't save or load those yet"
        )
    empty = [name for name, tensor in plain if not tensor._is_initialized() and 0 not in tensor.shape]
    if empty:
        raise ShardingError(f"without values, as made under LazyGuard: {listing(empty)}; initialize them first")


def _check_stepped_once(steppers: Iterable[Stepper]) -> None:
    seen: set[str] = set()
    twice: list[str] = []
    for stepper in steppers:
        for one in stepper.parameters:
            if one.slot.name in seen:
                twice.append(one.slot.name)
            seen.add(one.slot.name)
    if twice:
        raise ShardingError(
            f"held twice by the optimizers: {listing(twice)}; their states would have the same names. Give each parameter "
            "to one optimizer, "
            "and each optimizer once"
        )
