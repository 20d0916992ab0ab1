"""One table: for each optimizer class of ``paddle.optimizer``, the states that it keeps for a parameter.

From Paddle 3.3's ``python/paddle/optimizer/*.py``. An optimizer without a row is refused by name, with the reason where it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import UnsupportedOptimizerError


class StateKind(Enum):
    """What one accumulator of one parameter holds."""

    ELEMENTWISE = "one value an element"
    SCALAR = "one value a parameter, the same on every rank"
    STACKED = "several values an element, one layer of them after the other"


@dataclass(frozen=True)
class OptimizerEntry:
    """The states of one optimizer class, by Paddle's accumulator name without the optimizer's own name and leading underscores."""

    states: dict[str, StateKind]


def _entry(*elementwise: str, scalar: Sequence[str] = (), stacked: Sequence[str] = ()) -> OptimizerEntry:
    kinds = {StateKind.ELEMENTWISE: elementwise, StateKind.SCALAR: scalar, StateKind.STACKED: stacked}
    return OptimizerEntry({name: kind for kind, names in kinds.items() for name in names})


CATALOG: dict[str, OptimizerEntry] = {
    "Adam": _entry("moment1", "moment2", "moment2_max", scalar=("beta1_pow_acc", "beta2_pow_acc")),
    "AdamW": _entry("moment1", "moment2", "moment2_max", scalar=("beta1_pow_acc", "beta2_pow_acc")),
    "Adamax": _entry("moment", "inf_norm", scalar=("beta1_pow_acc",)),
    # Of their numbers a parameter, NAdam and RAdam keep a copy an element.
    "NAdam": _entry("moment1", "moment2", "momentum_decay_pow", "beta2_pow", "mu_product"),
    "RAdam": _entry("moment1", "moment2", "beta1_pow", "beta2_pow", "rho"),
    "RMSProp": _entry("momentum", "mean_square", "mean_grad"),
    "Adadelta": _entry("avg_squared_grad", "avg_squared_update"),
    "Adagrad": _entry("moment"),
    "Rprop": _entry("prevs", "learning_rates"),
    "ASGD": _entry("d", scalar=("m",), stacked=("y",)),
    "Momentum": _entry("velocity"),
    "SGD": _entry(),
}

REFUSALS: dict[str, str] = {
    "Lamb": "its trust ratio needs the norms of whole parameters and updates, and it would take those of this rank's pieces for them",
    "LBFGS": "its line search and its history need whole parameters and gradients at once, and a rank keeps only pieces of them",
    "Optimizer": "it is the base of the others, and has no update rule",
}
"""The classes of ``paddle.optimizer`` that have no row, and why."""


def entry_of(optimizer: Any) -> OptimizerEntry:
    """Return the table's entry for an optimizer.

    Raises:
        UnsupportedOptimizerError: its class is not in the table.
    """
    cls = type(optimizer)
    is_paddles = cls.__module__.startswith("paddle.optimizer")
    entry = CATALOG.get(cls.__name__) if is_paddles else None
    if entry is None:
        reason = f": {REFUSALS[cls.__name__]}" if is_paddles and cls.__name__ in REFUSALS else ""
        raise UnsupportedOptimizerError(
            f"{cls.__module__}.{cls.__name__} can't step a sharded model{reason}; supported are {', '.join(CATALOG)} of paddle.optimizer"
        )
    return entry


def state_name(optimizer: Any, accumulator: str) -> str:
    """Return an accumulator's name as keys have it: without the optimizer's own name and leading underscores."""
    prefix = f"{optimizer._name}_" if optimizer._name is not None else ""
    return accumulator.removeprefix(prefix).lstrip("_")
