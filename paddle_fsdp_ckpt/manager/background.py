"""Saves that go on while training does: this rank's bytes, copied at the call, and the one thread that writes them."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - what it registers for the end of the process must come before ours
import logging
import threading
import weakref
from collections.abc import Callable

from ..errors import CheckpointError
from ..host_memory import HostMemory, is_on_device
from ..saving import PreparedSave
from ..storage.addresses import address_of
from ..storage.writer import FileImage, lay_out

_LOG = logging.getLogger("paddle_fsdp_ckpt")


class HostBuffer:
    """Host memory for the copies of one rank's bytes, kept from save to save, so that only a larger save allocates anew."""

    def __init__(self) -> None:
        self._memory = HostMemory(0)

    @property
    def nbytes(self) -> int:
        """How much memory is held."""
        return self._memory.nbytes

    def copy(self, prepared: PreparedSave) -> FileImage:
        """Copy what one rank's file is to hold, one piece at a time to its place in the file, and return that; the next call overwrites it.

        Raises:
            ValueError: a file can't hold it.
        """
        placed, values = prepared.placed, list(prepared.values())
        layout = lay_out([piece for piece, _ in values], prepared.plan, placed)
        nbytes = layout.nbytes
        is_pinned = any(not isinstance(value, memoryview) and is_on_device(value) for _, value in values)
        if nbytes > self._memory.nbytes or is_pinned > self._memory.is_pinned:
            # First without the old one: both together would be twice the memory.
            self._memory = HostMemory(0)
            self._memory = HostMemory(nbytes, is_pinned=is_pinned)
        position = 0
        for part in layout.header:
            self._memory.take(memoryview(part), position)
            position += len(part)
        if placed is not None and layout.nbytes_before:
            placed.places.copy_to(address_of(self._memory.view[position:]))
            position += layout.nbytes_before
        for number, size in zip(layout.order, layout.sizes, strict=True):
            self._memory.take(values[number][1], position)
            position += size
        self._memory.wait()
        return FileImage(self._memory.view[:nbytes], layout.count, layout.header_nbytes)


class Worker:
    """Runs one job at a time in a thread of its own. A process that ends waits for it; what failed is raised later, once.

    Attributes:
        is_awaited: whether somebody waits for the job that runs.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._what = ""
        _end_with(self)

    @property
    def is_busy(self) -> bool:
        """Whether a job runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None], what: str) -> None:
        """Begin a job, or do it now where there can be no thread; there must be none, and its failure raised.

        Args:
            job: what to do.
            what: it is, for the messages.
        """
        assert self._thread is None
        self._what = what

        def run() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - whatever it is, wait() raises it
                self._error = error

        # No daemon: the interpreter waits for it before it ends.
        thread = threading.Thread(target=run, name="paddle_fsdp_ckpt save")
        try:
            thread.start()
        except RuntimeError:  # The system makes no more threads. The other ranks' jobs have begun, and need this one.
            run()
        else:
            self._thread = thread

    def wait(self) -> None:
        """Wait until no job runs, and raise what the last one did.

        Raises:
            CheckpointError: it failed.
        """
        self.join()
        self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise type(error)(f"{self._what} in the background failed: {error}") from error
        if error is not None:
            raise CheckpointError(f"{self._what} in the background failed: {type(error).__name__}: {error}") from error

    def join(self) -> None:
        """Wait until no job runs."""
        if self._thread is not None:
            self.is_awaited = True
            try:
                self._thread.join()
            finally:
                self.is_awaited = False

    def say_what_failed(self) -> None:
        """Log what failed and was not raised yet."""
        if self._error is not None:
            _LOG.error("%s in the background failed, and nobody asked any more: %s", self._what, self._error)


def _end_with(worker: Worker) -> None:
    """Let the end of the process wait for a worker, and say what failed and was never raised."""
    reference = weakref.ref(worker)

    def join() -> None:
        there = reference()
        if there is not None:
            there.join()

    def say() -> None:
        there = reference()
        if there is not None:
            there.say_what_failed()

    # The interpreter waits for the thread anyway; but before that it closes all executors of concurrent.futures, and the save may use one.
    # These run in reverse order, and theirs was registered when their module was imported.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(join)
    atexit.register(say)
    # At the end of the process it must not come first.
    weakref.finalize(worker, atexit.unregister, say).atexit = False
