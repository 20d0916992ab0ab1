"""What runs on the ranks to measure bytes: of files, of reads, of memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.storage import buffers

BIG_NBYTES = 192 << 20


class Many(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.large = self.create_parameter([3000, 1001])
        for i in range(1000):
            self.add_parameter(f"tiny{i}", self.create_parameter([3]))


class Big(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            self.add_parameter(
                f"p{i}", self.create_parameter([BIG_NBYTES // 4 // 4 // 1024, 1024], default_initializer=nn.initializer.Constant(1.5))
            )


def save_many(path: str) -> None:
    made = Many()
    ckpt.fully_shard(made, optimizer=None)
    ckpt.save(path, model=made)


def bytes_read(path: str) -> tuple[int, int, int]:
    """Bytes that a load read, that it wanted, and that this rank keeps."""
    made = Many()
    ckpt.fully_shard(made, optimizer=None)
    counts: list[int] = []
    kept = os.preadv

    def counting(*args: Any) -> int:
        got = kept(*args)
        counts.append(got)  # From several threads.
        return got

    buffers.os.preadv = counting
    try:
        ckpt.load(path, model=made)
    finally:
        buffers.os.preadv = kept
    wanted = sum(4 * int(weight.local_tensor.size) for weight in ckpt.sharded_state_dict(made).values())
    with ckpt.local_parameters(made):
        here = sum(4 * int(parameter.size) for parameter in made.parameters())
    return sum(counts), wanted, here


def _peak_nbytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def big_model_memory(path: str) -> tuple[int, int]:
    """How many bytes the process's memory grew by, and Python allocated, at most, while it saved and loaded."""
    made = Big()
    ckpt.fully_shard(made, optimizer=None)
    ckpt.save(path + " first", model=nn.Linear(2, 2))
    _forget_peak()
    before = _peak_nbytes()
    tracemalloc.start()
    ckpt.save(path, model=made)
    ckpt.load(path, model=made)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    grown = _peak_nbytes() - before
    with ckpt.local_parameters(made):
        assert all(float(parameter[0]) == 1.5 for parameter in made.parameters() if parameter.size)
    return grown, traced
