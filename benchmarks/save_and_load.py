"""Time ``save`` and ``load`` against a plain write and read of the same bytes, on as many ranks as the job has."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_fsdp_ckpt as ckpt


def main() -> None:
    """Run the benchmark and print its table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24, help="linear layers of the model")
    parser.add_argument("--width", type=int, default=1024, help="inputs and outputs of each")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; by default a temporary directory")
    options = parser.parse_args()
    if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
        dist.init_parallel_env()
    model = paddle.nn.Sequential(*[paddle.nn.Linear(options.width, options.width) for _ in range(options.layers)])
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.init_optimizer_state(optimizer)
    root = _shared_directory(options.directory)
    try:
        _report(_measure(root, model, optimizer, options.runs))
    finally:
        _barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root)


def _measure(root: Path, model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer, runs: int) -> dict[str, list[float]]:
    checkpoint, plain = root / "checkpoint", root / f"plain-{dist.get_rank()}"
    seconds: dict[str, list[float]] = {}
    ckpt.save(checkpoint, model=model, optimizer=optimizer)
    data = np.zeros((checkpoint / f"{dist.get_rank()}_0.safetensors").stat().st_size, np.uint8)
    for _ in range(runs):
        _timed(seconds, "save", lambda: ckpt.save(checkpoint, model=model, optimizer=optimizer, overwrite=True))
        _timed(seconds, "plain write", lambda: _write(plain, data))
        _timed(seconds, "load", lambda: ckpt.load(checkpoint, model=model, optimizer=optimizer))
        _timed(seconds, "plain read", lambda: _read(plain, data))
    seconds["bytes"] = [data.size]
    return seconds


def _timed(seconds: dict[str, list[float]], name: str, function: Callable[[], object]) -> None:
    _barrier()
    start = time.perf_counter()
    function()
    _barrier()
    seconds.setdefault(name, []).append(time.perf_counter() - start)


def _write(path: Path, data: np.ndarray) -> None:
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())


def _read(path: Path, data: np.ndarray) -> None:
    with path.open("rb", buffering=0) as file:
        file.readinto(memoryview(data))


def _report(seconds: dict[str, list[float]]) -> None:
    if dist.get_rank() == 0:
        median = {name: statistics.median(values) for name, values in seconds.items()}
        print(f"{dist.get_world_size()} ranks, {median['bytes'] / 1e6:.0f} MB a rank, median of {len(seconds['save'])}")
        for ours, plain in (("save", "plain write"), ("load", "plain read")):
            print(f"{ours}: {median[ours]:.3f} s, {plain}: {median[plain]:.3f} s, ratio {median[ours] / median[plain]:.2f}")


def _shared_directory(parent: Path | None) -> Path:
    made = [tempfile.mkdtemp(dir=parent)] if dist.get_rank() == 0 else [""]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(made, src=0)
    return Path(made[0])


def _barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
