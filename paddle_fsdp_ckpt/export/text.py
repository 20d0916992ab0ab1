"""Numbers, tables and reports as people read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..storage.json_values import JsonValue

NOTHING = "-"
"""What stands for a value that isn't there."""


def value_text(value: JsonValue, longest: int) -> str:
    """Return a JSON value as people write it, no longer than that: a dict's items without braces, and what is nothing as ``-``."""
    text = _value_text(value) or NOTHING
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _value_text(value: JsonValue) -> str:
    if isinstance(value, dict):
        items = ((name, f"({_value_text(item)})" if isinstance(item, dict) else _value_text(item)) for name, item in value.items())
        return ", ".join(f"{name} {text}" for name, text in items if text not in ("", "()"))
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        titles: of the columns.
        rows: as many cells each.
        right: the numbers of the columns that are aligned on the right.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()

    def lines(self) -> list[str]:
        """Return it as plain text."""
        widths = [max(map(len, column)) for column in zip(self.titles, *self.rows, strict=True)]
        lines = []
        for row in (self.titles, *self.rows):
            cells = [
                cell.rjust(width) if i in self.right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return lines

    def narrow_lines(self) -> list[str]:
        """Return it as plain text of two lines a row: the first cell, and the others below it."""
        others = Table(self.titles[1:], [row[1:] for row in self.rows], [number - 1 for number in self.right if number])
        pairs = zip((self.titles, *self.rows), others.lines(), strict=True)
        return [line for row, other in pairs for line in (row[0], f"  {other}")]


Block: TypeAlias = "str | Table"
"""A line of text, or a table."""


class BlockReport(ABC):
    """A report that consists of lines and tables."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield its lines and tables, from the top."""

    def __str__(self) -> str:
        return "\n".join(line for block in self.blocks() for line in ([block] if isinstance(block, str) else block.lines()))
