"""Waiting for something that can only be looked at, such as a key in a job's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

_SHORTEST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.05
_PART = 0.1


def look_until_there(
    look: Callable[[], Found | None], timeout_seconds: float, longest_pause_seconds: float = _LONGEST_PAUSE_SECONDS
) -> Found | None:
    """Look until something is there, at least once, and return it; None where it is not there in time.

    Between two looks passes a tenth of the time that was waited so far: who waits loses at most that, and who is waited for is asked
    seldom.

    Args:
        look: returns what is there, or None.
        timeout_seconds: how long to wait; with 0 there is one look.
        longest_pause_seconds: more never passes between two looks.
    """
    start = time.monotonic()
    while (found := look()) is None:
        waited = time.monotonic() - start
        if waited >= timeout_seconds:
            return None
        time.sleep(min(max(_PART * waited, _SHORTEST_PAUSE_SECONDS), longest_pause_seconds))
    return found
