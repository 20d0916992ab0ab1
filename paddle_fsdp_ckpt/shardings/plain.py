"""A model that nobody cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import ShardingError, listing
from ..fsdp import named_buffers, named_parameters, replicated
from ..optim import OptimizerState, SteppedParameter, binding_of, entry_of, parameter_groups, take_up_given_states, whole_parameters
from .sharding import Sharding


class Plain(Sharding):
    """A model that nobody cut, the same on every rank."""

    is_plain = True

    def warn_of_cuts(self) -> None:
        """Nothing is cut."""

    def model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return everything, whole."""
        weights = {name: replicated(name, named.parameter) for named in named_parameters(model) for name in named.names}
        weights.update({name: replicated(name, buffer) for name, buffer in named_buffers(model)})
        return weights

    def whole_keys(self, model: nn.Layer) -> set[str]:
        """Return all."""
        return super().whole_keys(model) | {name for named in named_parameters(model) for name in named.names}

    def held_by(self, optimizers: Sequence[Any], model: nn.Layer | None) -> list[Sequence[SteppedParameter]]:
        """Return whole parameters of the model."""
        assert model is not None
        for one in optimizers:
            entry_of(one)
        return [_whole_parameters(one, model) for one in optimizers]

    def states(self, optimizer: Any, parameters: Sequence[SteppedParameter]) -> list[OptimizerState]:
        """Return them whole, also those that ``set_state_dict`` gave, and that no step has taken up."""
        take_up_given_states(optimizer, parameters)
        return super().states(optimizer, parameters)

    def has_gradient(self, parameter: SteppedParameter) -> bool:
        """Tell whether Paddle has one."""
        return parameter.parameter.grad is not None

    def reset_gradient(self, parameter: SteppedParameter, present: bool) -> None:
        """Set Paddle's own."""
        if present and not parameter.parameter.stop_gradient:
            parameter.parameter.grad = paddle.zeros_like(parameter.parameter)
            parameter.parameter.clear_gradient(True)  # so that the next backward replaces it, as after clear_grad(): 0 + -0 is 0
        else:
            parameter.parameter.clear_gradient(False)

    def values_written(
        self, model: nn.Layer | None, optimizers: Sequence[Any], stepped: Sequence[SteppedParameter], kept: Collection[str] = ()
    ) -> None:
        """Let a backward know that the weights of its forward are gone."""
        if model is not None:
            for parameter in model.parameters():
                parameter._bump_inplace_version()


def _whole_parameters(optimizer: Any, model: nn.Layer) -> list[SteppedParameter]:
    if binding_of(optimizer) is not None:
        raise ShardingError(f"{type(optimizer).__name__} is bound to a sharded model, and the model given is another one, not sharded")
    known = whole_parameters(model)
    buffers = {id(buffer) for _, buffer in named_buffers(model)}
    every = [parameter for group in parameter_groups(optimizer) for parameter in group["params"]]
    held = [parameter for parameter in every if id(parameter) not in buffers]
    foreign = [parameter.name for parameter in held if id(parameter) not in known]
    if foreign or not held:
        raise ShardingError(
            f"{type(optimizer).__name__}: {len(foreign)} of its {len(held)} parameters are not of the model given: "
            f"{listing(foreign)}; give the "
            "model that it steps"
        )
    return [known[id(parameter)] for parameter in held]
