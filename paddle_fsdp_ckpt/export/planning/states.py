"""Which states an optimizer will keep of a parameter, and in which dtypes.

The names are those of :mod:`paddle_fsdp_ckpt.optimizer_states`; the dtypes were read off Paddle 3.3.1's optimizers, all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UnsupportedOptimizerError
from ...layout import LOW_PRECISION
from ...optimizer_states import CATALOG, MASTER_WEIGHT_KEY, REFUSALS, StateKind

_ONLY_WITH_AMSGRAD = {"moment2_max"}
_FLOAT32 = {"Adam", "AdamW", "Adamax", "NAdam", "RAdam"}
"""The classes whose states are float32 for every parameter."""
_AS_PARAMETER = {"Rprop", "ASGD"}
"""The classes whose states have the parameter's dtype, even where there is a master weight. All others' have the master weight's."""
_OTHERS = {("ASGD", "m"): "int64"}
_AS_STEPPED = {("Adamax", "beta1_pow_acc")}


@dataclass(frozen=True)
class PlannedState:
    """A state, or the master weight, that there will be of a parameter.

    Attributes:
        suffix: what follows the parameter's name in its key.
        dtype: Paddle's dtype name.
        kind: one value an element, one a parameter, or one layer of values.
    """

    suffix: str
    dtype: str
    kind: StateKind

    @property
    def is_master(self) -> bool:
        """Whether it is the master weight."""
        return self.suffix == MASTER_WEIGHT_KEY


def planned_states(optimizer: str, dtype: str, *, master_weights: bool) -> list[PlannedState]:
    """Return what an optimizer of a class of ``paddle.optimizer`` keeps of one parameter, with its default settings.

    Args:
        optimizer: name of the class.
        dtype: of the parameter.
        master_weights: whether parameters of low precision have them.

    Raises:
        UnsupportedOptimizerError: the class is none that steps sharded models.
    """
    if optimizer not in CATALOG:
        reason = f": {REFUSALS[optimizer]}" if optimizer in REFUSALS else ""
        raise UnsupportedOptimizerError(f"'{optimizer}' can't step a sharded model{reason}; there are {', '.join(CATALOG)}")
    has_master = master_weights and dtype in LOW_PRECISION
    stepped = "float32" if has_master else dtype
    states = []
    for name, kind in CATALOG[optimizer].states.items():
        if name in _ONLY_WITH_AMSGRAD:
            continue
        own = _OTHERS.get((optimizer, name))
        if own is None:
            always = "float32" if optimizer in _FLOAT32 and (optimizer, name) not in _AS_STEPPED else None
            own = always or (dtype if optimizer in _AS_PARAMETER else stepped)
        states.append(PlannedState(f"{name}_0", own, kind))
    if has_master:
        states.append(PlannedState(MASTER_WEIGHT_KEY, "float32", StateKind.ELEMENTWISE))
    return states
