"""What a caller of ``load`` lets differ between checkpoint and objects, checked; and the other names that keys have in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from ..errors import CheckpointError, MismatchError, listing

KeyMap: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
"""From a name in the model to the name in the checkpoint: a function, or beginnings of names and what stands for them there."""

PARTS = ("model", "optimizer", "learning_rate")
"""What of a checkpoint can be loaded by itself: parameters and buffers; states and master weights; the scheduler's state."""


@dataclass(frozen=True)
class LoadOptions:
    """What a load lets differ.

    Attributes:
        allow_missing: patterns of keys, as the objects name them, that the checkpoint may lack.
        allow_unexpected: patterns of keys, as the checkpoint names them, that the objects may lack.
        allow_other_shape: patterns of parameters and buffers, as the objects name them, that may have another shape in the checkpoint.
        resize: patterns of those of which the leading rows, or columns, are loaded that both have, where one dimension has another size.
        cast: whether floating point values are converted.
        key_map: see :data:`KeyMap`; None where the names are the same.
        parts: those of :data:`PARTS` that are loaded.
        copy_tied: whether tensors that are tied on one side only are copied.
        verify_first: whether all digests are checked before anything changes.
        salvage: whether what is damaged counts as missing.
        allow_other_base: whether parameters that were left out may have other values than then.
        check_digests: whether what is read is compared with its digests.
    """

    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    allow_other_shape: tuple[str, ...] = ()
    resize: tuple[str, ...] = ()
    cast: bool = False
    key_map: KeyMap | None = None
    parts: frozenset[str] = field(default_factory=frozenset)
    copy_tied: bool = False
    verify_first: bool = False
    salvage: bool = False
    allow_other_base: bool = False
    check_digests: bool = True

    def digest(self, names: Mapping[str, str]) -> str:
        """Return a digest of what must be the same on every rank; ``names`` is what :func:`map_names` made of ``key_map``."""
        described = [(name, sorted(value) if name == "parts" else value) for name, value in vars(self).items() if name != "key_map"]
        return hashlib.sha256(repr((described, sorted(names.items()))).encode()).hexdigest()


PATTERNS = [one.name for one in fields(LoadOptions) if isinstance(one.default, tuple)]
"""Those of the options that are patterns."""

_SWITCHES = [one.name for one in fields(LoadOptions) if isinstance(one.default, bool)]


def check_options(given: Collection[str], **arguments: Any) -> LoadOptions:
    """Return the options of a call, checked.

    Args:
        given: which of "model" and "optimizer" were given to load into.
        arguments: all of :class:`LoadOptions`, as a caller of ``load`` gave them: of ``parts`` None for all that can be loaded into what
            was given, and any collection where one holds strings.

    Raises:
        CheckpointError: one of them isn't what it must be.
    """
    for name in _SWITCHES:
        if not isinstance(arguments[name], bool):
            raise CheckpointError(f"load: {name} is {arguments[name]!r:.100}; give True or False")
    if arguments["verify_first"] and not arguments["check_digests"]:
        raise CheckpointError("load: verify_first=True checks the digests that check_digests=False leaves out; choose one")
    key_map = arguments["key_map"]
    if key_map is not None and not callable(key_map):
        fits = isinstance(key_map, Mapping) and all(isinstance(text, str) for pair in key_map.items() for text in pair)
        if not fits:
            raise CheckpointError(
                f"load: key_map is {key_map!r:.100}; give a function from a name in the model to the name in the checkpoint, or a dict "
                "from beginnings of such names to what stands for them in the checkpoint"
            )
    checked = {
        "parts": _check_parts(arguments["parts"], given),
        **{name: check_patterns("load", name, arguments[name]) for name in PATTERNS},
    }
    return LoadOptions(**{**arguments, **checked})


def check_patterns(call: str, name: str, patterns: Any) -> tuple[str, ...]:
    """Return the patterns that a caller gave for the option ``name`` of the function ``call``, checked.

    Raises:
        CheckpointError: they aren't a collection of strings.
    """
    is_collection = isinstance(patterns, Iterable) and not isinstance(patterns, (str, bytes))
    checked = tuple(patterns) if is_collection else (None,)
    if not all(isinstance(one, str) for one in checked):
        raise CheckpointError(f"{call}: {name} is {patterns!r:.100}; give a list of patterns of keys, such as ['head.*']")
    return tuple(one for one in checked if isinstance(one, str))


def _check_parts(parts: Any, given: Collection[str]) -> frozenset[str]:
    possible = {part for part in PARTS if ("model" if part == "model" else "optimizer") in given}
    if parts is None:
        return frozenset(possible)
    is_collection = isinstance(parts, Iterable) and not isinstance(parts, (str, bytes, Mapping))
    chosen = list(parts) if is_collection else []
    strange = [f"{part!r:.50}" for part in chosen if part not in PARTS]
    if not chosen or strange:
        what = f"there is no part {listing(strange)}" if strange else f"parts is {parts!r:.100}"
        raise CheckpointError(f"load: {what}; give a set of some of {', '.join(map(repr, PARTS))}")
    missing = sorted(set(chosen) - possible)
    if missing:
        raise CheckpointError(
            f"load: parts has {listing(map(repr, missing))}, which needs {'a model' if 'model' in missing else 'an optimizer'}"
        )
    return frozenset(chosen)


class Patterns:
    """Shell-style patterns of keys, which remember whether they were of use."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._used = dict.fromkeys(patterns, False)

    def match(self, key: str) -> bool:
        """Tell whether a pattern matches the key; all that do were of use."""
        matching = [one for one in self._used if fnmatchcase(key, one)]
        self._used.update(dict.fromkeys(matching, True))
        return bool(matching)

    def match_any(self, keys: Iterable[str]) -> bool:
        """Tell whether a pattern matches one of the keys, which are names of one tensor; all that match any were of use."""
        matched = [self.match(key) for key in keys]
        return any(matched)

    def match_all(self, keys: Collection[str]) -> bool:
        """Tell whether each key has a pattern that matches it. Only then were these of use."""
        if not all(any(fnmatchcase(key, one) for one in self._used) for key in keys):
            return False
        return all(self.match(key) for key in keys)

    def used(self) -> list[str]:
        """The patterns that were of use."""
        return [one for one, used in self._used.items() if used]


def map_names(key_map: KeyMap | None, names: Iterable[str]) -> dict[str, str]:
    """Return the names in the checkpoint, of those names of the objects that have another one there.

    Raises:
        CheckpointError: the function doesn't return names.
        MismatchError: two names have the same one in the checkpoint.
    """
    if key_map is None:
        return {}
    function = key_map if callable(key_map) else _prefix_function(key_map)
    mapped: dict[str, str] = {}
    taken: dict[str, str] = {}
    collisions = []
    for name in sorted(names):
        other = function(name)
        if not isinstance(other, str) or not other:
            raise CheckpointError(f"load: key_map gave {other!r:.100} for '{name}'; give the name that it has in the checkpoint")
        if other in taken:
            collisions.append(f"'{taken[other]}' and '{name}' are both '{other}'")
        taken[other] = name
        mapped[name] = other
    if collisions:
        raise MismatchError(
            f"load: key_map gives {len(collisions)} names of the model a name in the checkpoint that another one has too: "
            f"{listing(collisions)}; nothing was changed. Give each its own"
        )
    return {name: other for name, other in mapped.items() if name != other}


def unused_prefixes(key_map: KeyMap | None, names: Iterable[str]) -> list[str]:
    """Return the entries of a ``key_map`` with which no name begins."""
    known = list(names)
    prefixes = key_map if isinstance(key_map, Mapping) else {}
    return [prefix for prefix in prefixes if not any(_begins_with(name, prefix) for name in known)]


def _prefix_function(prefixes: Mapping[str, str]) -> Callable[[str], str]:
    by_length = sorted(prefixes.items(), key=lambda pair: -len(pair[0]))

    def map_name(name: str) -> str:
        for prefix, other in by_length:
            if _begins_with(name, prefix):
                return other + name[len(prefix) :]
        return name

    return map_name


def _begins_with(name: str, prefix: str) -> bool:
    """Tell whether a name begins with a prefix that ends where one of its parts does."""
    return name.startswith(prefix) and (not prefix or prefix.endswith(".") or name[len(prefix) : len(prefix) + 1] in ("", "."))
