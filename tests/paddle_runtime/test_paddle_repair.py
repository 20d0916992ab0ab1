"""What Paddle's own fully_shard gets wrong: each is refused by name, warned of, or put right by ``repair_paddle_runtime``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import refusal_cases
import repair_cases
import repair_trainings
from harness import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("case", repair_trainings.SILENT)
def test_what_goes_wrong_in_silence_is_put_right(case: str, ranks: Ranks, single: RankPool) -> None:
    right = single.run(repair_trainings.unsharded, case)[0]
    for losses in ranks(2).run(repair_trainings.sharded, case, True):
        np.testing.assert_allclose(losses, right, rtol=1e-5)
    for losses in ranks(2).run(repair_trainings.sharded, case, False):
        assert np.abs(np.array(losses) / right - 1).max() > 0.01, "Paddle does this right now: let the README say so"


@pytest.mark.parametrize("case", repair_trainings.ENDLESS)
def test_what_waits_for_ever_is_put_right(case: str, ranks: Ranks, single: RankPool) -> None:
    right = single.run(repair_trainings.unsharded, case)[0]
    for losses in ranks(2).run(repair_trainings.sharded, case, True):
        np.testing.assert_allclose(losses, right, rtol=1e-5)


@pytest.mark.parametrize("case", repair_trainings.RIGHT)
@pytest.mark.parametrize("repair", [False, True])
def test_what_is_right_stays_right(case: str, repair: bool, ranks: Ranks, single: RankPool) -> None:
    right = single.run(repair_trainings.unsharded, case)[0]
    for losses in ranks(2).run(repair_trainings.sharded, case, repair):
        np.testing.assert_allclose(losses, right, rtol=1e-5)


def test_what_paddle_refuses_itself(ranks: Ranks, single: RankPool) -> None:
    for said in ranks(2).run(refusal_cases.errors_of_paddle):
        assert said["tied"].startswith("NotImplementedError")
        assert "Tensor holds no memory" in said["frozen after what is trained"]
    assert "init_parallel_env first" in single.run(refusal_cases.cut_by_one_rank)[0]


def test_unused_parameters_have_a_gradient_of_zero_once_repaired(ranks: Ranks) -> None:
    assert any(ranks(2).run(repair_cases.unused_parameters_move))


def test_a_repaired_run_resumes_bit_for_bit_where_layers_are_skipped(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    assert ranks(2).run(repair_cases.repaired_save, path) == ranks(2).run(repair_cases.repaired_load, path)


@pytest.mark.parametrize("repair", [False, True])
def test_local_inputs_are_summed_over_ranks_and_warned_of(repair: bool, ranks: Ranks, single: RankPool) -> None:
    twice = single.run(repair_cases.pieces_of_unsharded, 0.003 * 2)[0]
    results = ranks(2).run(repair_cases.local_inputs, repair)
    for (pieces, said), places in zip(results, ranks(2).run(repair_cases.positions), strict=True):
        for name, place in places.items():
            np.testing.assert_allclose(pieces[name], twice[name][place], rtol=1e-4, atol=1e-6, err_msg=name)
        assert len(said) == repair
        for text in said:
            assert "no input of this Blocks is distributed over the ranks" in text
            assert "divide the loss by 2" in text


def test_plain_state_dicts_are_errors_once_repaired(ranks: Ranks) -> None:
    for said in ranks(2).run(refusal_cases.plain_state, False):
        assert said.pop("state_dict") == "1 of 10"  # the buffer
        assert said.pop("set_value") == "an error of Paddle's"
        assert not any(text.startswith("ShardingError") for text in said.values())
    for said in ranks(2).run(refusal_cases.plain_state, True):
        assert all(text.startswith("ShardingError: ") for text in said.values())
        assert "use paddle_fsdp_ckpt.sharded_state_dict(model), or save" in said["state_dict"]
        assert "use paddle_fsdp_ckpt.load" in said["set_state_dict"]
        assert "set_value of 'head.weight'" in said["set_value"]


def test_a_second_optimizer_is_warned_of_refused_and_kept_from_stepping(ranks: Ranks) -> None:
    for said in ranks(2).run(refusal_cases.second_optimizer):
        assert said["moved"] == (True, False), "it stepped the fused buffers, and nothing of its own"
        assert any("another optimizer, Momentum over linear_" in text for text in said["warned"])
        assert said["repaired"].startswith("ShardingError: an optimizer stepped")
        for call in ("refused", "repairing", "splitting"):
            assert said[call].startswith("UnsupportedOptimizerError: SGD: with a model cut by paddle.distributed.fsdp.fully_shard")
            assert "Momentum over linear_" in said[call]
            assert "and nothing of its own" in said[call]
        assert said["gone"] == "nothing was raised"


def test_a_second_optimizer_of_the_same_model_is_warned_of(ranks: Ranks) -> None:
    for said in ranks(2).run(refusal_cases.second_optimizer_of_the_model):
        (text,) = [text for text in said if "another optimizer" in text]
        assert "Momentum over linear_" in text
        assert "nothing of its own" not in text


def test_a_second_model_is_refused_by_name(ranks: Ranks) -> None:
    for said in ranks(2).run(refusal_cases.second_model):
        assert "ShardingError: Paddle's fully_shard cut this Blocks, and a Blocks cut later is what the process trains now" in said["first"]
        assert "cut the parameters of this SGD, and a Blocks cut later is what" in said["its optimizer"]
        assert said["second"] == "nothing was raised"
        assert "and no model is what the process trains now" in said["none"]


def test_loss_scaling_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(refusal_cases.grad_scaler):
        assert said["found"] == 0
        assert said["disabled"] == said["gone"] == "nothing was raised"
        assert "a GradScaler that is enabled: it finds no gradients of fused buffers" in said["enabled"]


def test_lost_gradients_are_refused_by_name(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks(2).run(refusal_cases.lost_gradients, str(tmp_path / "checkpoint")):
        for call in ("states", "save"):
            assert "ShardingError: in the last backward some parameters of Paddle's fused buffers got no gradient" in said[call]
            assert "2 of 'fuse_params_3' (head.weight, head.bias, unused.weight, unused.bias)" in said[call]
            assert "repair_paddle_runtime" in said[call]
        assert said["weights"] == said["load"] == said["after load"] == "nothing was raised"


def test_harms_that_nobody_can_see_are_warned_of(ranks: Ranks) -> None:
    for said in ranks(2).run(repair_cases.harms):
        assert said["state"] == said["closed"]
        (text,) = said["state"]
        for harm in (
            "a layer that a step skips",
            "gradient accumulation",
            "waits for ever",
            "summed over ranks",
            "clear_grad()",
            "state_dict()",
        ):
            assert harm in text
        assert said["weights"] == said["repaired"] == []


def test_a_repair_says_what_it_did_and_is_undone(ranks: Ranks) -> None:
    for actions in ranks(2).run(repair_cases.undone):
        assert len(actions) == 9
        assert "clear_grad() without a step() drops the gradients" in actions


REFUSED = {
    "not cut": "no model in this process was cut",
    "other model": "is not the model that Paddle's fully_shard cut",
    "lamb": "Lamb can't step the fused buffers of paddle.distributed.fsdp.fully_shard right: its trust ratio",
    "twice": "is repaired already",
    "version": "its comm_manager lacks double_buffer_limit",
}


def test_what_cannot_be_repaired_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(refusal_cases.refused_repairs):
        assert said.keys() == REFUSED.keys()
        for name, wanted in REFUSED.items():
            assert wanted in said[name], f"{name}: {said[name]}"
