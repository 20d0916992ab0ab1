"""``update_average``: an average of the weights as a second model, against numpy and the plain run, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import average_cases as cases
import numpy as np
import pytest
from harness import RankPool

Ranks = Callable[[int], RankPool]


def assert_same(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("cut", ["both", "model", "average", "none"])
@pytest.mark.parametrize(("dtype", "masters"), [("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_average_is_that_of_the_plain_run(cut: str, dtype: str, masters: bool, world_size: int, ranks: Ranks) -> None:
    for found, right, gathered in ranks(world_size).run(cases.averages, dtype, cut, masters):
        assert_same(found, right)
        if world_size == 1 or cut in ("average", "none") or (dtype, cut) == ("float32", "both"):
            assert gathered == []  # each rank has what it needs
        else:
            buffers = 6 if dtype == "bfloat16" else 4  # of each unit, dtype and whether it trains
            assert len(gathered) == buffers if cut == "model" else 0 < len(gathered) <= buffers  # by chance some are cut alike
            assert set(gathered) == ({"float32"} if masters else {"float32", dtype})


def test_the_average_computes_with_its_new_values(ranks: Ranks) -> None:
    for found, right in ranks(2).run(cases.computes_with_new_values):
        assert found == right


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_resumed_average_goes_on_as_it_would_have(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    right = ranks(world_size).run(cases.save_and_go_on, str(tmp_path / "root"))[0]
    for other in {world_size, 2}:
        for found in ranks(other).run(cases.restore_and_go_on, str(tmp_path / "root")):
            assert_same(found, right)


def test_an_average_in_16_bits_is_rounded_once_and_warned_of(ranks: Ranks) -> None:
    for warned, found, right in ranks(2).run(cases.in_16_bits):
        (text,) = warned  # none of the copy
        assert "9 parameters of the average have 16 bits, in which small steps are lost; make it of float32" in text
        assert_same(found, right)


@pytest.mark.parametrize("over", ["replicas", "all"])
def test_replicas(over: str, ranks: Ranks) -> None:
    for found, right in ranks(4).run(cases.replicas, over):
        assert_same(found, right)


def test_what_is_refused(ranks: Ranks) -> None:
    first, second = ranks(2).run(cases.refusals)
    texts = {
        "too large": "CheckpointError: update_average: weight is 1.5, and a number from 0 to 1 is needed",
        "no number": "CheckpointError: update_average: weight is True",
        "not a number": "CheckpointError: update_average: weight is nan",
        "no model": "CheckpointError: model: dict is not a paddle.nn.Layer",
        "names": "MismatchError: update_average: average and model are of different structure; nothing was changed: "
        "'more.bias' is in the average alone, 'more.weight' is in the average alone",
        "shapes": "'parts.0.norm.weight' has shape [6] in the average and [5] in the model",
        "buffers": "'own' is in the average alone",
        "tied": "first = second are tied in the average alone",
        "optimizer": "ShardingError: update_average: AdamW steps no parameter of the model; give the optimizer that trains it",
        "no optimizer": "UnsupportedOptimizerError: str is not an optimizer of paddle.optimizer",
        "gradients": "ShardingError: update_average: the model has gradients that no step has used; call it once a step",
        "forward": "ShardingError: update_average: a forward of the average is running; call it between steps",
        "itself": "ShardingError: update_average: the average has parameters of the model itself",
        "itself plain": "ShardingError: update_average: the average has parameters of the model itself",
        "part": "is a part of a sharded model",
        "differs": "ShardingError: what is given to update_average differs between ranks",
    }
    for said in (first, second):
        assert {*said} == {*texts, "on one rank"}
        for name, text in texts.items():
            assert text in said[name], name
    assert "RankFailedError: rank 1 refused" in first["on one rank"]
    assert "weight is 2.0" in second["on one rank"]
