"""The saves of one manager: each is written at once, or from a copy in the background, one at a time."""

from __future__ import annotations

import time
from dataclasses import replace

from ..errors import CheckpointError
from ..storage.writer import FileImage
from .background import HostBuffer, Worker
from .meetings import Meetings
from .opening import OpenRoot
from .save_job import SaveJob
from .steps import Root


class Saves:
    """Runs the saves of a manager, and lets the run's steps know of them.

    Attributes:
        in_background: whether they are written there.
        buffer: what their copies lie in.
    """

    def __init__(self, meetings: Meetings, root: OpenRoot, *, in_background: bool) -> None:
        self.in_background = in_background
        self._meetings = meetings
        self._root = root  # whose lock is held as long as a save is being written, whoever drops the manager
        self.buffer = HostBuffer()
        self._worker = Worker()
        self._done: list[tuple[int, Root]] = []

    def refuse_while_busy(self) -> None:
        """Raise, on all ranks, where one is being written on any.

        Raises:
            CheckpointError: it is.
        """
        if self._meetings.meet("busy", lambda: self._worker.is_busy, any):
            raise CheckpointError(
                "a save is still being written, and when_busy='refuse'; nothing was saved. Call wait() first, or save less often"
            )

    def run(self, job: SaveJob) -> None:
        """Carry a save out, or begin to."""
        if self.in_background:
            self._begin(job)
        else:
            self._root.steps.saved(job.step, job.run())

    def _begin(self, job: SaveJob) -> None:
        """Copy what a job is to write, and let it be written from the copies."""
        image: FileImage | None = None
        failure: BaseException | None = None
        try:
            image = self.buffer.copy(job.prepared)
        except BaseException as error:  # noqa: BLE001 - the other ranks, whose jobs begin, must hear of it from this rank's
            failure = error
        blocked_seconds = time.monotonic() - job.started
        job = replace(
            job,
            image=image,
            failure=failure,
            rendezvous=self._meetings.in_background(),
            blocked_seconds=blocked_seconds,
            is_awaited=lambda: self._worker.is_awaited,
        )
        self._worker.start(lambda: self._done.append((job.step, job.run())), f"the save of step {job.step}")
        if failure is not None and not isinstance(failure, Exception):
            raise failure

    def wait(self) -> None:
        """Wait until none is being written.

        Raises:
            CheckpointError: one in the background failed; it is raised once.
        """
        self._worker.wait()
        for step, root in self._done:
            self._root.steps.saved(step, root)
        self._done.clear()
