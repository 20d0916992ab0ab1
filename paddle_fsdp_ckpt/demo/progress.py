"""Saying how far a job is: one line that changes on a terminal, one line at the job's end elsewhere."""

from __future__ import annotations

import sys
import time

from .job import Event, Job

_ERASE_LINE = "\r\x1b[K"


class Progress:
    """Follows one job from its start to :meth:`end`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began = time.monotonic()
        self._changing = sys.stdout.isatty()
        self._show("starting")

    def add(self, event: Event) -> None:
        """Take in an event of the job's rank 0."""
        if event["kind"] == "step":
            self._show(f"step {event['step']:3} of {self._job.steps}, loss {event['loss']:.4f}")
        else:
            self._show(event["kind"])

    def end(self, summary: str) -> None:
        """Say that the job is over, how long it took, and what came of it."""
        erase = _ERASE_LINE if self._changing else ""
        print(f"{erase}  {self._job.title:14} {time.monotonic() - self._began:5.1f} s  {summary}", flush=True)

    def _show(self, text: str) -> None:
        if self._changing:
            print(f"{_ERASE_LINE}  {self._job.title:14} {text}", end="", flush=True)
