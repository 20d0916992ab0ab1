"""Groups of processes that stay alive between measurements, so that contenders can take turns: each is a job of its own framework."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe
from typing import Any

_IS_READY = "ready"  # to begin what is measured
_FOREIGN_VARIABLES = ("PADDLE_", "MASTER_", "FLAGS_selected", "RANK", "WORLD_SIZE")


class Group:
    """The ranks of one job. Each has one thread for computing, whatever the framework.

    Args:
        framework: "paddle" or "torch".
        world_size: how many ranks.
        environment: variables that they get besides.
    """

    def __init__(self, framework: str, world_size: int, environment: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self._members: list[tuple[subprocess.Popen[bytes], Connection]] = []
        for own in _environments(framework, world_size):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "benchmarks.group", str(theirs.fileno()), framework, str(world_size)]
            with theirs:
                process = subprocess.Popen(
                    command,
                    env=own | dict(environment or {}),
                    pass_fds=[theirs.fileno()],
                    stdout=subprocess.DEVNULL,
                    stderr=None if os.environ.get("BENCHMARKS_VERBOSE") else subprocess.DEVNULL,
                )
            self._members.append((process, ours))
        self._is_ready = False

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a module-level function on every rank at once, and return what each returned. The first call waits for the job to begin.

        Raises:
            RuntimeError: a rank raised or died.
        """
        if not self._is_ready:
            self._answers()
            self._is_ready = True
        self._tell((function.__module__, function.__name__, args))
        answers = self._answers()
        if _IS_READY in answers:
            self._tell(None)
            answers = self._answers()
        return answers

    def close(self) -> None:
        """End all ranks."""
        for process, _ in self._members:
            process.kill()
        for process, connection in self._members:
            process.wait()
            connection.close()
        self._members = []

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, what: object) -> None:
        for _, connection in self._members:
            connection.send(what)

    def _answers(self) -> list[Any]:
        answers = []
        for rank, (process, connection) in enumerate(self._members):
            try:
                is_good, answer = connection.recv()
            except EOFError:
                status = process.wait()
                self.close()
                raise RuntimeError(f"rank {rank} ended with status {status}") from None
            if not is_good:
                self.close()
                raise RuntimeError(f"rank {rank} failed:\n{answer}")
            answers.append(answer)
        return answers


def _environments(framework: str, world_size: int) -> list[dict[str, str]]:
    common = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_VARIABLES)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(entry for entry in [os.getcwd(), *sys.path] if entry)}
    ports = _free_ports(world_size + 1)
    if framework == "torch":
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "WORLD_SIZE": str(world_size)}
        return [common | {"RANK": str(rank)} for rank in range(world_size)]
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    common |= {
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_GLOBAL_SIZE": str(world_size),
        "PADDLE_LOCAL_SIZE": str(world_size),
        "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
        "PADDLE_NNODES": "1",
        "PADDLE_TRAINERS_NUM": str(world_size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }
    names = ("PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK", "PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE")
    return [common | {"PADDLE_CURRENT_ENDPOINT": endpoint} | dict.fromkeys(names, str(rank)) for rank, endpoint in enumerate(endpoints)]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _serve(connection: Connection, framework: str, world_size: int) -> None:
    """Join the job, and do what is asked until the other side hangs up."""
    _die_with_parent()

    def wait_for_others() -> None:
        connection.send((True, _IS_READY))
        connection.recv()

    importlib.import_module("benchmarks.measure").wait_for_others = wait_for_others
    try:
        _join(framework, world_size)
        connection.send((True, None))
        while True:
            module, name, args = connection.recv()
            try:
                connection.send((True, getattr(importlib.import_module(module), name)(*args)))
            except Exception:  # noqa: BLE001 - whatever it is, the other side must hear of it
                connection.send((False, traceback.format_exc()))
    except EOFError:
        pass
    except Exception:  # noqa: BLE001 - the same
        connection.send((False, traceback.format_exc()))
    # Threads of stores and gloo may abort in an orderly exit, when a peer is gone already.
    os._exit(0)


def _die_with_parent() -> None:
    """Have the kernel end this process with the one that asks: who is busy reads no pipe."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _join(framework: str, world_size: int) -> None:
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        return
    import paddle

    if world_size > 1:
        paddle.distributed.init_parallel_env()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
