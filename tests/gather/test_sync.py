"""Weights handed to an inference process: only what is new, and the same logits there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import sync_cases as cases
from harness import RankPool

Ranks = Callable[[int], RankPool]


def test_another_process_computes_the_trainers_logits(ranks: Ranks) -> None:
    first, second = ranks(2).run(cases.run_the_example, 3)
    adapters = {f"{layer}.{side}.weight" for layer in (1, 2) for side in ("down", "up")}
    for number, ((names, logits, served), (other_names, *_)) in enumerate(zip(first, second, strict=True)):
        assert names == other_names
        assert (set(names) > adapters) if number == 0 else (set(names) == adapters)
        np.testing.assert_allclose(served, logits, rtol=0, atol=1e-6)
    assert np.abs(first[0][1] - first[2][1]).max() > 1e-3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_versions_count_what_was_written_to(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(cases.versions_count)
