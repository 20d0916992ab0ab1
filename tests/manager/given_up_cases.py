"""Steps that were given up, on the ranks: what a restore of one of them says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import paddle.distributed as dist
import pytest
from manager_runs import build

from paddle_fsdp_ckpt import CheckpointManager, IncompleteCheckpointError
from paddle_fsdp_ckpt.storage.read_lock import reading


def said(restore: Callable[[], object]) -> str:
    with pytest.raises(IncompleteCheckpointError) as caught:
        restore()
    return str(caught.value)


def go_back_to_1_and_save_2(root: str, read: bool) -> tuple[str, str, str]:
    """Give up 2 and 3, of which 3 stays if it is read; return what a restore of 3 says before the save, after it, and in a new manager."""
    model, optimizer = build(seed=5)
    objects = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root) as checkpoints:
        checkpoints.restore(**objects, step=1, discard_later=True)
        before = said(lambda: checkpoints.restore(**objects, step=3))
        with CheckpointManager(root) as another:
            assert another.restore(**objects, step=3) == 3
        with reading(Path(root) / ("step_00000003" if read else "step_00000001")):
            dist.barrier()
            checkpoints.save(2, **objects)
            dist.barrier()
        after = said(lambda: checkpoints.restore(**objects, step=3))
    with CheckpointManager(root) as checkpoints:
        return before, after, said(lambda: checkpoints.restore(**objects, step=3))


def begin_anew(root: str) -> str:
    model, optimizer = build(seed=5)
    with CheckpointManager(root, overwrite=True) as checkpoints:
        return said(lambda: checkpoints.restore(model=model, optimizer=optimizer, step=3))


def fall_back(root: str) -> str:
    model, optimizer = build(seed=5)
    objects = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root) as checkpoints:
        assert checkpoints.restore(**objects, fall_back=True) == 2
        return said(lambda: checkpoints.restore(**objects, step=3))
