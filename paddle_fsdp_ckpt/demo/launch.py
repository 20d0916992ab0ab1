"""Starting the ranks of a job as processes of their own, following them, and leaving none behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .job import Event, EventReader, Job

_WORKER = [sys.executable, "-m", f"{__package__}.worker"]
_POLL_SECONDS = 0.05
_SILENCE_SECONDS = 120.0
_GRACE_SECONDS = 5.0
_SHOWN_LOG_LINES = 40


class JobFailedError(Exception):
    """A rank of a job failed, or all of them fell silent; the message holds the log's end."""


def run(job: Job, on_event: Callable[[Event], None]) -> None:
    """Run a job in fresh processes, and call ``on_event`` for each event of its rank 0.

    Whatever ends this call, no process of the job outlives it; they also end when this process is killed.

    Raises:
        JobFailedError: a rank failed, or nothing happened for two minutes.
    """
    with _started(job) as processes:
        reader = EventReader(job.events())
        try:
            _follow(job, processes, reader, on_event)
        finally:
            reader.close()


def _follow(job: Job, processes: list[subprocess.Popen[bytes]], reader: EventReader, on_event: Callable[[Event], None]) -> None:
    heard = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        for event in reader.new():
            heard = time.monotonic()
            on_event(event)
        if any(codes):
            raise JobFailedError(_describe_failure(job, _last_codes(processes)))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() - heard > _SILENCE_SECONDS:
            raise JobFailedError(f"{job.title}: nothing happened for {_SILENCE_SECONDS:.0f} s; rank 0 said last:\n{_log_end(job.log(0))}")
        time.sleep(_POLL_SECONDS)


def _last_codes(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit codes once all have ended, or after some seconds: the rank whose failure the others heard of may end last."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return codes


def _describe_failure(job: Job, codes: list[int | None]) -> str:
    return "\n".join(
        f"{job.title}: rank {rank} ended with status {code}:\n{_log_end(job.log(rank))}" for rank, code in enumerate(codes) if code
    )


@contextmanager
def _started(job: Job) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [*_WORKER, str(job.write())]
    endpoints = _free_endpoints(job.world_size + 1)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(job.world_size):
            with job.log(rank).open("wb") as log:
                environment = _environment(rank, endpoints[0], endpoints[1:])
                # Nothing is ever written to stdin: its end tells the rank that this process is gone.
                processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT))
        yield processes
    finally:
        _stop(processes)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _environment(rank: int, master: str, endpoints: list[str]) -> dict[str, str]:
    """Return a rank's environment: one thread, gloo, and what Paddle's launcher would set; a single rank gets none of the latter."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "MASTER_"))}
    environment["OMP_NUM_THREADS"] = "1"
    if len(endpoints) > 1:
        environment |= {
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(len(endpoints)),
            "PADDLE_MASTER": master,
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        }
    return environment


def _free_endpoints(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _log_end(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-_SHOWN_LOG_LINES:])
