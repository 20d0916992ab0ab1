"""Shows on a VisualDL board what saving costs a run, beside its loss.

It runs by itself, or on several ranks with ``python -m paddle.distributed.launch --nproc_per_node 2``::

    pip install visualdl
    python examples/visualdl_checkpoints.py --root checkpoints --board board
    visualdl --logdir board

``CheckpointManager`` calls ``on_event`` on rank 0 after each save and restore, in the background where the save is there. What it
raises is logged and stops nobody.
"""

from __future__ import annotations

import argparse

import numpy as np
import paddle
import paddle.distributed as dist
from visualdl import LogWriter

from paddle_fsdp_ckpt import CheckpointEvent, CheckpointManager, fully_shard


class Board:
    """A VisualDL log: scalars of each save and restore, by step."""

    def __init__(self, log: str) -> None:
        # Of several files in a directory a board shows the newest alone, without what a run did before it was resumed.
        self.writer = LogWriter(logdir=log, file_name="vdlrecords.checkpoints.log")

    def __call__(self, event: CheckpointEvent) -> None:
        """Add what a manager tells."""
        scalars = {
            f"{event.kind}/seconds": event.seconds,
            f"{event.kind}/blocked_seconds": event.blocked_seconds,
            "steps_kept": len(event.steps),
            **event.metrics,
        }
        if event.kind == "save":
            scalars["save/megabytes"] = event.nbytes / 1e6
        for name, value in scalars.items():
            self.writer.add_scalar(tag=f"checkpoints/{name}", step=event.step, value=value)


def main() -> None:
    """Train a small model, saving every few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="checkpoints")
    parser.add_argument("--board", default="board")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    dist.init_parallel_env()
    model = paddle.nn.Sequential(paddle.nn.Linear(16, 64), paddle.nn.GELU(), paddle.nn.Linear(64, 1))
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    fully_shard(model, optimizer=optimizer)
    board = Board(options.board) if dist.get_rank() == 0 else None
    with CheckpointManager(options.root, max_to_keep=3, save_every_steps=10, async_save=True, on_event=board) as checkpoints:
        start = checkpoints.restore(model=model, optimizer=optimizer) or 0
        for step in range(start + 1, options.steps + 1):
            x = np.random.RandomState(step).randn(12, 16).astype("float32")[dist.get_rank() :: dist.get_world_size()]
            loss = (model(paddle.to_tensor(x)) - paddle.to_tensor(x.sum(-1, keepdims=True))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            if checkpoints.should_save(step):
                mean = loss.detach().clone()  # metrics must be the same on all ranks
                if dist.get_world_size() > 1:
                    dist.all_reduce(mean)
                checkpoints.save(step, model=model, optimizer=optimizer, metrics={"loss": mean.item() / dist.get_world_size()})
    if board is not None:
        board.writer.close()


if __name__ == "__main__":
    main()
