"""16-bit parameters: gradients are reduced and kept in float32, master weights are stepped, saved and restored, norms stay float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import low_precision_cases as cases
import numpy as np
import pytest
from harness import RankPool

Ranks = Callable[[int], RankPool]
DTYPES = ["bfloat16", "float16"]


@pytest.mark.parametrize(
    ("dtype", "world_size", "prefetch"),
    [("bfloat16", 1, 0), ("bfloat16", 2, 0), ("bfloat16", 3, 0), ("float16", 2, 0), ("bfloat16", 2, 1), ("float16", 3, 2)],
)
def test_trains_like_one_process(dtype: str, world_size: int, prefetch: int, ranks: Ranks) -> None:
    differences = ranks(world_size).run(cases.trains_like_one_process, dtype, prefetch)
    np.testing.assert_allclose(np.mean(differences, axis=0), 0, atol=1e-4)


@pytest.mark.parametrize("units", ["one", "many"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_averaged_and_accumulated_in_float32(dtype: str, units: str, ranks: Ranks) -> None:
    for world_size, prefetch in ((1, 0), (2, 0), (3, 0), (2, 1)):
        ranks(world_size).run(cases.means_are_exact, dtype, units, prefetch)


def test_a_resumed_run_is_the_uninterrupted_one(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    went_on = ranks(2).run(cases.save_and_go_on, "bfloat16", path)
    assert ranks(2).run(cases.resume, "bfloat16", path) == went_on
    saved, _, _ = went_on[0]
    assert {dtype for key, (dtype, _) in saved.items() if key.endswith((".w_0", "moment1_0"))} == {"paddle.float32"}
    for world_size in (1, 3):
        for loaded, losses, _ in ranks(world_size).run(cases.resume, "bfloat16", path):
            assert loaded == saved
            assert np.isfinite(losses).all()


def test_master_weights_follow_what_is_written(ranks: Ranks) -> None:
    ranks(2).run(cases.master_weights_follow_what_is_written)


def test_what_is_refused(ranks: Ranks) -> None:
    for found in ranks(2).run(cases.refused_afterwards):
        words = "main_grad" if "MixPrecisionLayer" in found else ""
        assert words in found.pop("MixPrecisionLayer")
        assert all("can't be moved or converted to another dtype" in message for message in found.values())
    for message in ranks(2).run(cases.refused_before):
        assert "parameters have main_grad: _layers.embed.weight" in message
