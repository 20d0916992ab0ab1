"""How far a command is, on a terminal only: a bar where ``rich`` is installed (the extra ``cli``), else a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ..progress import ProgressLine

ShowProgress = Callable[[int, int], None]
"""Takes how many bytes are done, and how many there are."""


@contextmanager
def showing_progress(stream: TextIO) -> Iterator[ShowProgress]:
    """Yield what shows progress while the block runs, and leaves nothing behind; on no terminal it shows nothing."""
    if not stream.isatty():
        yield _show_nothing
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TimeRemainingColumn
    except ImportError:
        with ProgressLine(stream) as line:
            yield line
        return
    columns = (BarColumn(), TaskProgressColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show_nothing(done: int, total: int) -> None:
    """Where nobody looks."""
