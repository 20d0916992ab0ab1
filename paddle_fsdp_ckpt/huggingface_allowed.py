"""What a caller of ``load_huggingface`` lets differ between the files and the model, and how its errors offer that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from .errors import MismatchError
from .export.recipes.rules import Recipe, Rule
from .loading.options import Patterns, check_patterns
from .loading.ways_out import patterns_of_missing, patterns_of_unexpected
from .storage.problems import WaysOut


class Allowed(NamedTuple):
    """What may differ.

    Attributes:
        given: option -> its patterns, in the caller's order.
        missing: names in the model that keep their values.
        unexpected: names of tensors of the files that go nowhere.
    """

    given: dict[str, tuple[str, ...]]
    missing: Patterns
    unexpected: Patterns

    def unused(self) -> tuple[str, ...]:
        """Return the options that nothing has needed so far, as a caller writes them."""
        used = {"allow_missing": self.missing.used(), "allow_unexpected": self.unexpected.used()}
        return tuple(f"{name}={one!r}" for name, patterns in self.given.items() for one in patterns if one not in used[name])


def check_allowed(allow_missing: Any, allow_unexpected: Any) -> Allowed:
    """Return what a caller allows, checked.

    Raises:
        CheckpointError: one of them isn't a collection of patterns.
    """
    options = {"allow_missing": allow_missing, "allow_unexpected": allow_unexpected}
    given = {name: check_patterns("load_huggingface", name, patterns) for name, patterns in options.items()}
    return Allowed(given, *map(Patterns, given.values()))


def rules_of(recipe: Recipe, keys: Sequence[str], may_be_missing: Patterns) -> dict[str, tuple[Rule, dict[str, str]]]:
    """Return the rules of a model's keys, see :meth:`~.Recipe.rules_of`; those that none takes may be missing.

    Raises:
        MismatchError: other keys are taken by none, or some by several.
    """
    without = {key for key in keys if not recipe.fits([key])}
    refused = {key for key in without if not may_be_missing.match(key)}
    try:
        return recipe.rules_of(key for key in keys if key not in without or key in refused)
    except MismatchError as error:
        raise MismatchError(f"{error}{offer_missing(refused, keys)}") from error


def offer_missing(refused: Collection[str], keys: Collection[str]) -> str:
    """Return what an error says besides where keys of the model have nothing that they come from; nothing where none has.

    Args:
        refused: the keys.
        keys: all of the model.
    """
    if not refused or len(refused) == len(keys):
        return ""
    ways = WaysOut(allow_missing=patterns_of_missing(sorted(refused), keys, (), has_states=False))
    return f". Or say what may keep its values: {ways.say('allow_missing', 'keys that keep their values')}"


def offer_unexpected(refused: Sequence[str], stored: Collection[str]) -> str:
    """Return what an error says besides where tensors go nowhere.

    Args:
        refused: their names.
        stored: those of all tensors of the files.
    """
    ways = WaysOut(allow_unexpected=patterns_of_unexpected(refused, set(stored), ()))
    return f". Or say what may be left out: {ways.say('allow_unexpected', 'tensors to leave out')}"
