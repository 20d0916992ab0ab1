"""The process of one rank: joins the job, then runs what it is sent until the other side hangs up."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import paddle
import paddle.distributed

from . import rank as rank_module
from .messages import CHECK, Job, Outcome, RankError

_STORE_PATIENCE_SECONDS = 60.0
_THREAD_PATIENCE_SECONDS = 1.0
_LONGEST_LOCAL = 300


class LeftoverThreadError(Exception):
    """The function returned and left a thread running that would keep a process from ending."""


def main(connection: Connection, rank: int, world_size: int, initialise: bool) -> None:
    """Serve jobs until the connection closes."""
    _die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if initialise:
        _wait_for_store(rank)
        paddle.distributed.init_parallel_env()
    gc.collect()
    gc.freeze()
    connection.send("ready")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            break
        outcome = _check(rank, world_size) if job == CHECK else _run_clean(job, rank, world_size)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(_pickled(outcome))
    # Paddle's store and gloo threads may abort in an orderly exit, when a peer is gone already.
    os._exit(0)


def _wait_for_store(rank: int) -> None:
    """Wait until rank 0 listens: Paddle's store, once refused, tries again only after seconds."""
    host, port = os.environ["PADDLE_MASTER"].split(":")
    deadline = time.monotonic() + _STORE_PATIENCE_SECONDS
    while rank > 0 and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.01)


def _run_clean(job: Job, rank: int, world_size: int) -> Outcome:
    environment, directory, threads = dict(os.environ), os.getcwd(), set(threading.enumerate())
    scratch = Path(tempfile.mkdtemp(prefix=f"rank{rank}-"))
    rank_module.enter(rank_module.ThisRank(rank, world_size, scratch))
    _reset_paddle()
    try:
        outcome = _run(job)
        gc.collect()
        return outcome if outcome.error else _no_threads_left(outcome, threads)
    finally:
        rank_module.enter(None)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(scratch, ignore_errors=True)


def _reset_paddle() -> None:
    paddle.disable_static()
    paddle.set_default_dtype("float32")
    paddle.set_grad_enabled(True)
    paddle.utils.unique_name.switch()
    paddle.seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _run(job: Job) -> Outcome:
    try:
        sys.path[:] = [*job.import_path, *(entry for entry in sys.path if entry not in job.import_path)]
        function: Any = functools.reduce(getattr, job.function.split("."), importlib.import_module(job.module))
        return Outcome(value=function(*pickle.loads(job.args)))
    except BaseException as error:  # noqa: BLE001 - SystemExit and pytest's outcomes too: each must reach the test
        return Outcome(error=_describe(error))


def _no_threads_left(outcome: Outcome, before: set[threading.Thread]) -> Outcome:
    deadline = time.monotonic() + _THREAD_PATIENCE_SECONDS
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in left if thread.is_alive()]
    if not names:
        return outcome
    return Outcome(error=_describe(LeftoverThreadError(f"left running: {', '.join(names)}")))


def _check(rank: int, world_size: int) -> Outcome:
    """Reduce a number: wrong or stuck where an earlier run left one rank in another collective than the others."""
    try:
        if world_size > 1:
            number = paddle.to_tensor([rank + 1.0, 7919.0])
            paddle.distributed.all_reduce(number)
            expected = [world_size * (world_size + 1) / 2, 7919.0 * world_size]
            if number.tolist() != expected:
                raise RuntimeError(f"ranks are out of step: {number.tolist()} is not {expected}")
        return Outcome()
    except BaseException as error:  # noqa: BLE001 - whatever it is, these ranks can't be used again
        return Outcome(error=_describe(error))


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        kind = type(outcome.value).__name__
        return pickle.dumps(Outcome(error=_describe(TypeError(f"the result, of type {kind}, can't be pickled: {error}"))))


def _describe(error: BaseException) -> RankError:
    text = "".join(traceback.format_exception(error)) + _plain_locals(error)
    traceback.clear_frames(error.__traceback__)
    bases = tuple(base.__name__ for base in type(error).__mro__)
    return RankError(type(error).__name__, str(error), bases, text)


def _plain_locals(error: BaseException) -> str:
    """Local variables of the last frame in our code. Plain data only: the repr of a tensor without memory could end the process."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return ""
    ours = [frame for frame in frames if "site-packages" not in frame.f_code.co_filename]
    lines = []
    for name, value in (ours or frames)[-1].f_locals.items():
        if isinstance(value, paddle.Tensor):
            lines.append(f"    {name}: Tensor {value.dtype} {value.shape}\n")
        elif _is_plain(value):
            lines.append(f"    {name} = {repr(value)[:_LONGEST_LOCAL]}\n")
    return f"Local variables:\n{''.join(lines)}" if lines else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str | bytes | slice | range | Path | numpy.ndarray | numpy.generic)


def _die_with_parent() -> None:
    """Have the kernel end this process with the tests' one: a rank stuck in a collective reads no pipe."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    descriptor, own_rank, ranks, join = (int(argument) for argument in sys.argv[1:])
    os.set_inheritable(descriptor, False)
    main(Connection(descriptor), own_rank, ranks, bool(join))
