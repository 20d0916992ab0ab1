"""One table: for each optimizer class of ``paddle.optimizer``, the states that it keeps for a parameter.

From Paddle 3.3's ``python/paddle/optimizer/*.py``. An optimizer without a row is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import UnsupportedOptimizerError


class StateKind(Enum):
    """What one accumulator of one parameter holds."""

    ELEMENTWISE = "one value an element"
    SCALAR = "one value a parameter, the same on every rank"


@dataclass(frozen=True)
class OptimizerEntry:
    """The states of one optimizer class, by Paddle's accumulator name without the optimizer's own name and leading underscores."""

    states: dict[str, StateKind]


_MOMENTS = {"moment1": StateKind.ELEMENTWISE, "moment2": StateKind.ELEMENTWISE, "moment2_max": StateKind.ELEMENTWISE}
_BETA_POWERS = {"beta1_pow_acc": StateKind.SCALAR, "beta2_pow_acc": StateKind.SCALAR}

CATALOG: dict[str, OptimizerEntry] = {
    "Adam": OptimizerEntry({**_MOMENTS, **_BETA_POWERS}),
    "AdamW": OptimizerEntry({**_MOMENTS, **_BETA_POWERS}),
    "Momentum": OptimizerEntry({"velocity": StateKind.ELEMENTWISE}),
    "SGD": OptimizerEntry({}),
}


def entry_of(optimizer: Any) -> OptimizerEntry:
    """Return the table's entry for an optimizer.

    Raises:
        UnsupportedOptimizerError: its class is not in the table.
    """
    cls = type(optimizer)
    entry = CATALOG.get(cls.__name__) if cls.__module__.startswith("paddle.optimizer") else None
    if entry is None:
        raise UnsupportedOptimizerError(
            f"{cls.__module__}.{cls.__name__} can't step a sharded model; supported are {', '.join(CATALOG)} of paddle.optimizer"
        )
    return entry


def state_name(optimizer: Any, accumulator: str) -> str:
    """Return an accumulator's name as keys have it: without the optimizer's own name and leading underscores."""
    prefix = f"{optimizer._name}_" if optimizer._name is not None else ""
    return accumulator.removeprefix(prefix).lstrip("_")
