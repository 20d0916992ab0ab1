"""How tests start scripts of their own, outside the pool of ranks."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script_environment() -> dict[str, str]:
    """The environment of a script whose exit status counts.

    Paddle 3.3.1's store, in rank 0's process, aborts now and then while that process ends, where another rank leaves just then: seen in
    ``LibUVClient::readCallback``, in about one of twenty runs that had done all their work. Its other implementation has no such code.
    """
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FLAGS_tcp_store_using_libuv": "0"}
