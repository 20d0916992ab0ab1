"""The tests' side: starts the ranks of a job, sends them functions, and tells what became of each."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from .messages import CHECK, Job, Outcome, RankError

START_SECONDS = 120.0
CHECK_SECONDS = 10.0
GRACE_SECONDS = 5.0
"""How long the other ranks may still run after the first one failed."""

_POLL_SECONDS = 0.2
_STACK_SECONDS = 0.5
_LONGEST_LOG = 12_000
_FOREIGN_VARIABLES = ("PADDLE_", "MASTER_", "FLAGS_selected", "RANK", "WORLD_SIZE")
_WORKER = f"{__package__}.worker"


class RanksFailed(AssertionError):
    """At least one rank raised, died or gave no answer in time; the message holds every rank's traceback, stack and log."""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path
    log_start: int = 0

    def log_text(self) -> str:
        """What the rank printed since the run began, its end only where that is long."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            text = file.read().decode(errors="replace").rstrip()
        return text if len(text) <= _LONGEST_LOG else f"[...]{text[-_LONGEST_LOG:]}"


class RankPool:
    """The ranks of one job. Starts them at the first run, and anew after a run that left them unusable.

    Args:
        world_size: how many ranks.
        initialised: whether the ranks call ``init_parallel_env`` under the environment that ``paddle.distributed.launch`` sets. With
            one rank Paddle then makes no process group either; without, not even the environment is set.
    """

    def __init__(self, world_size: int, *, initialised: bool = True) -> None:
        if not initialised and world_size != 1:
            raise ValueError("ranks outside a job know nothing of each other: world_size must be 1")
        self.world_size = world_size
        self._initialised = initialised
        self._workers: list[_Worker] = []
        self._directory: Path | None = None
        self._suspect = False

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call ``function(*args)`` on every rank and return what each returned, in order of rank.

        Args:
            function: a module-level function; sent by name, so it must be importable.
            *args: pickled; the same on all ranks (a function finds its rank with ``this_rank()``).
            timeout: seconds for the run, starting the ranks not counted.

        Raises:
            RanksFailed: a rank raised, died or was too slow.
        """
        __tracebackhide__ = True
        outcomes = self.outcomes(function, *args, timeout=timeout)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed(self._report(function, "failed", dict(enumerate(outcomes))))
        return [outcome.value for outcome in outcomes]

    def errors(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, grace: float = GRACE_SECONDS) -> list[RankError]:
        """Call a function that must raise on every rank, and return what each raised.

        Raises:
            RanksFailed: a rank returned, died or was too slow.
        """
        __tracebackhide__ = True
        outcomes = self.outcomes(function, *args, timeout=timeout, grace=grace)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if len(errors) != self.world_size:
            raise RanksFailed(self._report(function, "did not raise on every rank", dict(enumerate(outcomes))))
        return errors

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        grace: float = GRACE_SECONDS,
        may_die: Sequence[int] = (),
    ) -> list[Outcome]:
        """Call ``function(*args)`` on every rank and return how it ended on each, whatever that is.

        Args:
            function: a module-level function.
            *args: pickled.
            timeout: seconds for the run, starting the ranks not counted.
            grace: once a rank has raised, or died without being allowed to, the others get this many seconds more.
            may_die: ranks whose process may end during the run. Ranks are started anew afterwards, if one did.

        Raises:
            RanksFailed: a rank gave no answer in time, or died and may not.
        """
        __tracebackhide__ = True
        job = _job(function, args)
        self._make_ready()
        for worker in self._workers:
            worker.log_start = worker.log.stat().st_size
        outcomes = self._send_and_wait(job, timeout, grace, may_die)
        silent = [rank for rank in range(self.world_size) if rank not in outcomes]
        dead = [rank for rank, outcome in outcomes.items() if outcome.exit_code is not None]
        if silent or not set(dead) <= set(may_die):
            what = f"no answer from rank {', '.join(map(str, silent))} within {timeout:g} s" if silent else "a rank died"
            if silent and any(not outcome.ok for outcome in outcomes.values()):
                what = f"no answer from rank {', '.join(map(str, silent))} within {grace:g} s of another rank's failure"
            text = self._report(function, what, outcomes)
            self.close()
            raise RanksFailed(text)
        self._suspect = any(not outcome.ok for outcome in outcomes.values())
        if dead:
            self.close()
        return [outcomes[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End all ranks at once; the next run starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.connection.close()
        self._workers = []
        self._suspect = False
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make_ready(self) -> None:
        """Start the ranks where there are none, or none that can be relied on."""
        if self._suspect:
            outcomes = self._send_and_wait(CHECK, CHECK_SECONDS, 0.0, ())
            if len(outcomes) < self.world_size or not all(outcome.ok for outcome in outcomes.values()):
                self.close()
            self._suspect = False
        if any(worker.process.poll() is not None for worker in self._workers):
            self.close()
        if not self._workers:
            try:
                self._start()
            except RanksFailed:  # another process may have taken a port meanwhile
                self._start()

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        environments = _environments(self.world_size) if self._initialised else [_clean_environment()]
        for rank, environment in enumerate(environments):
            ours, theirs = Pipe()
            log = self._directory / f"rank{rank}.log"
            command = [sys.executable, "-m", _WORKER]
            command += [str(theirs.fileno()), str(rank), str(self.world_size), str(int(self._initialised))]
            with log.open("ab") as output, theirs:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                )
            self._workers.append(_Worker(rank, process, ours, log))
        outcomes = self._wait(START_SECONDS, 0.0, ())
        if len(outcomes) < self.world_size or not all(outcome.ok for outcome in outcomes.values()):
            text = self._report(None, "the ranks did not start", outcomes)
            self.close()
            raise RanksFailed(text)

    def _send_and_wait(self, message: Job | str, timeout: float, grace: float, may_die: Sequence[int]) -> dict[int, Outcome]:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it is dead; _wait will see that
                worker.connection.send(message)
        return self._wait(timeout, grace, may_die)

    def _wait(self, timeout: float, grace: float, may_die: Sequence[int]) -> dict[int, Outcome]:
        """Collect an answer of every rank; those that gave none in time are not in the result, and have logged their stack."""
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            waiting = [worker for worker in self._workers if worker.rank not in outcomes]
            wait([worker.connection for worker in waiting], min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            for worker in waiting:
                outcome = _answer(worker)
                if outcome is None:
                    continue
                outcomes[worker.rank] = outcome
                if outcome.error is not None or (outcome.exit_code is not None and worker.rank not in may_die):
                    deadline = min(deadline, time.monotonic() + grace)
        silent = [worker for worker in self._workers if worker.rank not in outcomes]
        for worker in silent:
            worker.process.send_signal(signal.SIGUSR1)
        if silent:
            time.sleep(_STACK_SECONDS)
        return outcomes

    def _report(self, function: Callable[..., Any] | None, what: str, outcomes: dict[int, Outcome]) -> str:
        name = f"{function.__module__}.{function.__qualname__}" if function else "start"
        lines = [f"{name} on {self.world_size} rank{'s' * (self.world_size > 1)}: {what}"]
        for worker in self._workers:
            outcome = outcomes.get(worker.rank)
            lines += ["", f"===== rank {worker.rank}: {outcome or 'no answer; its stack is at the end of its log'}"]
            if outcome is not None and outcome.error is not None:
                lines.append(outcome.error.traceback.rstrip())
            lines.append(f"----- log of rank {worker.rank}\n{worker.log_text() or '(empty)'}")
        return "\n".join(lines)


class RankPools:
    """One pool a world size, each started at its first run; closes them all at the end."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], RankPool] = {}

    def pool(self, world_size: int, *, initialised: bool = True) -> RankPool:
        """Return the pool of that many ranks."""
        key = (world_size, initialised)
        if key not in self._pools:
            self._pools[key] = RankPool(world_size, initialised=initialised)
        return self._pools[key]

    def close(self) -> None:
        """End the ranks of all pools."""
        for pool in self._pools.values():
            pool.close()


def _job(function: Callable[..., Any], args: tuple[Any, ...]) -> Job:
    if "<" in function.__qualname__ or function.__module__ == "__main__":
        raise ValueError(f"{function.__qualname__} can't be sent to a rank: it must be a module-level function")
    return Job(function.__module__, function.__qualname__, pickle.dumps(args), tuple(sys.path))


def _answer(worker: _Worker) -> Outcome | None:
    """Return what the worker sent, or that it is dead, or None while it works."""
    try:
        if worker.connection.poll():
            message = worker.connection.recv()
            return message if isinstance(message, Outcome) else Outcome()
    except (EOFError, OSError):
        return Outcome(exit_code=worker.process.wait())
    # A process that a test started may hold the dead rank's end of the pipe open: ask for the status too.
    exit_code = worker.process.poll()
    if exit_code is None or worker.connection.poll():
        return None
    return Outcome(exit_code=exit_code)


def _clean_environment() -> dict[str, str]:
    """This process's environment without any trace of a distributed job."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN_VARIABLES)}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "PYTHONUNBUFFERED": "1",
    }
    return environment


def _environments(world_size: int) -> list[dict[str, str]]:
    """The environment of each rank, as ``paddle.distributed.launch`` sets it for one node on CPU."""
    ports = _free_ports(world_size + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    common = _clean_environment() | {
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_GLOBAL_SIZE": str(world_size),
        "PADDLE_LOCAL_SIZE": str(world_size),
        "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
        "PADDLE_NNODES": "1",
        "PADDLE_TRAINERS_NUM": str(world_size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }
    return [
        common
        | {
            "PADDLE_CURRENT_ENDPOINT": endpoint,
            "PADDLE_GLOBAL_RANK": str(rank),
            "PADDLE_LOCAL_RANK": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_TRAINER_ID": str(rank),
        }
        for rank, endpoint in enumerate(endpoints)
    ]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
