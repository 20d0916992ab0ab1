"""Print a report: as JSON, as plain text, or on a terminal with the tables of ``rich``, where that is installed (the extra ``cli``)."""

from __future__ import annotations

import json
import sys

from ..export.text import BlockReport
from .command import Report


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
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for number, title in enumerate(block.titles):
            table.add_column(Text(title), justify="right" if number in block.right else "left", overflow="fold")
        for row in block.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    return True
