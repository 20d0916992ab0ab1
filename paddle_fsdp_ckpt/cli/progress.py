"""A line that says how far a command is, on a terminal only."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

_PAUSE_SECONDS = 0.1


class ProgressLine:
    """Shows how many bytes are checked, rewriting its line; leaves nothing behind. Where there is no terminal it shows nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._next = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._is_terminal and self._next:
            self._show("")

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are checked."""
        now = time.monotonic()
        if self._is_terminal and now >= self._next:
            self._next = now + _PAUSE_SECONDS
            self._show(f"{100 * done // max(1, total)} % of {total / 2**20:.0f} MiB")

    def _show(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
