"""Schedulers and scalers, one or several: what an argument stands for by name, and which of those that were saved are given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CheckpointError, listing
from ..storage.besides import are_numbers
from ..storage.json_values import JsonValue

_KINDS = "one, a list, or a dict by str"


def by_name(value: Any, what: str) -> dict[str, Any]:
    """Return what an argument stands for by name, in the order of the names: one, a list, or a dict of them; None for none.

    Those of a list are named ``"0"``, ``"1"`` and so on, and one alone ``"0"``.

    Args:
        value: the argument.
        what: its name, for the message.

    Raises:
        CheckpointError: a dict's keys are not str.
    """
    if isinstance(value, Mapping):
        strange = [key for key in value if type(key) is not str]
        if strange:
            raise CheckpointError(f"{what} has the key {strange[0]!r:.100}, which is no str; give {_KINDS}")
        return dict(sorted(value.items()))
    several = list(value) if isinstance(value, (list, tuple)) else [value] * (value is not None)
    return {str(number): one for number, one in enumerate(several)}


def missing_names(what: str, given: Mapping[str, Any], saved: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield, in words, what was given and can't be given back: a list must be as long as it was, a dict may have fewer names."""
    if not given:
        return
    if not saved:
        yield f"the {what} given" if len(given) == 1 else f"the {len(given)} {what}s given"
    elif are_numbers(given) or are_numbers(saved):
        if given.keys() != saved.keys():
            yield f"these {_shown(given)} {what}s (it has {_shown(saved)})"
    elif given.keys() - saved.keys():
        yield f"the {what}s {listing(sorted(given.keys() - saved.keys()))} (it has {listing(sorted(saved))})"


def left_names(what: str, given: Mapping[str, Any], saved: Mapping[str, JsonValue]) -> list[str]:
    """Return what was saved and not given to be given back: ``what`` where it is all, else ``what`` with the name."""
    if saved and not given:
        return [what]
    return [f"{what} {name!r}" for name in saved if name not in given]


def _shown(names: Mapping[str, Any]) -> str:
    return str(len(names)) if are_numbers(names) else listing(names)
