"""What may differ at a load into a model cut by Paddle's own fully_shard, and what its fused buffers can't have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fused_cases import whole
from harness import RankPool
from load_option_cases import (
    all_start_afresh,
    load_double,
    load_other_shapes,
    model_part,
    refused,
    save_double,
    save_low_precision,
    save_other_shapes,
    save_without_one_state,
    tensors_without_values,
)
from public_cases import save_and_go_on

Ranks = Callable[[int], RankPool]


def test_values_are_converted(tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    path = str(tmp_path / "double")
    saved = single.run(save_double, path)[0].state
    results = ranks(2).run(load_double, path)
    found = whole([one for one, _ in results])
    assert found.keys() == saved.keys()
    for key, piece in saved.items():
        assert piece.values.dtype == np.float64 and found[key].dtype == np.float32
        np.testing.assert_array_equal(found[key], piece.values.astype(np.float32), err_msg=key)
    assert all(rounded for _, rounded in results)


def test_the_model_without_its_optimizer(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "saved")
    ranks(2).run(save_and_go_on, "adamw", path)
    assert ranks(2).run(model_part, path) == [(True, True)] * 2


def test_a_state_that_is_missing_everywhere(tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    path = str(tmp_path / "lost")
    single.run(save_without_one_state, path, True)
    for afresh, states, parameters in ranks(2).run(all_start_afresh, path):
        assert afresh == parameters and states == 0
    for name, message in ranks(2).run(refused, path, "float32", {"allow_missing": ["*.moment2_0"]}):
        assert name == "MismatchError" and "half a state is of no use" in message


def test_one_parameter_of_a_buffer_can_not_start_afresh(tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    path = str(tmp_path / "lost")
    single.run(save_without_one_state, path, False)
    results = ranks(2).run(refused, path, "float32", {"allow_missing": ["blocks.0.up.bias.*"]})
    for name, message in results:
        assert name == "MismatchError"
        assert "the buffer steps all of them alike" in message
    assert results[0] == results[1]


def test_a_matrix_of_another_shape(tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    """The embedding has a buffer of its own, whose states start afresh; a block shares one, and needs the optimizer left out."""
    path = str(tmp_path / "embedding")
    saved = single.run(save_other_shapes, path, ["embed"])[0].state
    results = ranks(2).run(load_other_shapes, path, ["embed.*"], {})
    before, found = (whole([one[number] for one in results]) for number in (0, 1))
    assert found.keys() == saved.keys()
    fresh = {"moment1_0": 0.0, "moment2_0": 0.0, "beta1_pow_acc_0": 0.9, "beta2_pow_acc_0": 0.999}
    for key, values in found.items():
        wanted = before[key] if key == "embed.weight" else saved[key].values
        if key.startswith("embed.weight."):
            wanted = np.full_like(values, fresh[key.rpartition(".")[2]])
        np.testing.assert_array_equal(values, wanted, err_msg=key)
    assert [one[2].started_afresh for one in results] == [["embed.weight"]] * 2
    path = str(tmp_path / "block")
    saved = single.run(save_other_shapes, path, ["blocks.0.up"])[0].state
    results = ranks(2).run(refused, path, "float32", {"allow_other_shape": ["blocks.0.up.weight"]})
    for name, message in results:
        assert (
            name == "MismatchError"
            and "blocks.0.up.weight, which had no gradient yet, or are to start afresh; the buffer steps all" in message
        )
    results = ranks(2).run(load_other_shapes, path, ["blocks.0.up.weight"], {"parts": {"model"}})
    before, found = (whole([one[number] for one in results]) for number in (0, 1))
    for key, values in found.items():
        is_kept = key == "blocks.0.up.weight" or key.endswith("_0")
        np.testing.assert_array_equal(values, before[key] if is_kept else saved[key].values, err_msg=key)


@pytest.mark.parametrize("more", [3, -2])
def test_a_matrix_is_resized(more: int, tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    """With a buffer of its own or not, by rows, with its states; what the checkpoint lacks is what it was."""
    path = str(tmp_path / "saved")
    saved = single.run(save_other_shapes, path, ["embed", "blocks.0.up"], more)[0].state
    results = ranks(2).run(load_other_shapes, path, [], {"resize": ["embed.*", "blocks.0.up.weight"]})
    before, found = (whole([one[number] for one in results]) for number in (0, 1))
    assert found.keys() == saved.keys()
    for key, values in found.items():
        right = before[key].reshape(-1).copy()
        stored = saved[key].values.reshape(-1)  # leading rows are a prefix
        right[: stored.size] = stored[: right.size]
        np.testing.assert_array_equal(values.reshape(-1), right, err_msg=key)
    assert [[one.key for one in report.resized] for _, _, report in results] == [["blocks.0.up.weight", "embed.weight"]] * 2


def test_master_weights_of_what_is_missing_can_not_stay(tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    path = str(tmp_path / "low")
    ranks(2).run(save_low_precision, path)
    options = {
        "key_map": {"blocks.0.up.bias": "gone"},
        "allow_missing": ["blocks.0.up.bias"],
        "allow_unexpected": ["*"],
        "parts": {"model"},
    }
    for name, message in ranks(2).run(refused, path, "bfloat16", options):
        assert name == "MismatchError"
        assert "blocks.0.up.bias can't keep master weights" in message
    path = str(tmp_path / "wider")
    single.run(save_other_shapes, path, ["embed"])
    for name, message in ranks(2).run(refused, path, "bfloat16", {"allow_other_shape": ["embed.*"], "parts": {"model"}, "cast": True}):
        assert name == "MismatchError" and "embed.weight can't keep master weights" in message


def test_tensors_without_values_are_named(tmp_path: Path, ranks: Ranks) -> None:
    for cleared, strided, sparse in ranks(2).run(tensors_without_values, str(tmp_path / "new")):
        assert "state 'moment2_0' of '" in cleared and "it has no values" in cleared
        assert "state 'moment2_0' of '" in strided and "one behind the other" in strided
        assert "'added': it is sparse" in sparse
    assert not (tmp_path / "new").exists()
