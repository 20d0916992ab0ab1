"""The parameters that an optimizer holds, whatever holds their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paddle import nn

from ..fsdp import named_parameters
from ..layout import Range, Slot


class SteppedParameter(Protocol):
    """A parameter that an optimizer holds: a :class:`~..fsdp.ParameterShard`, or a :class:`WholeParameter`."""

    @property
    def slot(self) -> Slot:
        """Its names and shape."""
        ...

    @property
    def range(self) -> Range:
        """What this rank keeps of it."""
        ...

    @property
    def parameter(self) -> Any:
        """Paddle's parameter."""
        ...


@dataclass(frozen=True, eq=False)
class WholeParameter:
    """A parameter of a plain model, which every rank keeps whole."""

    slot: Slot
    parameter: Any

    @property
    def range(self) -> Range:
        """All of it."""
        return Range(0, self.slot.numel)


def whole_parameters(model: nn.Layer) -> dict[int, WholeParameter]:
    """Return the parameters of a plain model, by the id of Paddle's."""
    return {
        id(named.parameter): WholeParameter(Slot(tuple(sorted(named.names)), tuple(named.parameter.shape), 0), named.parameter)
        for named in named_parameters(model)
    }


def optimizer_list(optimizer: Any) -> list[Any]:
    """Return the optimizers that an ``optimizer`` argument stands for: None for none, one, or a list, tuple or dict of them."""
    if optimizer is None:
        return []
    if isinstance(optimizer, Mapping):
        return [one for _, one in sorted(optimizer.items(), key=lambda pair: str(pair[0]))]
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def parameter_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer's param groups; one group with all parameters where it was made without groups."""
    groups = optimizer._param_groups if optimizer._param_groups is not None else []
    if groups and isinstance(groups[0], dict):
        return list(groups)
    return [{"params": list(groups)}]
