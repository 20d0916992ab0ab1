"""What a damaged step's error says, it says once, and in the user's words."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import RankPool
from manager_runs import build, run

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.key_names import say_key
from paddle_fsdp_ckpt.storage.reserved_keys import rank_key

Ranks = Callable[[int], RankPool]


def printed(root: str) -> str:
    """What Python prints of a restore that fails."""
    model, optimizer = build(seed=7)
    try:
        with ckpt.CheckpointManager(root) as checkpoints:
            checkpoints.restore(model=model, optimizer=optimizer)
    except ckpt.CheckpointError as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("it did not raise")


def test_what_a_rank_kept_is_damaged(tmp_path: Path, ranks: Ranks) -> None:
    root = tmp_path / "root"
    ranks(2).run(run, str(root), 0, 2)
    path = root / "step_00000002"
    ((_, file, offset),) = read_index(path).pieces(rank_key(1))
    data = bytearray((path / file).read_bytes())
    data[offset + 9] ^= 4
    (path / file).write_bytes(data)
    for text in ranks(2).run(printed, str(root)):
        assert text.count("is damaged between bytes") == 1 and text.count("step_00000001: restore(fall_back=True) takes that") == 1
        assert "what the manager kept of rank 1 alone (random numbers, rank_state)" in text and "@paddle_fsdp_ckpt" not in text


@pytest.mark.parametrize(("key", "said"), [("a.weight", "key 'a.weight'"), ("@paddle_fsdp_ckpt/new", "key '@paddle_fsdp_ckpt/new'")])
def test_other_keys_have_their_names(key: str, said: str) -> None:
    assert say_key(key) == said
