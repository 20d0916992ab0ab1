"""What a caller of ``load_huggingface`` lets differ between the files and the model, and how its errors offer that."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable, Sequence
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
        other_shape: names in the model that keep their values where what they come from has another shape.
        resize: names in the model that get what both have, where what they come from has another size in one dimension.
    """

    given: dict[str, tuple[str, ...]]
    missing: Patterns
    unexpected: Patterns
    other_shape: Patterns
    resize: Patterns

    def unused(self) -> tuple[str, ...]:
        """Return the options that nothing has needed so far, as a caller writes them."""
        used = [patterns.used() for patterns in (self.missing, self.unexpected, self.other_shape, self.resize)]
        options = zip(self.given.items(), used, strict=True)
        return tuple(f"{name}={one!r}" for (name, patterns), of_use in options for one in patterns if one not in of_use)


def check_allowed(**options: Any) -> Allowed:
    """Return what a caller allows, checked.

    Args:
        options: ``allow_missing``, ``allow_unexpected``, ``allow_other_shape`` and ``resize``, in this order.

    Raises:
        CheckpointError: one of them isn't a collection of patterns.
    """
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
        raise MismatchError(f"{error}{offer_kept(refused, (), (), keys)}") from error


def offer_kept(missing: Collection[str], other_shape: Iterable[str], resizable: Iterable[str], keys: Collection[str]) -> str:
    """Return what an error says besides where keys of the model can't have their values, or not all; nothing where none can.

    Args:
        missing: those that have nothing that they come from.
        other_shape: names of tensors that come from such of another shape, one each.
        resizable: those of them of which one dimension has another size.
        keys: all of the model.
    """
    if len(missing) == len(keys):
        return ""
    ways = WaysOut(
        allow_missing=patterns_of_missing(sorted(missing), keys, (), has_states=False),
        allow_other_shape=tuple(sorted(map(glob.escape, other_shape))),
        resize=tuple(sorted(map(glob.escape, resizable))),
    )
    resize = f". The rows or columns that both have are loaded by {ways.say('resize', 'what has another size')}" if ways.resize else ""
    options = [ways.say("allow_missing", "keys that keep their values")] if ways.allow_missing else []
    options += [ways.say("allow_other_shape", "keys that keep their values")] if ways.allow_other_shape else []
    return f"{resize}. Or say what may keep its values: {', '.join(options)}" if options else ""


def offer_unexpected(refused: Sequence[str], stored: Collection[str]) -> str:
    """Return what an error says besides where tensors go nowhere.

    Args:
        refused: their names.
        stored: those of all tensors of the files.
    """
    ways = WaysOut(allow_unexpected=patterns_of_unexpected(refused, set(stored), ()))
    return f". Or say what may be left out: {ways.say('allow_unexpected', 'tensors to leave out')}"
