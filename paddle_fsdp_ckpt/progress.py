"""How far something long is, on a terminal: the bar of ``rich``, which the extra ``cli`` brings. Elsewhere, and without it, nothing."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

_LONG_SECONDS = 2.0
_PAUSE_SECONDS = 0.2
_PATIENCE_SECONDS = 1.0


class ProgressLine:
    """Shows how many bytes are done, how fast that goes and how long it will take; leaves nothing behind.

    A thread of its own draws, and whoever works only leaves figures for it. So a terminal that fails, or that somebody has stopped,
    holds nobody up.
    """

    def __init__(
        self, stream: TextIO | None, what: str = "", *, is_wanted: bool = True, is_awaited: Callable[[], bool] | None = None
    ) -> None:
        """Begin to count the time; nothing is shown before two seconds are over.

        Args:
            stream: where to; a standard stream, which is None in a process that was started without.
            what: stands before the figures.
            is_wanted: False for a line that is never shown.
            is_awaited: nothing is shown before this says that somebody waits; None where somebody does from the beginning.
        """
        self._stream = stream
        self._what = what
        self._is_awaited = is_awaited or (lambda: True)
        self._long_at = time.monotonic() + _LONG_SECONDS
        self._figures = (0, 0)
        self._look: Callable[[], tuple[int, int]] = lambda: self._figures
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_shown = is_wanted and _is_terminal(stream)

    def __enter__(self) -> ProgressLine:
        if self.is_shown:
            self._over = threading.Event()
            thread = threading.Thread(target=self._draw, args=(self._over,), name="paddle_fsdp_ckpt progress", daemon=True)
            with suppress(RuntimeError):  # the system makes no more threads
                thread.start()
                self._thread = thread
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)
            self._thread = None

    def __call__(self, done: int, total: int) -> None:
        """Take note that ``done`` of ``total`` bytes are done."""
        self._figures = (done, total)

    def counter(self, total: int) -> Callable[[int], None]:
        """Return what takes note of how many of ``total`` bytes are done when it is told of each few of them."""
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done = min(done + nbytes, total)
            self(done, total)

        return count

    def follow(self, look: Callable[[], tuple[int, int]]) -> None:
        """Let what draws ask ``look`` how many bytes of how many are done; an OSError from it stands for none."""
        self._look = look

    def _draw(self, over: threading.Event) -> None:
        """Show the bar until it is over."""
        if over.wait(max(self._long_at - time.monotonic(), _PAUSE_SECONDS)):
            return
        while not self._is_awaited():
            if over.wait(_PAUSE_SECONDS):
                return
        # Without rich, or where the terminal fails, there is no bar, and that is all.
        with suppress(Exception), _Bar(self._stream, self._what) as bar:
            while not over.is_set():
                done, total = 0, 0
                with suppress(OSError):
                    done, total = self._look()
                bar.show(done, total)
                over.wait(_PAUSE_SECONDS)


class _Bar:
    """The bar itself, and its own way to the terminal, whose stream may be used by others at the same time."""

    def __init__(self, stream: Any, what: str) -> None:
        from rich.console import Console
        from rich.control import Control
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.segment import ControlType

        class QuietConsole(Console):
            """One that hides no cursor: a process that is killed couldn't bring it back."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        columns = (
            *((TextColumn("{task.description}"),) if what else ()),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._terminal = open(os.dup(stream.fileno()), "w", encoding=stream.encoding)  # noqa: SIM115 - __exit__ closes it
        self._poll = select.poll()
        self._poll.register(self._terminal, select.POLLOUT)
        self._console = QuietConsole(file=self._terminal)
        # What others print goes its own way: to lead it through rich would be another way for it to fail.
        self._bar = Progress(
            *columns, console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task(what, total=None)
        self._begin_line = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if error is None and self._bar.live.is_started and self._is_ready():
                self._bar.stop()
        finally:
            self._terminal.close()

    def show(self, done: int, total: int) -> None:
        """Draw, unless the terminal takes nothing now, as one that somebody has stopped; or can't draw."""
        self._bar.update(self._task, completed=done, total=total or None)
        if not self._is_ready():
            return
        if not self._bar.live.is_started:
            self._console.control(self._begin_line)
            self._bar.start()
        self._bar.refresh()

    def _is_ready(self) -> bool:
        return self._console.is_interactive and self._poll.poll(0) == [(self._terminal.fileno(), select.POLLOUT)]


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):  # ValueError: it is closed
        return False


def long_progress(what: str, rank: int, is_awaited: Callable[[], bool] | None = None) -> ProgressLine:
    """Return a line on the terminal of a job's first rank, for what may take long; ``is_awaited`` as for :class:`ProgressLine`."""
    return ProgressLine(sys.stderr, what, is_wanted=rank == 0, is_awaited=is_awaited)


@contextmanager
def watching_file(path: Path, nbytes: int, line: ProgressLine) -> Iterator[None]:
    """Show how far a file of about ``nbytes`` bytes has grown, while the block writes it."""
    line.follow(lambda: (min(path.stat().st_size, nbytes), nbytes))
    with line:
        yield
