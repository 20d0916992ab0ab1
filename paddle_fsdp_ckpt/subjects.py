"""What ``save`` and ``load`` are given: a model and its optimizers, checked, with a structured name for each parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import paddle
from paddle import nn

from .errors import CheckpointError, ShardingError, listing
from .fsdp import (
    ShardedParameter,
    check_names,
    dtype_name,
    dtype_names,
    is_lazy,
    named_buffers,
    named_parameters,
    paddle_runtime_of,
    runtime_of,
    why_without_values,
)
from .fsdp.units import NamedParameter
from .optim import SteppedParameter, check_is_optimizer, describe_hyperparameters, parameter_groups
from .several_models import combine_models
from .shardings import LivePlaces, Sharding, sharding_of, sharding_of_optimizers

Models: TypeAlias = "nn.Layer | Mapping[str, nn.Layer]"
"""A model, or several under names, see :mod:`.several_models`."""


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

    @cached_property
    def names_in_order(self) -> list[str]:
        """The names that carry state, one a parameter."""
        return [one.slot.names[0] for one in self.parameters]

    @cached_property
    def names(self) -> frozenset[str]:
        """The same as a set."""
        return frozenset(self.names_in_order)

    def hyperparameters(self) -> list[Any]:
        """Return the optimizer's hyper-parameters as they are now, see :func:`~.optim.describe_hyperparameters`."""
        return describe_hyperparameters(self.optimizer, self.parameters)

    @cached_property
    def first_hyperparameters(self) -> list[Any]:
        """The same as they were when they were asked for first."""
        return self.hyperparameters()


class NotGiven(NamedTuple):
    """An optimizer that steps a model, and was not given with it.

    Attributes:
        cls: name of its class.
        names: all names of the model's parameters that it holds; none where no model was given.
    """

    cls: str
    names: frozenset[str]


def say_held(cls: str, names: Collection[str]) -> str:
    """Return an optimizer's class and what it holds in short words, which tell it from others of its class."""
    return f"{cls} of '{min(names)}'{' and others' * (len(names) > 1)}" if names else cls


@dataclass(frozen=True)
class ModelTensors:
    """What a model holds; nothing where there is no model.

    Attributes:
        parameters: with their structured names.
        buffers: the persistable ones, with their structured names.
    """

    parameters: Sequence[NamedParameter] = ()
    buffers: Sequence[tuple[str, paddle.Tensor]] = ()


def tensors_of(model: nn.Layer) -> ModelTensors:
    """Return what a model holds now."""
    return ModelTensors(named_parameters(model), list(named_buffers(model)))


@dataclass(frozen=True)
class Subjects:
    """A model, optimizers, or both, that belong together.

    Attributes:
        model: the model, or several as one, or None.
        steppers: the optimizers.
        sharding: how the ranks keep them.
        tensors: of the model.
    """

    model: nn.Layer | None
    steppers: Sequence[Stepper]
    sharding: Sharding
    tensors: ModelTensors

    def not_given(self) -> list[NotGiven]:
        """Return the optimizers that are known to step the model and were not given."""
        given = {id(one.optimizer) for one in self.steppers}
        others = [one for one in self.sharding.bound_optimizers() if id(one) not in given]
        names = {id(named.parameter): named.names for named in self.parameters} if others else {}

        def held(optimizer: Any) -> frozenset[str]:
            parameters = [one for group in parameter_groups(optimizer) for one in group["params"]]
            return frozenset(name for one in parameters for name in names.get(id(one), ()))

        return [NotGiven(type(one).__name__, held(one)) for one in others]

    def say_not_given(self, optimizers: Iterable[NotGiven]) -> str:
        """Return in short words which of them were not given; by more than their classes where others were."""
        return listing(sorted({say_held(one.cls, one.names) if self.steppers else one.cls for one in optimizers}))

    @property
    def parameters(self) -> Sequence[NamedParameter]:
        """The model's parameters, with their structured names; none where no model is given."""
        return self.tensors.parameters

    @property
    def buffers(self) -> Sequence[tuple[str, paddle.Tensor]]:
        """The model's persistable buffers, with their structured names; none where no model is given."""
        return self.tensors.buffers

    @cached_property
    def whole_keys(self) -> set[str]:
        """The keys of what of the model every rank has all of."""
        return set() if self.model is None else self.sharding.whole_keys(self.model)

    def live_places(self) -> LivePlaces | None:
        """Return where this rank keeps all of them, see :meth:`~.shardings.Sharding.live_places`."""
        return self.sharding.live_places(self.buffers, [(one.optimizer, one.parameters) for one in self.steppers])

    def model_keys(self) -> set[str]:
        """Return the keys of the model's parameters and buffers, on any rank; none where no model is given."""
        return {name for named in self.parameters for name in named.names} | {name for name, _ in self.buffers}

    def tied(self) -> list[list[str]]:
        """Return the sorted names of each tensor of the model that has several."""
        names = {id(named.parameter): named.names for named in self.parameters}
        for name, buffer in self.buffers:
            names[id(buffer)] = [*names.get(id(buffer), ()), name]
        return sorted(sorted(group) for group in names.values() if len(group) > 1)

    def digest(self) -> str:
        """Return a digest of what must be the same on every rank."""
        described: list[object] = [(one.cls, one.first_hyperparameters) for one in self.steppers]
        if self.model is not None:
            # Shapes and dtypes of a sharded model were compared when it was sharded; what its Parameter objects are now is not stored.
            whole_keys = self.whole_keys
            whole = [named.parameter for named in self.parameters if named.names[0] in whole_keys]
            described += [
                [name for named in self.parameters for name in named.names],
                [named.names for named in self.parameters if len(named.names) > 1],
                [(parameter.shape, dtype) for parameter, dtype in zip(whole, dtype_names(whole), strict=True)],
            ]
            described += [(name, buffer.shape, dtype_name(buffer)) for name, buffer in self.buffers]
        return hashlib.sha256(repr(described).encode()).hexdigest()


def check_subjects(model: Models | None, optimizers: Sequence[Any]) -> Subjects:
    """Check that a model, or several, and optimizers can be saved or loaded together.

    Raises:
        CheckpointError: nothing was given, or something else than models and their optimizers.
        ShardingError: a part of a sharded model, an optimizer of another model or one that isn't bound.
        UnsupportedOptimizerError: an optimizer whose states are not known.
    """
    if model is None and not optimizers:
        raise CheckpointError("give a model, an optimizer, or both")
    one_model, sharding, tensors = _check_model(model)
    for one in optimizers:
        check_is_optimizer(one)
    sharding = sharding or sharding_of_optimizers(optimizers)
    held = sharding.held_by(optimizers, one_model)
    steppers = [Stepper(one, parameters, sharding) for one, parameters in zip(optimizers, held, strict=True)]
    _check_stepped_once(steppers)
    return Subjects(one_model, steppers, sharding, tensors)


def _check_model(model: Models | None) -> tuple[nn.Layer | None, Sharding | None, ModelTensors]:
    """Return what was given as one layer, how it is kept, and what it holds; None where nothing was given."""
    if model is None:
        return None, None, ModelTensors()
    if not isinstance(model, Mapping):
        tensors = check_tensors(model)
        return model, sharding_of(model), tensors
    combined, sharding = combine_models(model)
    for one in model.values():
        check_tensors(one)
    tensors = tensors_of(combined)
    check_names(tensors.parameters, tensors.buffers)
    return combined, sharding, tensors


def check_tensors(model: nn.Layer) -> ModelTensors:
    """Return what a model holds, or raise where it has tensors that we can't give or take whole.

    Raises:
        CheckpointError: it is no model, or a tensor of it has no values that can be stored.
        ShardingError: it is a part of a sharded model, holds one, or is distributed by somebody else.
    """
    if not isinstance(model, nn.Layer):
        raise CheckpointError(f"model: {type(model).__name__} is not a paddle.nn.Layer; give the model that was trained")
    runtime = runtime_of(model)
    tensors = tensors_of(model)
    if runtime is None and paddle_runtime_of(model) is not None:  # which has checked the rest
        _check_values(tensors.buffers)
        return tensors
    parameters, buffers = tensors.parameters, tensors.buffers
    check_names(parameters, buffers)
    sharded = [one for one in parameters if isinstance(one.parameter, ShardedParameter)]
    foreign_units = {unit for unit in {one.parameter._shard.unit for one in sharded} if unit.runtime is not runtime}
    strange = [one.names[0] for one in sharded if one.parameter._shard.unit in foreign_units] if foreign_units else []
    if strange:
        raise ShardingError(
            f"{type(model).__name__} is a part of a sharded model, or holds one: {listing(strange)}; give the very layer that was given to "
            "fully_shard"
        )
    plain: list[tuple[str, paddle.Tensor]] = []
    if len(sharded) < len(parameters):
        plain += [(one.names[0], one.parameter) for one in parameters if not isinstance(one.parameter, ShardedParameter)]
    if runtime is not None and plain:
        raise ShardingError(
            f"the sharded model has parameters that are not sharded: {listing(name for name, _ in plain)}; change the model "
            "first, then shard it"
        )
    plain += buffers
    foreign = [
        name for name, tensor in plain if tensor.is_dist() or hasattr(tensor, "_fusion_buffer") or getattr(tensor, "is_distributed", False)
    ]
    if foreign:
        raise ShardingError(
            f"distributed by Paddle, so that a rank has only a part of them: {listing(foreign)}; this can't save or load those yet"
        )
    lazy = [name for name, tensor in plain if is_lazy(tensor) and 0 not in tensor.shape]
    if lazy:
        raise ShardingError(
            f"without values, as made under LazyGuard: {listing(lazy)}; call fully_shard(model, optimizer=...) first, which gives a model "
            "its initial values, or make it without LazyGuard"
        )
    _check_values(plain)
    return tensors


def _check_values(tensors: Iterable[tuple[str, paddle.Tensor]]) -> None:
    """Raise where one of these has none."""
    problems = [f"'{name}': {why}" for name, tensor in tensors if (why := why_without_values(tensor)) is not None]
    if problems:
        raise CheckpointError(f"tensors of the model that can't be saved or loaded: {listing(problems)}")


def _check_stepped_once(steppers: Iterable[Stepper]) -> None:
    names = [name for stepper in steppers for name in stepper.names_in_order]
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    twice: list[str] = []
    for name in names:
        if name in seen:
            twice.append(name)
        seen.add(name)
    if twice:
        raise ShardingError(
            f"held twice by the optimizers: {listing(twice)}; their states would have the same names. Give each parameter "
            "to one optimizer, "
            "and each optimizer once"
        )
