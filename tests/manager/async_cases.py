"""What runs on the ranks to save in the background."""

from __future__ import annotations

import os
import signal
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
import paddle.distributed as dist
import pytest
from harness import this_rank
from manager_runs import build, train_step
from paddle import nn
from paddle.base import core

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager
from paddle_fsdp_ckpt.host_memory import bytes_of, copy_bytes
from paddle_fsdp_ckpt.storage import direct


def save_async_and_change(root: str, path: str) -> tuple[bool, list[float]]:
    """Save in the background, and change everything in place the moment the call returns; a plain save before says what is right."""
    model, optimizer = build(seed=3)
    for _ in range(2):
        train_step(model, optimizer)
    ckpt.save(path, model=model, optimizer=optimizer, step=10)
    # So little would go through the system's cache.
    with mock.patch.object(direct, "_LEAST_NBYTES", 0), CheckpointManager(root, async_save=True) as checkpoints:
        checkpoints.save(10, model=model, optimizer=optimizer)
        with paddle.no_grad():
            for parts in (ckpt.sharded_state_dict(model), ckpt.optimizer_sharded_state_dict(optimizer)):
                for weight in parts.values():
                    weight.local_tensor.fill_(123.0)
        before = checkpoints.latest_step()
        checkpoints.wait()
        return before is None, [float(checkpoints.latest_step() or 0)]


def save_often(root: str, when_busy: str, count: int) -> tuple[list[int], int, int]:
    """Save again and again in the background; return what was kept, refused, and the size of the buffer in bytes."""
    model, optimizer = build(seed=3)
    refused = 0
    sizes = set()
    with CheckpointManager(root, async_save=True, when_busy=when_busy, max_to_keep=2) as checkpoints:
        for step in range(1, count + 1):
            try:
                checkpoints.save(step, model=model, optimizer=optimizer)
            except ckpt.CheckpointError as error:
                if "still being written" not in str(error):
                    raise
                refused += 1
            sizes.add(checkpoints._saves.buffer.nbytes)
        checkpoints.wait()
        steps = checkpoints.all_steps()
    assert len(sizes) == 1
    return steps, refused, sizes.pop()


def copy_again(root: str) -> tuple[int, int, int, bool]:
    """By how much memory grew at most during a second save in the background: as the system has it, as Paddle and as Python have it.

    And whether the copy's bytes are right where Paddle copies them, as it does for tensors on a device.
    """
    model = nn.Linear(2048, 1024)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.init_optimizer_state(optimizer)
    with CheckpointManager(root, async_save=True, max_to_keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, model=model, optimizer=optimizer)
            checkpoints.wait()
        Path("/proc/self/clear_refs").write_text("5")
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before, allocated = _status("VmHWM"), core.host_memory_stat_current_value("Allocated", 0)
        tracemalloc.start()
        checkpoints.save(3, model=model, optimizer=optimizer)
        checkpoints.wait()
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        grown = _status("VmHWM") - before, core.host_memory_stat_peak_value("Allocated", 0) - allocated, traced
    block = paddle.zeros([64], dtype="uint8")
    right = bytearray(64)
    flat = paddle.arange(6).astype("bfloat16")
    for start, tensor in enumerate([flat.reshape([2, 3]), paddle.to_tensor([True]), paddle.zeros([0]), flat._slice(2, 6)]):
        copy_bytes(tensor, block, 16 * start)
        right[16 * start : 16 * start + len(bytes_of(tensor))] = bytes_of(tensor)
    return *grown, block.numpy().tobytes() == bytes(right)


def _status(field: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) << 10


def fail_in_background(root: str, call: str) -> tuple[str, list[int]]:
    """A save whose target can't be made: the error comes at the next call, once."""
    model, optimizer = build(seed=3)
    checkpoints = CheckpointManager(root, async_save=True)
    if this_rank().rank == 0:
        Path(root).mkdir()
        (Path(root) / "step_00000001").write_text("a file where the step should be")
    dist.barrier()
    checkpoints.save(1, model=model, optimizer=optimizer)
    try:
        getattr(checkpoints, call)(**({"model": model} if call == "restore" else {}))
    except ckpt.CheckpointError as error:
        text = str(error)
    else:
        raise AssertionError("it did not raise")
    checkpoints.close()
    return text, checkpoints.all_steps()


def same_values(path: str, other: str) -> bool:
    """Load two checkpoints, and compare all that this rank keeps, bit for bit."""
    kept = []
    for one in (path, other):
        model, optimizer = build(seed=8)
        ckpt.load(one, model=model, optimizer=optimizer)
        parts = {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(optimizer)}
        kept.append({key: weight.local_tensor.numpy().tobytes() for key, weight in parts.items()})
    return kept[0] == kept[1] and len(kept[0]) > 4


def save_while_held_up(root: str) -> tuple[str, list[int]]:
    """Save while the one before can't go on, because its hook waits; the hook is rank 0's alone."""
    go_on = threading.Event()
    model, optimizer = build()
    checkpoints = CheckpointManager(root, async_save=True, when_busy="refuse", on_event=lambda _: go_on.wait(20))
    checkpoints.save(1, model=model, optimizer=optimizer)
    try:
        checkpoints.save(2, model=model, optimizer=optimizer)
    except ckpt.CheckpointError as error:
        kind = type(error).__name__
    go_on.set()
    checkpoints.close()
    return kind, checkpoints.all_steps()


def die_in_background(root: str, dying: int) -> tuple[str, str, float]:
    """One rank is killed while it writes in the background: what the others hear at wait(), and how long it took."""
    from paddle_fsdp_ckpt import saving as module

    model, optimizer = build()
    checkpoints = CheckpointManager(root, async_save=True, timeout_seconds=1.0)
    if this_rank().rank == dying:
        module.write_image = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(1, model=model, optimizer=optimizer)
    started = time.monotonic()
    try:
        checkpoints.wait()
    except ckpt.CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("it did not raise")


def fail_once_in_background(root: str, failing: int, what: str) -> tuple[str, list[int], list[int], float]:
    """One rank can't copy, or write, one save in the background: all hear of it at the next call, and the save after succeeds."""
    from paddle_fsdp_ckpt import saving as module

    model, optimizer = build()
    patch = pytest.MonkeyPatch()

    def write(path: Path, *_: Any) -> Any:
        raise OSError(28, "No space left on device", str(path))

    def copy(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 80.0 GiB")

    with CheckpointManager(root, async_save=True) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        checkpoints.wait()
        if this_rank().rank == failing:
            patch.setattr(*((module, "write_image", write) if what == "write" else (checkpoints._saves.buffer, "copy", copy)))
        started = time.monotonic()
        checkpoints.save(2, model=model, optimizer=optimizer)
        try:
            checkpoints.save(3, model=model, optimizer=optimizer)
        except ckpt.CheckpointError as error:
            text = str(error)
        finally:
            patch.undo()
        seconds = time.monotonic() - started
        steps = checkpoints.all_steps()
        checkpoints.save(3, model=model, optimizer=optimizer)
        checkpoints.wait()
        return text, steps, checkpoints.all_steps(), seconds
