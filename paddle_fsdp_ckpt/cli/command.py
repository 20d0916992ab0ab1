"""What a command of the command line is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..storage.json_values import JsonValue


class Report(Protocol):
    """What a command prints."""

    def to_json(self) -> JsonValue:
        """The report as plain JSON data."""
        ...


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: what it does.
        add_arguments: adds what it is given on the command line; ``--json`` comes by itself.
        run: does it, and says whether all is good.
        directories: how many it is given, which may come behind the patterns of ``--keys``, the one option of it with words; 0 elsewhere.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], tuple[Report, bool]]
    directories: int = 0
