"""PaddleFormers' ``Trainer`` trains a sharded model as it trains a plain one, and goes on from checkpoints of the manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import RankPool, assemble, assert_equal_states
from trainer_cases import make_with, train_plain, train_sharded
from training_cases import SAVED_AT, STEPS

WITH_DROPOUT = {"attention_dropout": 0.2}


def test_a_sharded_trainer_trains_like_a_plain_one(ranks: Callable[[int], RankPool], single: RankPool, tmp_path: Path) -> None:
    (wanted,) = single.run(train_plain, {})
    assert len(wanted) == STEPS + 1
    sharded = ranks(2).run(train_sharded, {}, str(tmp_path / "root"), False, STEPS)
    np.testing.assert_allclose(sharded[0].losses, wanted, rtol=1e-5)
    assert sorted(path.name for path in (tmp_path / "root").glob("step_*")) == ["step_00000003", "step_00000006"]


def test_it_resumes_bit_for_bit(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    whole = ranks(2).run(train_sharded, WITH_DROPOUT, str(tmp_path / "whole"), True, STEPS)
    root = str(tmp_path / "interrupted")
    begun = ranks(2).run(train_sharded, WITH_DROPOUT, root, True, SAVED_AT)
    resumed = ranks(2).run(train_sharded, WITH_DROPOUT, root, True, STEPS, True)
    assert len(whole[0].losses) == STEPS + 1
    assert begun[0].losses[:SAVED_AT] == whole[0].losses[:SAVED_AT]
    assert resumed[0].losses == whole[0].losses[SAVED_AT:]
    assert_equal_states(assemble([rank.held for rank in resumed]), assemble([rank.held for rank in whole]))


def test_what_a_sharded_model_can_not_have_is_refused(single: RankPool) -> None:
    (error,) = single.errors(make_with, {"offload_optim": True})
    assert str(error) == "CheckpointError: ShardedTrainer can't train with offload_optim; leave them out of the TrainingArguments"
