"""What a checkpoint says of an optimizer, as people read it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import counted
from ..storage.json_values import JsonValue
from .text import value_text

_LONGEST = 1000
_WIDTH = 110
_FIRST_SETTINGS = ("weight_decay", "grad_clip")


@dataclass(frozen=True)
class Group:
    """A param group of an optimizer: how many parameters it has, and its hyper-parameters."""

    parameters: int
    settings: JsonValue


@dataclass(frozen=True)
class Optimizer:
    """What a checkpoint says of an optimizer."""

    cls: str
    groups: tuple[Group, ...]
    learning_rate: JsonValue

    def lines(self) -> Iterator[str]:
        """Yield what is set, the most important first: the learning rate now, its schedule, and of each group decay and clipping."""
        rate = self.learning_rate
        if "scheduler" in rate:
            state = dict(rate["state"]) if isinstance(rate.get("state"), dict) else {}
            now = state.pop("last_lr", None)
            yield f"{self.cls}, learning rate {'not noted' if now is None else value_text(now, _LONGEST)}"
            schedule = {name: value for name, value in rate.items() if name != "scheduler"} | {"state": state}
            yield from _wrap(f"schedule: {rate['scheduler']}, {value_text(schedule, _LONGEST)}", "  ")
        else:
            yield f"{self.cls}, learning rate {value_text(rate.get('value'), _LONGEST)}"
        for group in self.groups:
            first = [_setting(name, group.settings[name]) for name in _FIRST_SETTINGS if name in group.settings]
            others = {name: value for name, value in group.settings.items() if name not in _FIRST_SETTINGS}
            yield from _wrap(f"{counted(group.parameters, 'parameter')}: {', '.join(first)}", "  ")
            yield from _wrap(value_text(others, _LONGEST), "    ") if others else ()


def described_optimizer(described: JsonValue) -> Optimizer:
    """Return what a manifest says of an optimizer."""
    groups = tuple(Group(len(one["parameters"]), one["settings"]) for one in described["groups"])
    return Optimizer(described["class"], groups, described["learning_rate"])


def _setting(name: str, value: JsonValue) -> str:
    return f"no {name}" if value is None else value_text({name: value}, _LONGEST)


def _wrap(text: str, indent: str) -> list[str]:
    """Return a long line as several, those after the first further in."""
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False)
