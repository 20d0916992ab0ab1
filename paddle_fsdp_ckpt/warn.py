"""Warnings that name the user's line, however deep in this package they are given."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent) + "/"


def warn_caller(message: str) -> None:
    """Give a UserWarning that names the line outside of this package which the call came from."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
