"""States that Paddle's ``set_state_dict`` gave to an optimizer that has none yet: Paddle keeps them aside until the first step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..errors import ShardingError, listing
from .parameters import SteppedParameter
from .registry import create_states


def waiting_states(optimizer: Any) -> list[str]:
    """Return Paddle's names of the states that were given, and that no step has taken up."""
    return [] if any(optimizer._accumulators.values()) else sorted(optimizer._accumulators_holder)


def take_up_given_states(optimizer: Any, parameters: Sequence[SteppedParameter]) -> None:
    """Let the optimizer of a plain model have the states that wait, as its first step would.

    Args:
        optimizer: not bound.
        parameters: all that it holds.

    Raises:
        ShardingError: some of the states are of no parameter that it holds.
    """
    waiting = waiting_states(optimizer)
    if not waiting:
        return
    known = {one.parameter.name for one in parameters}
    owners = {name: _owner_of(name, known) for name in waiting}
    strange = [name for name, owner in owners.items() if owner is None]
    if strange:
        raise ShardingError(
            f"{type(optimizer).__name__} was given states by set_state_dict of parameters that it doesn't hold: {listing(strange)}. Paddle "
            "goes by the names that parameters got when they were made: in a fresh process make first the model, as in the run that the "
            "states are of"
        )
    wanted = set(owners.values())
    create_states(optimizer, [one for one in parameters if one.parameter.name in wanted])


def _owner_of(name: str, known: Collection[str]) -> str | None:
    """Return the longest of the known names that this name of a state begins with, before an underscore."""
    end = name.rfind("_")
    while end > 0:
        if name[:end] in known:
            return name[:end]
        end = name.rfind("_", 0, end)
    return None
