"""One measurement of one call in one process: time on the clock, time on the processor, and the kernel's own figure of peak memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """What one call cost.

    Attributes:
        seconds: on the clock.
        cpu_seconds: of all threads of the process.
        extra_nbytes: by how much memory rose at the most over what it was at the call: VmHWM, which is reset before, less VmRSS.
        error: what the call raised; None where it returned.
        start: when it began, on a clock that all processes of a machine have in common.
    """

    seconds: float
    cpu_seconds: float
    extra_nbytes: int
    error: str | None = None
    start: float = 0.0


wait_for_others: Callable[[], None] = lambda: None  # noqa: E731
"""Returns once all ranks of the job are about to measure; :mod:`.group` sets it."""


def measure(call: Callable[[], Any]) -> Measurement:
    """Call, on all ranks of a job at the same time, and return what it cost."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins anew, see proc(5)
    before = _status("VmRSS")
    error = None
    wait_for_others()
    cpu_start, start = time.process_time(), time.monotonic()
    try:
        call()
    except Exception as raised:  # noqa: BLE001 - a peer that can't do it is a result
        error = f"{type(raised).__name__}: {str(raised).strip().splitlines()[-1] if str(raised).strip() else ''}"[:160]
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
    return Measurement(seconds, cpu_seconds, max(0, _status("VmHWM") - before), error, start)


def of_all_ranks(ranks: list[Measurement]) -> Measurement:
    """Return what a call of several ranks cost: the time from when the first began until the last ended, and else the largest of each."""
    start = min(one.start for one in ranks)
    return Measurement(
        max(one.start + one.seconds for one in ranks) - start,
        max(one.cpu_seconds for one in ranks),
        max(one.extra_nbytes for one in ranks),
        next((one.error for one in ranks if one.error is not None), None),
        start,
    )


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"the kernel tells no {field}")
