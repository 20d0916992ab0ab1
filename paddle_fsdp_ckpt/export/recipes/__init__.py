"""How models of Paddle and of Hugging Face call and lay out the same tensors: one recipe a family, or one from a file.

A file holds, as JSON,

    {"name": "my_family",
     "rules": [{"source": "decoder.{layer}.proj.weight", "targets": ["model.layers.{layer}.proj.weight"], "transpose": true},
               {"source": "decoder.{layer}.bias", "targets": ["model.layers.{layer}.bias"]}]}

with the fields of :class:`~.rules.Rule`, of which ``source`` and ``targets`` are needed. With ``"extends": "qwen3"`` beside them, keys that
none of these rules takes are left to those of that recipe: of a family, or ``"none"``, which copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, listing
from ...storage.json_values import JsonValue, cut_text, parse_json
from ..config import CONFIG_NAME, ModelConfig
from .llama import LLAMA
from .qwen2 import QWEN2, QWEN2_MOE
from .qwen3 import QWEN3, QWEN3_MOE
from .rules import Recipe, Rule

RECIPES = {recipe.name: recipe for recipe in (LLAMA, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)}
"""The families that are known, by their ``model_type``."""

AUTO, NONE = "auto", "none"
COPY = Recipe(NONE, (Rule("{*key}", ("{*key}",)),))
"""All names and layouts as they are."""

_FIELDS = ("name", "extends", "rules")
"""What a recipe's file may hold."""


def choose_recipe(wanted: str, config: ModelConfig | None) -> Recipe:
    """Return a recipe.

    Args:
        wanted: ``"auto"`` for that of the configuration's family, ``"none"`` for :data:`COPY`, the name of a family, or the path of a file.
        config: of the model.

    Raises:
        CheckpointError: there is no such recipe, or the file holds none.
    """
    if wanted == NONE:
        return COPY
    if wanted == AUTO:
        if config is None:
            raise CheckpointError(
                f"which family the model is of can't be told without its {CONFIG_NAME}: convert --to hf takes it from --config DIR, "
                f"and --to fc and load_huggingface from beside the model's files; or {_give_one()}"
            )
        if config.model_type not in RECIPES:
            raise CheckpointError(f"'{config.path}' has model_type {config.model_type!r:.100}; {_give_one()}")
        return RECIPES[config.model_type]
    if wanted in RECIPES:
        return RECIPES[wanted]
    path = Path(wanted)
    if not path.is_file():
        raise CheckpointError(f"there is no recipe and no file '{wanted}'; {_give_one()}")
    return read_recipe(path)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a file.

    Raises:
        CheckpointError: it holds none.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
        if type(value) is not dict or type(value.get("name")) is not str or type(value.get("rules")) is not list:
            raise ValueError('it is not an object with "name", a text, and "rules", a list')
        unknown = sorted(value.keys() - _FIELDS)
        if unknown:
            meant = _meant(unknown, _FIELDS)
            raise ValueError(f"it has {_quoted(unknown)}, which no recipe knows{meant}; a recipe's fields are {', '.join(_FIELDS)}")
        rules = tuple(_rule(one) for one in value["rules"])
        if "extends" not in value:
            return Recipe(value["name"], rules, own=len(rules))
        return _extended(value["extends"]).extended(value["name"], rules)
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not a recipe: {cut_text(error)}") from error


def _extended(name: JsonValue) -> Recipe:
    """Return the recipe that a file extends."""
    known = {**RECIPES, NONE: COPY}
    if type(name) is not str or name not in known:
        meant = _meant([name], known) if type(name) is str else ""
        raise ValueError(
            f"it extends {name!r:.100}, which is no recipe that a file can extend{meant}; these are {', '.join(known)}, and no other files"
        )
    return known[name]


def _rule(value: JsonValue) -> Rule:
    if type(value) is not dict:
        raise ValueError(f"{value!r:.100} is not a rule")
    known = {one.name: one for one in fields(Rule)}
    lacking = [name for name, one in known.items() if one.default is MISSING and name not in value]
    unknown = sorted(value.keys() - known.keys())
    texts = [f"lacks {_quoted(lacking)}"] if lacking else []
    texts += [f"has {_quoted(unknown)}, which no rule knows{_meant(unknown, known)}"] if unknown else []
    if texts:
        raise ValueError(f"the rule {value!r:.200} {', and '.join(texts)}; a rule's fields are {', '.join(known)}")
    for name, one in value.items():
        kinds = {"targets": list, "shape": list, "transpose": bool}
        if type(one) is not kinds.get(name, str) or (type(one) is list and any(type(item) is not str for item in one)):
            raise ValueError(f"the rule {value!r:.200} has {name} = {one!r:.100}")
    arguments: dict[str, Any] = {name: tuple(one) if type(one) is list else one for name, one in value.items()}
    rule = Rule(**arguments)
    rule.check()
    return rule


def _quoted(names: Iterable[str]) -> str:
    return listing(f"'{name:.100}'" for name in names)


def _meant(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return which known fields may have been meant, as a sentence's end."""
    near = [one for name in unknown for one in get_close_matches(name, known, 1)]
    return f" ({_quoted(near)} perhaps?)" if near else ""


def _give_one() -> str:
    return f"give --recipe (recipe= in Python), one of {', '.join(RECIPES)}, {NONE} (copy names and layouts as they are), or a FILE"
