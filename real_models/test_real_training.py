"""Models of PaddleFormers train sharded like one process that trains them plain, and resume on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import RankPool, assemble, assert_equal_states
from training_cases import SAVED_AT, STEPS, WEIGHT_DECAY, resume, train_plain, train_recomputing, train_sharded

FAMILIES = ("qwen3_moe", "qwen3", "llama")

TOLERANCE = 1e-5
WEIGHTS_TOLERANCE = 2e-4
"""Of weights and moments; Adam makes much of the last bits of small gradients."""


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_like_one_process_and_resumes(ranks: Callable[[int], RankPool], single: RankPool, tmp_path: Path, family: str) -> None:
    path = str(tmp_path / "checkpoint")
    ((wanted, plain),) = single.run(train_plain, family, {}, WEIGHT_DECAY)
    ((undecayed, _),) = single.run(train_plain, family, {}, 0.0)
    sharded = ranks(2).run(train_sharded, family, {}, path)
    losses = np.array(sharded[0].losses)
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE)
    assert abs(np.array(wanted) - undecayed).max() > 50 * TOLERANCE, "weight decay makes no difference, so this test shows nothing"
    whole = assemble([rank.held for rank in sharded])
    for name, values in plain.items():
        scale = float(abs(values).max())
        np.testing.assert_allclose(whole[name].reshape(values.shape), values, rtol=0, atol=WEIGHTS_TOLERANCE * scale, err_msg=name)

    again = ranks(2).run(resume, family, {}, path)
    assert again[0].losses == sharded[0].losses[SAVED_AT:]
    assert_equal_states(assemble([rank.held for rank in again]), whole)
    for pool in (single, ranks(3)):
        outcome = pool.run(resume, family, {}, path)[0]
        np.testing.assert_allclose(outcome.losses, losses[SAVED_AT:], rtol=TOLERANCE)


# PaddleFormers' Qwen3-MoE fails with "full_attn", sharded or not: it hands its attention one argument too many.
RECOMPUTED = {
    "qwen3_moe": [("full", True)],
    "qwen3": [("full", True)],
    "llama": [(granularity, reentrant) for granularity in ("full", "full_attn", "core_attn") for reentrant in (True, False)],
}


@pytest.mark.parametrize("family", RECOMPUTED)
def test_trains_with_recompute(ranks: Callable[[int], RankPool], single: RankPool, family: str) -> None:
    ((wanted, _),) = single.run(train_plain, family, {}, WEIGHT_DECAY)
    for granularity, reentrant in RECOMPUTED[family]:
        changes = {"recompute": True, "recompute_granularity": granularity, "recompute_use_reentrant": reentrant}
        losses, forwards = ranks(2).run(train_recomputing, family, changes)[0]
        np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE, err_msg=str(changes))
        assert forwards == (STEPS if granularity == "core_attn" else 2 * STEPS), changes
