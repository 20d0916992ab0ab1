"""How far a command is, on a terminal only: a bar where ``rich`` is installed (the extra ``cli``), else a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

ShowProgress = Callable[[int, int], None]
"""Takes how many bytes are done, and how many there are."""

_PAUSE_SECONDS = 0.1


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
        line = _Line(stream)
        try:
            yield line.show
        finally:
            line.clear()
        return
    columns = (BarColumn(), TaskProgressColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show_nothing(done: int, total: int) -> None:
    """Where nobody looks."""


class _Line:
    """One line that is written anew again and again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = 0.0

    def show(self, done: int, total: int) -> None:
        """Show it, unless that was done a moment ago."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PAUSE_SECONDS
            self._write(f"{100 * done // max(1, total)} % of {total / 2**20:.0f} MiB")

    def clear(self) -> None:
        """Leave nothing behind."""
        if self._next:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
