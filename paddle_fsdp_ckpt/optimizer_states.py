"""How master weights are called, and one table: for each optimizer class of ``paddle.optimizer``, its states; pure data.

From Paddle 3.3's ``python/paddle/optimizer/*.py``. What is done with it is in :mod:`.optim.catalog`, and, without Paddle, in ``export``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MASTER_WEIGHT_KEY = "w_0"
"""What follows a parameter's name, and a dot, in the key of its master weight."""

MAY_BE_UNKNOWN = {"gradient_reduction"}
"""Settings that older checkpoints, and those of models that our runtime didn't cut, don't say: no difference to one that does."""


def is_master_weight(key: str) -> bool:
    """Tell whether a key is called as that of a master weight."""
    return key.endswith(f".{MASTER_WEIGHT_KEY}")


class StateKind(Enum):
    """What one accumulator of one parameter holds."""

    ELEMENTWISE = "one value an element"
    SCALAR = "one value a parameter, the same on every rank"
    STACKED = "several values an element, one layer of them after the other"


@dataclass(frozen=True)
class OptimizerEntry:
    """The states of one optimizer class, by Paddle's accumulator name without the optimizer's own name and leading underscores.

    Attributes:
        states: of which kind each is.
        repeated: those of one value an element that hold the same number for all of a parameter.
    """

    states: dict[str, StateKind]
    repeated: tuple[str, ...] = ()


def row(*elementwise: str, scalar: Sequence[str] = (), stacked: Sequence[str] = (), repeated: Sequence[str] = ()) -> OptimizerEntry:
    """Return a row of the table from the names of the states of each kind; ``repeated`` are elementwise ones."""
    kinds = {StateKind.ELEMENTWISE: (*elementwise, *repeated), StateKind.SCALAR: scalar, StateKind.STACKED: stacked}
    return OptimizerEntry({name: kind for kind, names in kinds.items() for name in names}, tuple(repeated))


CATALOG: dict[str, OptimizerEntry] = {
    "Adam": row("moment1", "moment2", "moment2_max", scalar=("beta1_pow_acc", "beta2_pow_acc")),
    "AdamW": row("moment1", "moment2", "moment2_max", scalar=("beta1_pow_acc", "beta2_pow_acc")),
    "Adamax": row("moment", "inf_norm", scalar=("beta1_pow_acc",)),
    # Of their numbers a parameter, NAdam and RAdam keep a copy an element.
    "NAdam": row("moment1", "moment2", repeated=("momentum_decay_pow", "beta2_pow", "mu_product")),
    "RAdam": row("moment1", "moment2", repeated=("beta1_pow", "beta2_pow", "rho")),
    "RMSProp": row("momentum", "mean_square", "mean_grad"),
    "Adadelta": row("avg_squared_grad", "avg_squared_update"),
    "Adagrad": row("moment"),
    "Rprop": row("prevs", "learning_rates"),
    "ASGD": row("d", scalar=("m",), stacked=("y",)),
    "Momentum": row("velocity"),
    "SGD": row(),
}
"""The optimizer's class name -> its states."""

REFUSALS: dict[str, str] = {
    "Lamb": "its trust ratio needs the norms of whole parameters and updates, and it would take those of this rank's pieces for them",
    "LBFGS": "its line search and its history need whole parameters and gradients at once, and a rank keeps only pieces of them",
    "Optimizer": "it is the base of the others, and has no update rule",
}
"""The classes of ``paddle.optimizer`` that have no row, and why."""
