"""What a process logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(least: int) -> Iterator[list[str]]:
    """Collect what the package logs on this rank, from a level on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage()) if record.levelno >= least else None  # type: ignore[method-assign]
    log = logging.getLogger("paddle_fsdp_ckpt")
    level = log.level
    log.addHandler(handler)
    log.setLevel(least)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
