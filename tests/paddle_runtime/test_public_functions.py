"""The package's public functions on models cut by Paddle's own fully_shard, as a training loop calls them."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import public_cases as cases
import pytest
from fused_cases import Held, assert_goes_on_alike, whole
from harness import RankPool, assert_equal_states, on_two_ranks, run_script

Ranks = Callable[[int], RankPool]
TEXT = Path(__file__).resolve().parent.parent.parent / "docs" / "paddles_fully_shard.md"
RESUMED = ["adamw", "adam named", "momentum", "sgd", "nadam named", "adamw decay clipped"]
MOVED = ["adamw", "momentum"]


class PublicSaves:
    """Checkpoints of this session, each made once."""

    def __init__(self, root: Path, ranks: Ranks) -> None:
        self._root = root
        self._ranks = ranks
        self.get = cache(self._make)

    def _make(self, optimizer: str) -> tuple[str, list[Held], list[Held]]:
        path = str(self._root / optimizer)
        results = self._ranks(2).run(cases.save_and_go_on, optimizer, path)
        return path, [saved for saved, _ in results], [after for _, after in results]


@pytest.fixture(scope="session")
def public_saves(tmp_path_factory: pytest.TempPathFactory, rank_pools: object) -> PublicSaves:
    return PublicSaves(tmp_path_factory.mktemp("public"), rank_pools.pool)  # type: ignore[attr-defined]


def test_state_dicts_are_live_views(ranks: Ranks) -> None:
    ranks(2).run(cases.dicts_are_the_adapters)


@pytest.mark.parametrize("optimizer", RESUMED)
def test_resume_on_2_ranks_is_bit_for_bit(optimizer: str, public_saves: PublicSaves, ranks: Ranks) -> None:
    path, saved, uninterrupted = public_saves.get(optimizer)
    results = ranks(2).run(cases.load_and_go_on, optimizer, path)
    assert_equal_states(whole([loaded for loaded, _, _ in results]), whole(saved))
    assert_goes_on_alike([after for _, after, _ in results], uninterrupted)


def test_fresh_processes_resume_bit_for_bit(public_saves: PublicSaves, fresh_ranks: Ranks) -> None:
    path, _, uninterrupted = public_saves.get("adamw")
    assert_goes_on_alike([after for _, after, _ in fresh_ranks(2).run(cases.load_and_go_on, "adamw", path)], uninterrupted)


def test_a_load_in_a_running_process_leaves_nothing_of_before(public_saves: PublicSaves, ranks: Ranks) -> None:
    path, _, uninterrupted = public_saves.get("adamw")
    assert_goes_on_alike([after for _, after, _ in ranks(2).run(cases.load_and_go_on, "adamw", path, 2)], uninterrupted)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw decay clipped"])
def test_3_ranks_load_what_2_saved(optimizer: str, public_saves: PublicSaves, ranks: Ranks) -> None:
    path, saved, uninterrupted = public_saves.get(optimizer)
    results = ranks(3).run(cases.load_and_go_on, optimizer, path)
    assert_equal_states(whole([loaded for loaded, _, _ in results]), whole(saved))
    for _, after, _ in results:
        np.testing.assert_allclose(after.losses, uninterrupted[0].losses, rtol=1e-4)


@pytest.mark.parametrize("optimizer", MOVED)
def test_a_run_moves_to_our_runtime(optimizer: str, tmp_path: Path, public_saves: PublicSaves, single: RankPool, ranks: Ranks) -> None:
    path, saved, uninterrupted = public_saves.get(optimizer)
    again = str(tmp_path / "again")
    for losses in ranks(3).run(cases.load_ours, optimizer, path, again):
        np.testing.assert_allclose(losses, uninterrupted[0].losses, rtol=1e-4)
    assert_equal_states(whole([single.run(cases.load_plain, optimizer, again)[0][0]]), whole(saved))


@pytest.mark.parametrize("optimizer", MOVED)
def test_a_run_moves_from_our_runtime(optimizer: str, tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    right = ranks(3).run(cases.train_ours, optimizer, path)[0]
    results = ranks(2).run(cases.load_and_go_on, optimizer, path)
    assert_equal_states(whole([loaded for loaded, _, _ in results]), whole([single.run(cases.load_plain, optimizer, path)[0][0]]))
    for _, after, _ in results:
        np.testing.assert_allclose(after.losses, right, rtol=1e-4)


@pytest.mark.parametrize("optimizer", MOVED)
def test_a_run_moves_to_one_process(optimizer: str, public_saves: PublicSaves, single: RankPool) -> None:
    path, saved, uninterrupted = public_saves.get(optimizer)
    loaded, losses = single.run(cases.load_plain, optimizer, path)[0]
    assert_equal_states(whole([loaded]), whole(saved))
    np.testing.assert_allclose(losses, uninterrupted[0].losses, rtol=1e-4)


@pytest.mark.parametrize("optimizer", MOVED)
def test_a_run_moves_from_one_process(optimizer: str, tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    saved, right = single.run(cases.train_plain, optimizer, path)[0]
    results = ranks(2).run(cases.load_and_go_on, optimizer, path)
    assert_equal_states(whole([loaded for loaded, _, _ in results]), whole([saved]))
    for _, after, _ in results:
        np.testing.assert_allclose(after.losses, right, rtol=1e-4)


def test_no_states_come_back_as_no_states(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(cases.save_without_states, str(tmp_path / "checkpoint"))


def test_a_model_or_an_optimizer_alone(public_saves: PublicSaves, ranks: Ranks) -> None:
    ranks(2).run(cases.parts, public_saves.get("adamw")[0])


def test_master_weights_follow_a_model_that_is_loaded_alone(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(cases.masters_follow, str(tmp_path / "checkpoint"))


REFUSED = {
    "another model": "blocks.2.",
    "another class": "of AdamW, and the optimizer is Momentum",
    "corrupt": "1_0.safetensors",
    "nothing there": "nowhere",
    "one rank elsewhere": "nowhere",
    "one rank's model is unreadable": "did not cut: added.weight, added.bias",
    "no optimizer saved": "was saved without an optimizer",
    "loading what differs within a buffer": "Nothing was changed: load another one",
    "loading what differs within a buffer, used": "Nothing was changed: load another one",
    "loading what is absent within a buffer": "and none for blocks.0.up.bias",
    "a plain optimizer": "holds 2 parameters that are not of the model that paddle.distributed.fsdp.fully_shard cut",
    "saving with a plain optimizer": "use one model and one optimizer",
    "saving with two": "held twice by the optimizers",
    "saving with one of two": "use one model and one optimizer",
    "saving a part": "distributed by Paddle",
    "saving with our optimizer": "use one model and one optimizer",
    "saving our model with its optimizer": "AdamW is not bound to a sharded model",
    "saving Lamb": "Lamb can't step the fused buffers",
    "saving with decay asked by buffers": "call split_weight_decay(model, optimizer) before the first step",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_on_every_rank_and_changes_nothing(
    case: str, tmp_path: Path, public_saves: PublicSaves, single: RankPool, ranks: Ranks
) -> None:
    path = tmp_path / "checkpoint"
    if case == "nothing there":
        path = tmp_path / "nowhere"
    elif "within a buffer" in case:
        single.run(cases.save_what_paddle_cannot_hold, str(path), "differs" if "differs" in case else "absent")
    elif case == "no optimizer saved":
        single.run(cases.save_model_only, str(path))
    else:
        shutil.copytree(public_saves.get("adamw")[0], path)
    if case == "corrupt":
        file = path / "1_0.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    results = ranks(2).run(cases.refused, case, str(path))
    for name, message in results:
        assert REFUSED[case] in message
        assert name
    assert not (tmp_path / "checkpoint 2").exists()


def test_cuts_that_stock_paddle_would_load_wrongly_are_warned_of_and_loaded_right(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks(3).run(cases.deep_tensor, str(tmp_path / "checkpoint")):
        assert len(said) == 1
        assert "wrongly, without an error: deep." in said[0]


def test_frozen_parameters_have_no_states_and_move(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(cases.frozen, str(tmp_path / "checkpoint"))


def test_split_weight_decay_is_public(single: RankPool) -> None:
    assert single.run(cases.split_is_public) == [True]


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    marked = re.search(r"<!-- tests/paddle_runtime runs this -->\n```python\n(.*?)```", TEXT.read_text(), re.DOTALL)
    assert marked is not None
    on_cpu = (
        "from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu\n"
        "import paddle\npaddle.set_device('cpu')\nwith paddle_runtime_on_cpu():\n"
    )
    (tmp_path / "train.py").write_text(on_cpu + textwrap.indent(marked[1], "    "))
    logs = run_script(tmp_path, on_two_ranks("train.py"))
    assert logs.count("10 {'epoch': 1}") == 2
