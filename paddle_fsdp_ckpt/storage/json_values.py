"""JSON that comes back as it was, and JSON that may come from anyone."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeAlias

JsonValue: TypeAlias = Any
"""None, bool, int, float, str, a list of such, or a dict of such with str keys; see :func:`check_json`."""

_PLAIN_TYPES = {str, int, float, bool, type(None)}
_LONGEST_TEXT = 1000


def parse_json(text: str, *, allow_nan: bool = False) -> JsonValue:
    """Parse JSON that may come from anyone.

    Raises:
        ValueError: not JSON, a key twice in one object, nested beyond reason, or not a number where ``allow_nan`` is false.
    """
    constants = None if allow_nan else _refuse_constant
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates, parse_constant=constants)
    except RecursionError:
        raise ValueError("JSON is nested beyond reason") from None


def cut_text(error: Exception) -> str:
    """Return the text of an error about data that may come from anyone, and so may be quoted at any length."""
    text = str(error)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def check_json(value: JsonValue, where: str) -> None:
    """Raise unless ``value`` comes back from JSON as it is; ``where`` names it for the message.

    Raises:
        ValueError: it holds something else than None, bool, int, float, str, list, or dict with str keys. Tuples are refused,
            since they would come back as lists.
    """
    if isinstance(value, dict):
        strange = [key for key in value if not isinstance(key, str)]
        if strange:
            raise ValueError(f"{where} has the key {strange[0]!r}, and JSON would turn it into a str; use str keys")
        for key, item in value.items():
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        if set(map(type, value)) <= _PLAIN_TYPES:  # most lists are of names
            return
        for i, item in enumerate(value):
            check_json(item, f"{where}[{i}]")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON can't give back as it is; use None, bool, int, float, str, list or dict"
        )


def _object_without_duplicates(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in one JSON object")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
