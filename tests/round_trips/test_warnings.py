"""What a checkpoint can't hold is said when it is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import paddle
from checkpoint_cases import build
from harness import RankPool, this_rank

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


def save_with_own_buffers(path: str) -> list[str]:
    model, optimizer = build("convolutions", "sgd")
    model.norm._mean.set_value(paddle.full([16], float(this_rank().rank)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(path, model=model, optimizer=optimizer)
    return [str(one.message) for one in caught if "rank 0's are saved" in str(one.message)]


def test_buffers_that_differ_between_ranks(tmp_path: Path, ranks: Ranks) -> None:
    said = ranks(2).run(save_with_own_buffers, str(tmp_path / "checkpoint"))
    assert [len(messages) for messages in said] == [1, 0]
    assert "norm._mean" in said[0][0]
    assert "norm._variance" not in said[0][0]


def save_with_pending_gradients(path: str) -> list[str]:
    model, optimizer = build("tied", "sgd")
    model(paddle.zeros([2, 5], "int64")).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(path, model=model, optimizer=optimizer)
    optimizer.step()
    return [str(one.message) for one in caught if "gradients are not saved" in str(one.message)]


def test_gradients_that_are_not_saved(tmp_path: Path, ranks: Ranks) -> None:
    for messages in ranks(2).run(save_with_pending_gradients, str(tmp_path / "checkpoint")):
        assert len(messages) == 1
