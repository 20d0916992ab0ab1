"""What a process logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Give a list to which the messages of warnings and errors come that the package logs."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                heard.append(record.getMessage())

    logger, listener = logging.getLogger("paddle_fsdp_ckpt"), Listener()
    logger.addHandler(listener)
    try:
        yield heard
    finally:
        logger.removeHandler(listener)
