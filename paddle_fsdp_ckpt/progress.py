"""A line that says how far something is, on a terminal only."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

_PAUSE_SECONDS = 0.1
_LONG_SECONDS = 2.0


class ProgressLine:
    """Shows how many bytes are done, rewriting its line; leaves nothing behind. Where there is no terminal it shows nothing."""

    def __init__(self, stream: TextIO, what: str = "", *, after_seconds: float = 0.0, is_wanted: bool = True) -> None:
        """Begin.

        Args:
            stream: where to.
            what: stands before the figures.
            after_seconds: for how long nothing is shown, so that only what takes long is.
            is_wanted: False for a line that is never shown.
        """
        self._stream = stream
        self._what = what
        self._begin = self._next = time.monotonic() + after_seconds
        self.is_shown = is_wanted and stream.isatty()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.is_shown and self._next > self._begin:
            self._show("")

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are done."""
        now = time.monotonic()
        if self.is_shown and now >= self._next:
            self._next = now + _PAUSE_SECONDS
            self._show(f"{self._what}{100 * done // max(1, total)} % of {total / 2**20:.0f} MiB")

    def counter(self, total: int) -> Callable[[int], None]:
        """Return what shows how many of ``total`` bytes are done when it is told of each few of them."""
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done = min(done + nbytes, total)
            self(done, total)

        return count

    def _show(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


def long_progress(what: str, rank: int) -> ProgressLine:
    """Return a line on the terminal of a job's first rank, for what may take long."""
    return ProgressLine(sys.stderr, f"{what} ", after_seconds=_LONG_SECONDS, is_wanted=rank == 0)


@contextmanager
def watching_file(path: Path, nbytes: int, line: ProgressLine) -> Iterator[None]:
    """Show how far a file of about ``nbytes`` bytes has grown, while the block writes it."""
    if not line.is_shown:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_PAUSE_SECONDS):
            try:
                line(min(path.stat().st_size, nbytes), nbytes)
            except OSError:  # not there yet
                continue

    thread = threading.Thread(target=watch, name="paddle_fsdp_ckpt progress", daemon=True)
    with line:
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
