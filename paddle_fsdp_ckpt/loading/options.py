"""What a caller of ``load`` lets differ between checkpoint and objects, checked; and the other names that keys have in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
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
        switches = (self.cast, self.copy_tied, self.verify_first, self.salvage, self.allow_other_base, self.check_digests)
        described = (self.allow_missing, self.allow_unexpected, sorted(self.parts), switches)
        return hashlib.sha256(repr((described, sorted(names.items()))).encode()).hexdigest()


def check_options(
    *,
    allow_missing: Any,
    allow_unexpected: Any,
    cast: Any,
    key_map: Any,
    parts: Any,
    copy_tied: Any,
    verify_first: Any,
    salvage: Any,
    allow_other_base: Any,
    check_digests: Any,
    given: Collection[str],
) -> LoadOptions:
    """Return the options of a call, checked.

    Args:
        allow_missing: a collection of patterns.
        allow_unexpected: the same.
        cast: True or False.
        key_map: a function, a dict or None.
        parts: a collection of some of :data:`PARTS`, or None for all that can be loaded into what was given.
        copy_tied: True or False.
        verify_first: True or False.
        salvage: True or False.
        allow_other_base: True or False.
        check_digests: True or False.
        given: which of "model" and "optimizer" were given to load into.

    Raises:
        CheckpointError: one of them isn't what it must be.
    """
    switches = {
        "cast": cast,
        "copy_tied": copy_tied,
        "verify_first": verify_first,
        "salvage": salvage,
        "allow_other_base": allow_other_base,
        "check_digests": check_digests,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise CheckpointError(f"load: {name} is {value!r:.100}; give True or False")
    if verify_first and not check_digests:
        raise CheckpointError("load: verify_first=True checks the digests that check_digests=False leaves out; choose one")
    if key_map is not None and not callable(key_map):
        fits = isinstance(key_map, Mapping) and all(isinstance(text, str) for pair in key_map.items() for text in pair)
        if not fits:
            raise CheckpointError(
                f"load: key_map is {key_map!r:.100}; give a function from a name in the model to the name in the checkpoint, or a dict "
                "from beginnings of such names to what stands for them in the checkpoint"
            )
    return LoadOptions(
        _check_patterns("allow_missing", allow_missing),
        _check_patterns("allow_unexpected", allow_unexpected),
        cast,
        key_map,
        _check_parts(parts, given),
        copy_tied,
        verify_first,
        salvage,
        allow_other_base,
        check_digests,
    )


def _check_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    is_collection = isinstance(patterns, Iterable) and not isinstance(patterns, (str, bytes))
    checked = tuple(patterns) if is_collection else (None,)
    if not all(isinstance(one, str) for one in checked):
        raise CheckpointError(f"load: {name} is {patterns!r:.100}; give a list of patterns of keys, such as ['head.*']")
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
