"""Print a report: as JSON, as plain text, or on a terminal with the tables of ``rich``, where that is installed (the extra ``cli``)."""

from __future__ import annotations

import json
import sys
from typing import Literal

from ..export.text import BlockReport
from .command import Report

_NARROW = 16
"""What a column of text may be cut down to, where none of its words is longer."""
_BETWEEN = 3
"""What a column takes beside its text: blanks around it, and one for the box."""


def show(report: Report, *, as_json: bool) -> None:
    """Print it."""
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    elif not (isinstance(report, BlockReport) and sys.stdout.isatty() and _show_richly(report)):
        print(report)


def _show_richly(report: BlockReport) -> bool:
    """Print it with ``rich``, and tell whether that is there."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    for block in report.blocks():
        if isinstance(block, str):
            console.print(Text(block), soft_wrap=True)
            continue
        # Narrow columns, and numbers, stay on one line, and words, such as names, whole; where not even these fit, a row has two lines.
        columns = [list(column) for column in zip(block.titles, *block.rows, strict=True)]
        widths = [max(map(len, column)) for column in columns]
        words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
        least = [
            width if number in block.right else max(min(width, _NARROW), word)
            for number, (width, word) in enumerate(zip(widths, words, strict=True))
        ]
        if sum(least) + _BETWEEN * len(least) > console.width:
            for line in block.narrow_lines():
                console.print(Text(line), soft_wrap=True)
            continue
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for number, title in enumerate(block.titles):
            justify: Literal["left", "right"] = "right" if number in block.right else "left"
            is_whole = least[number] == widths[number]
            table.add_column(Text(title), justify=justify, overflow="fold", no_wrap=is_whole, min_width=least[number])
        for row in block.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    return True
