"""What runs on ranks of a real job: saves that fail or die half way, and loads of damaged checkpoints."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import saving
from paddle_fsdp_ckpt.host_memory import bytes_of

SHORT = 4.0
"""Seconds; how long ranks wait for one that is dead."""


class Training:
    """A small model on this rank, and its optimizer."""

    def __init__(self, width: int = 6) -> None:
        paddle.seed(7)
        self.model = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 1))
        self.optimizer = paddle.optimizer.AdamW(0.1, parameters=self.model.parameters())
        ckpt.fully_shard(self.model, optimizer=self.optimizer)

    def step(self) -> float:
        loss = (self.model(paddle.ones([3, 4])) - 1.0).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return float(loss)

    def save(self, path: str, **options: Any) -> None:
        ckpt.save(path, model=self.model, optimizer=self.optimizer, **options)

    def load(self, path: str, **options: Any) -> Any:
        return ckpt.load(path, model=self.model, optimizer=self.optimizer, **options)

    def values(self) -> list[bytes]:
        """Return the bytes of all that this rank keeps."""
        weights = {**ckpt.sharded_state_dict(self.model), **ckpt.optimizer_sharded_state_dict(self.optimizer)}
        return [bytes(bytes_of(weights[key].local_tensor)) for key in sorted(weights)]


def save_trained(path: str, steps: int = 2) -> None:
    training = Training()
    for _ in range(steps):
        training.step()
    training.save(path, step=steps)


def with_write(write: Callable[..., Any], call: Callable[[], Any]) -> Any:
    """Call ``call`` while ``write`` stands in for what writes this rank's file."""
    real = saving.write_rank_file
    saving.write_rank_file = write
    try:
        return call()
    finally:
        saving.write_rank_file = real


def die_while_saving(path: str, victim: int) -> tuple[str, float]:
    """Return the error of a save in which one rank dies, and how many seconds it took."""
    training = Training()
    training.step()
    training.save(path, step=1)
    real = saving.write_rank_file

    def write(file: Path, *what: Any) -> Any:
        if dist.get_rank() == victim:
            # Half of a file is there by then.
            file.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(file, *what)

    training.step()
    threads = threading.active_count()
    text = "saved"
    start = time.monotonic()
    try:
        with_write(write, lambda: training.save(path, step=2, overwrite=True, timeout_seconds=SHORT))
    except ckpt.RankFailedError as error:
        text = str(error)
    assert threading.active_count() == threads
    return text, time.monotonic() - start


def fail_and_go_on(path: str, failing: int) -> tuple[str, list[float], list[float]]:
    """Return the error of a save that fails on one rank, the losses of a training that goes on after it, and of one without any save."""
    alone = Training()
    without = [alone.step() for _ in range(4)]
    training = Training()
    losses = [training.step(), training.step()]
    real = saving.write_rank_file

    def write(file: Path, *what: Any) -> Any:
        if dist.get_rank() == failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        return real(file, *what)

    text = "saved"
    try:
        with_write(write, lambda: training.save(path, step=2))
    except ckpt.RankFailedError as error:
        text = str(error)
    losses += [training.step(), training.step()]
    training.save(path, step=4)
    return text, losses, without


def load_damaged(path: str, verify_first: bool) -> tuple[str, str, bool]:
    """Return the kind and text of the error of a load, and whether anything changed."""
    training = Training()
    training.step()
    before = training.values()
    try:
        training.load(path, verify_first=verify_first)
    except ckpt.CheckpointError as error:
        return type(error).__name__, str(error), training.values() != before
    return "", "", training.values() != before


def load_into_another_model(path: str) -> tuple[str, str, bool]:
    training = Training(width=5)
    training.step()
    before = training.values()
    try:
        training.load(path)
    except ckpt.CheckpointError as error:
        return type(error).__name__, str(error), training.values() != before
    return "", "", training.values() != before


def resume(path: str) -> tuple[int, float]:
    """Return the step of a checkpoint, and the loss of the next one."""
    training = Training()
    report = training.load(path)
    return report.step, training.step()


def reference_loss() -> float:
    """Return the third loss of the model without this package, on one process, computed by Paddle alone."""
    paddle.seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1))
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    losses = []
    for _ in range(3):
        loss = (model(paddle.ones([3, 4])) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return float(np.float32(losses[-1]))


def save_with_stock_paddle(path: str, safetensors: bool) -> None:
    """Save our sharded state dicts with Paddle's own function."""
    training = Training()
    training.step()
    weights = {**ckpt.sharded_state_dict(training.model), **ckpt.optimizer_sharded_state_dict(training.optimizer)}
    dist.save_state_dict(weights, path, safetensors=safetensors)
