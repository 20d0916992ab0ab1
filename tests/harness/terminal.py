"""A pseudo terminal, and what is shown on it."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

HAS_BARS = importlib.util.find_spec("rich") is not None
"""Whether the extra ``cli`` is installed."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A pseudo terminal: ``stream`` writes to it."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")
        self._shown = b""

    def shown(self, wanted: str = "") -> str:
        """Wait until ``wanted`` was shown, for a minute at the most, and return all that was, without its colours."""
        deadline = time.monotonic() + 60
        while True:
            text = _COLOUR.sub("", self._shown.decode(errors="replace"))
            if not select.select([self._ours], [], [], 0 if wanted in text else max(0.0, deadline - time.monotonic()))[0]:
                assert wanted in text, text
                return text
            self._shown += os.read(self._ours, 10_000)

    def hang_up(self) -> None:
        """Go away, as a closed window does."""
        os.close(self._ours)


def lines_over(shown: str) -> list[str]:
    """Return what was shown, line by line, each of which replaced the one before."""
    return [line.strip() for line in shown.replace("\x1b[1A", "").replace("\x1b[2K", "").replace("\n", "").split("\r")]


def is_clean(shown: str) -> bool:
    """Whether nothing is left of what was shown: the last line is erased, and the cursor was never hidden."""
    return (not shown or shown.endswith("\x1b[2K")) and "\x1b[?25l" not in shown


@contextmanager
def without_rich() -> Iterator[None]:
    """Be a Python without the extra ``cli`` for a while."""
    gone = {name: None for name in (*sys.modules, "rich") if name.partition(".")[0] == "rich"}
    with patch.dict(sys.modules, gone):
        yield
