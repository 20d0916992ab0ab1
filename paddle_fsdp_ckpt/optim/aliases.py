"""Optimizers that hold Parameter objects of which ``fully_shard`` makes one: such an optimizer holds the one that stays, once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import ShardingError, listing
from ..fsdp import Joined, joined_to
from ..layout import Slot
from .hyperparameters import describe_hyperparameters, unequal_settings
from .parameters import WholeParameter, parameter_groups


def joined_parameters(optimizer: Any) -> list[Joined]:
    """Return those of an optimizer's Parameter objects that ``fully_shard`` has made one with another object, with that one."""
    found = (joined_to(parameter) for group in parameter_groups(optimizer) for parameter in group["params"])
    return [one for one in found if one is not None]


def check_holds_alike(optimizer: Any, pairs: Iterable[Joined]) -> None:
    """Raise where an optimizer holds only one object of a pair, or steps the two by different hyper-parameters.

    Raises:
        ShardingError: naming both, and what differs.
    """
    held = {id(parameter) for group in parameter_groups(optimizer) for parameter in group["params"]}
    for pair in pairs:
        what = (
            f"{type(optimizer).__name__}: '{pair.name}' and '{pair.alias_name}' are different Parameter objects over one memory, of "
            "which fully_shard makes one parameter, and "
        )
        holds = [name for name, one in ((pair.name, pair.parameter), (pair.alias_name, pair.alias)) if id(one) in held]
        if len(holds) == 1:
            raise ShardingError(f"{what}it holds '{holds[0]}' only; make it of both, or, after fully_shard, of model.parameters()")
        if len(holds) == 2:
            mine, its = _settings(optimizer, pair.name, pair.parameter), _settings(optimizer, pair.alias_name, pair.alias)
            differ = [f"{name} ({one} and {other})" for name, one, other in unequal_settings(mine, its)]
            if differ:
                raise ShardingError(
                    f"{what}it steps them by different settings: {listing(differ)}; set them alike, or give each a memory of its own"
                )


def hold_once(optimizer: Any) -> None:
    """Let an optimizer hold of each pair that was made one only the object that stays.

    Raises:
        ShardingError: as :func:`check_holds_alike`. Nothing was changed.
    """
    pairs = joined_parameters(optimizer)
    check_holds_alike(optimizer, pairs)
    gone = {id(pair.alias) for pair in pairs}
    for group in parameter_groups(optimizer) if gone else ():
        _held(optimizer, group)[:] = [parameter for parameter in group["params"] if id(parameter) not in gone]


def _held(optimizer: Any, group: dict[str, Any]) -> list[Any]:
    """Return Paddle's own list of a param group's parameters."""
    groups = optimizer._param_groups
    own: list[Any] = group["params"] if isinstance(groups[0], dict) else groups
    return own


def _settings(optimizer: Any, name: str, parameter: Any) -> dict[str, Any]:
    described = describe_hyperparameters(optimizer, [WholeParameter(Slot((name,), tuple(parameter.shape), 0), parameter)])
    return dict(described[0]["settings"])
