"""Which of the values that all ranks must give alike differ: asked once ranks know that some do, so that no other save pays for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .errors import RankFailedError
from .meeting import digest_of
from .storage.agreement import COORDINATOR
from .storage.json_values import JsonValue

_MOST_KEYS = 1000
"""A dict of more is compared as a whole."""

_DICT = "dict"
"""Stands for the digest of a dict whose items are compared one by one."""

_SHOWN = 60
"""How many characters of a value are shown."""


def describe_values(values: Mapping[str, Any], encode: Callable[[Any], bytes]) -> JsonValue:
    """Return what :func:`raise_difference` compares of this rank's values: each one's digest and the beginning of its text.

    Args:
        values: by the names of arguments; dicts in them are compared key by key.
        encode: returns equal bytes for equal values.
    """
    return {
        where: [digest, " ".join(f"{value!r}".split())[:_SHOWN]]
        for name, one in values.items()
        for where, value, digest in _nodes(name, one, encode)
    }


def _nodes(where: str, value: Any, encode: Callable[[Any], bytes]) -> Iterator[tuple[str, Any, str]]:
    """Yield a value, its digest and its place; of a dict, which is told from all else by its digest, then those in it."""
    if not isinstance(value, dict) or len(value) > _MOST_KEYS:
        yield where, value, digest_of(encode(value).hex())
        return
    yield where, value, _DICT
    for key, item in value.items():
        yield from _nodes(f"{where}[{key!r}]", item, encode)  # the whole key: long ones may differ in their ends alone


def raise_difference(call: str, ranks: Sequence[JsonValue], ways_out: Mapping[str, str]) -> None:
    """Raise, and say what the first value is that differs.

    Args:
        call: the caller's name, for the message.
        ranks: what :func:`describe_values` returned on each.
        ways_out: by the names of arguments, what to do.

    Raises:
        RankFailedError: naming it, the ranks and what they gave.
    """
    first = ranks[COORDINATOR]
    for rank, own in enumerate(ranks):
        for where in [*first, *own]:
            one, other = first.get(where), own.get(where)
            if (one and one[0]) != (other and other[0]):
                name = where.partition("[")[0]
                raise RankFailedError(
                    f"{call}: {name} must be the same on all ranks, and {_say(where, one, other, rank)}; nothing was written. "
                    f"{ways_out[name]}"
                )
    raise RankFailedError(f"{call}: the same keys came in another order on other ranks; nothing was written. Make dicts alike on all ranks")


def _say(where: str, one: list[str] | None, other: list[str] | None, rank: int) -> str:
    if one and other and one[1] == other[1]:
        return f"{where} differs between rank {COORDINATOR} and rank {rank}, where it is written alike: {one[1]}"
    shown, otherwise = (text[1] if text else "missing" for text in (one, other))
    return f"{where} is {shown} on rank {COORDINATOR} and {otherwise} on rank {rank}"
