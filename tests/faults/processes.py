"""Ranks that are real processes and save real files, and can be killed at any moment. Without Paddle, they start in milliseconds."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from paddle_fsdp_ckpt.errors import IncompleteCheckpointError
from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.commit import commit_checkpoint, heal_target
from paddle_fsdp_ckpt.storage.format import PADDLE_METADATA_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.index import read_manifest
from paddle_fsdp_ckpt.storage.manifest import FileRecord, Manifest, utc_now
from paddle_fsdp_ckpt.storage.verify import verify
from paddle_fsdp_ckpt.storage.writer import write_rank_file

LONG = 60.0
"""Seconds; for what comes as soon as a process gets on."""
_POLL_SECONDS = 0.001

OPERATIONS = ("open", "mkdir", "rename", "fsync", "unlink", "rmdir", "writev", "close")
"""The functions of ``os`` through which a save changes or syncs anything."""

_PROCESSES = multiprocessing.get_context("forkserver")


@functools.cache
def _start_server() -> None:
    """Start the process from which ranks are forked. Up to Python 3.12 it finds what to import beforehand only on PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        _PROCESSES.set_forkserver_preload([__name__])
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


@dataclass(frozen=True)
class Fault:
    """What happens to one rank's file system operations.

    Attributes:
        rank: whose.
        nth: counted from 0.
        error: the errno of the error that the operation then raises; None: the process is killed just after it.
        operations: which of :data:`OPERATIONS` are counted.
        lasting: whether all later ones fail as well.
    """

    rank: int
    nth: int
    error: int | None
    operations: Sequence[str] = OPERATIONS
    lasting: bool = False


class FolderRendezvous:
    """Meets in a folder. What a dead rank will never say it gives up as soon as that rank is known to be dead."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._folder = folder

    def put(self, key: str, value: bytes) -> None:
        path = self._path(key)
        assert not path.exists(), f"'{key}' is set twice"
        Path(f"{path}.new").write_bytes(value)
        Path(f"{path}.new").rename(path)

    def get(self, key: str, timeout_seconds: float) -> bytes:
        deadline = time.monotonic() + timeout_seconds
        speaker = int(key.rsplit("/", 1)[1]) if "/report/" in key else 0
        while True:
            is_over = (self._folder / f"dead-{speaker}").exists() or time.monotonic() >= deadline
            with contextlib.suppress(FileNotFoundError):
                return self._path(key).read_bytes()
            if is_over:
                raise TimeoutError(key)
            time.sleep(_POLL_SECONDS)

    def forget(self, key: str) -> None:
        self._path(key).write_bytes(b"")

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


class Ranks:
    """The processes of one save to one target."""

    def __init__(self, folder: Path, target: Path, world_size: int, **options: Any) -> None:
        _start_server()
        folder.mkdir()
        self._folder = folder
        self._processes: list[BaseProcess] = [
            _PROCESSES.Process(target=save_in_this_process, args=(folder, target, rank, world_size, options)) for rank in range(world_size)
        ]
        for process in self._processes:
            process.start()

    def wait_until_they_begin(self) -> None:
        """Return when all processes are there, just before they save."""
        while not all((self._folder / f"began-{rank}").exists() for rank in range(len(self._processes))):
            time.sleep(_POLL_SECONDS)

    def kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # It is done already.
            os.kill(self._processes[rank].pid or 0, signal.SIGKILL)

    def results(self) -> list[str]:
        """Return, for each rank, ``"saved"``, the text of the error that it raised, or ``"killed"``."""
        waiting = dict(enumerate(self._processes))
        deadline = time.monotonic() + LONG
        while waiting:
            assert time.monotonic() < deadline, "a rank hangs"
            for rank, process in list(waiting.items()):
                process.join(_POLL_SECONDS)
                if process.exitcode is not None:
                    (self._folder / f"dead-{rank}").touch()
                    del waiting[rank]
        return [self._result(rank) for rank in range(len(self._processes))]

    @property
    def struck(self) -> bool:
        """Whether the fault came to pass."""
        return (self._folder / "struck").exists()

    def _result(self, rank: int) -> str:
        path = self._folder / f"result-{rank}"
        if self._processes[rank].exitcode == -signal.SIGKILL:
            return "killed"
        return path.read_text()


def save_in_this_process(folder: Path, target: Path, rank: int, world_size: int, options: dict[str, Any]) -> None:
    """What the process of one rank does."""
    (folder / f"began-{rank}").touch()
    fault: Fault | None = options.pop("fault", None)
    result_path = folder / f"result-{rank}"
    largest_file: int | None = options.pop("largest_file", None)
    if largest_file is not None and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if fault is not None and fault.rank in (rank, -1):
        inject(fault, folder)
    try:
        save_step(target, FolderRendezvous(folder, rank, world_size), **options)
        text = "saved"
    except Exception as error:  # noqa: BLE001 - the test looks at it
        text = f"{type(error).__name__}: {error}"
    for name, real in _REAL.items():
        setattr(os, name, real)
    result_path.write_text(text)


_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in OPERATIONS}


def inject(fault: Fault, folder: Path) -> None:
    """Let this process's operations on files fail, or kill it, as ``fault`` says."""
    count = 0

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            strikes = count == fault.nth + 1 or (fault.lasting and count > fault.nth)
            if strikes:
                open(folder / "struck", "w").close()
            if strikes and fault.error is not None:
                raise OSError(fault.error, os.strerror(fault.error))
            result = real(*args, **kwargs)
            if strikes:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in fault.operations:
        setattr(os, name, wrap(_REAL[name]))


def save_step(target: Path, ranks: FolderRendezvous, *, step: int, elements: int = 1000, overwrite: bool = False, nbytes: int = 0) -> None:
    """Save a weight of which all elements are the step's number, cut over the ranks, and a scalar on each rank."""
    start, stop = elements * ranks.rank // ranks.world_size, elements * (ranks.rank + 1) // ranks.world_size
    weight = Piece("w", "float32", (elements,), (0,), (elements,), Range(start, stop))
    values = np.full(stop - start, step, np.float32)
    scalar = np.array([step], np.int64)

    def write_files(staging: Path) -> FileRecord:
        held = [(weight, values.data.cast("B")), (Piece("n", "int64", (1,), (0,), (1,)), scalar.data.cast("B"))]
        return write_rank_file(staging / rank_file_name(ranks.rank), held)

    def build_manifest(records: Sequence[FileRecord]) -> Manifest:
        return Manifest(step, len(records), utc_now(), {"paddle": "3.3.1"}, [], None, tuple(records))

    def add_file_for_paddle(staging: Path, records: Sequence[FileRecord]) -> None:
        (staging / PADDLE_METADATA_NAME).write_bytes(b"for stock Paddle")

    commit_checkpoint(
        target,
        ranks,
        write_files=write_files,
        build_manifest=build_manifest,
        nbytes=nbytes,
        token="save",
        before_manifest=add_file_for_paddle,
        overwrite=overwrite,
        timeout_seconds=LONG,
    )


def step_at(target: Path) -> int | None:
    """Return the step of the checkpoint at ``target``, which must be whole in every byte, or None where there is none.

    Where a killed save left an old one renamed aside, it is given its name back, as the error says.
    """
    try:
        manifest = read_manifest(target)
    except IncompleteCheckpointError as error:
        says_how = "mv '" in str(error)
        if heal_target(target) != says_how:
            raise
        if not target.exists() or not any(target.iterdir()):
            return None
        manifest = read_manifest(target)
    report = verify(target, workers=1)
    assert report.is_good, str(report)
    return manifest.step
