"""The adapter for Paddle's own fully_shard: what it reads, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import adapter_cases as cases
import pytest
from fused_cases import OPTIMIZERS, assert_goes_on_alike, whole
from harness import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("world_size", [2, 3])
def test_pieces_are_live_views_of_the_right_values(world_size: int, ranks: Ranks) -> None:
    absent = ranks(world_size).run(cases.pieces_are_views)
    assert absent[0] != absent[1]
    assert "embed.weight" in absent[1]


@pytest.mark.parametrize(("optimizer", "masters"), [(name, name.endswith(" named")) for name in OPTIMIZERS])
def test_master_weights_and_low_precision_come_back(optimizer: str, masters: bool, tmp_path: Path, ranks: Ranks) -> None:
    for mine, unfused in ranks(2).run(cases.low_precision, optimizer, masters, str(tmp_path / "checkpoint")):
        assert mine == unfused
        assert ("w_0" in mine) == masters


def test_stock_saves_and_loads_it(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    right = ranks(2).run(cases.stock_saves, path)
    assert_goes_on_alike(ranks(2).run(cases.stock_loads, path), right)
    for other in ranks(3).run(cases.stock_loads, path):
        assert other.losses == pytest.approx(right[0].losses, rel=1e-4)
    assert whole(right)


def test_different_values_for_what_a_buffer_has_once_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.scalars_that_differ):
        assert said.startswith("MismatchError: a fused buffer of Paddle's has one value for all its parameters")
        assert ".beta1_pow_acc_0 and blocks.0." in said
        assert "paddle_fsdp_ckpt.fully_shard" in said


def test_the_cpu_context_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks(2).run(cases.whats_left_of_the_cpu_context)


def test_models_that_cannot_be_read_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.refused_models):
        assert "Blocks is not the model" in said["not cut"]
        assert "did not cut: added.weight, added.bias" in said["added"]
        assert "'fuse_params_1' is not cut as in Paddle 3.3.1" in said["overlap"]
        assert "overlaps what comes after it" in said["overlap"]
        assert "lacks buffer_groups[...].params_buffer.param_offsets" in said["attribute"]
        assert "mesh of shape [1, 2]" in said["mesh"]
        assert "can't cut running statistics" in said["statistics"]


def test_cuts_that_stock_paddle_would_load_wrongly_are_named(ranks: Ranks) -> None:
    for messages in ranks(3).run(cases.warned_of_cuts):
        assert len(messages) == 1
        assert "wrongly, without an error: deep." in messages[0]


REFUSED = {
    "groups": "with param groups Paddle steps all buffers once for each group",
    "by norm": "ClipGradByNorm takes the norm of this rank's part",
    "lr_ratio": "lr_ratio is asked with a buffer",
    "multi tensor": "use_multi_tensor=True",
    "lamb": "Lamb can't step the fused buffers",
    "lbfgs": "LBFGS can't step the fused buffers",
    "foreign": "holds 2 parameters that are not of the model",
    "other": "holds 2 parameters that are not of the model",
    "some": "doesn't hold 1 of the model's trainable parameters, and Paddle would step them all the same: embed.weight",
    "stepped": "make it anew",
    "decay": "blocks.0.norm.weight",
    "no decay": "call split_weight_decay(model, optimizer) before the first step",
    "all decay": "nothing was raised",
    "decay, split": "nothing was raised",
    "decay, late": "call split_weight_decay before its first step",
    "decay, other model": "is not the model that Paddle's fully_shard cut",
    "nothing cut": "no model in this process was cut",
    "rate": "and ParamAttr says otherwise for head.bias",
    "rate, no clip": "and ParamAttr says otherwise for head.bias",
    "regularizer": "the regularizers of single parameters are lost: head.weight",
    "regularizer, no clip": "the regularizers of single parameters are lost: head.weight",
    "need_clip": "need_clip=False is lost: head.weight",
    "need_clip, no clip": "nothing was raised",
}


def test_what_fused_updates_get_wrong_is_refused_by_name(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.refused_optimizers):
        assert said.keys() == REFUSED.keys()
        for name, wanted in REFUSED.items():
            assert wanted in said[name], f"{name}: {said[name]}"
