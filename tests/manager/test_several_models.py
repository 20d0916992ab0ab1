"""Several models and optimizers in one checkpoint: saved and loaded as one, by their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import several_cases as cases
from harness import RankPool
from safetensors.numpy import load_file

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.storage.index import read_index

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pools: object) -> tuple[Path, list[list[float]]]:
    """A checkpoint of 2 ranks after 3 steps, and the losses of the next ones."""
    path = tmp_path_factory.mktemp("several") / "step"
    return path, rank_pools.pool(2).run(cases.save_and_go_on, str(path), 3)  # type: ignore[attr-defined]


def test_keys_begin_with_the_names_of_their_models(saved: tuple[Path, list[list[float]]], capsys: pytest.CaptureFixture[str]) -> None:
    index = read_index(saved[0])
    assert {key.partition(".")[0] for key in index.stored} == {"actor", "critic", "joint", "head"}
    assert {"actor.0.weight", "actor.0.weight.moment1_0", "joint.2.bias.moment2_0", "critic.1._mean", "head.0.bias.moment1_0"} <= {
        *index.stored
    }
    assert all(len(index.stored[key]) == 1 for key in index.stored if key.startswith("head."))
    assert main(["verify", str(saved[0])]) == 0
    assert main(["inspect", str(saved[0])]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_resumed_run_goes_on(saved: tuple[Path, list[list[float]]], world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    path, losses = saved
    again = tmp_path / "again"
    results = ranks(world_size).run(cases.load_and_go_on, str(path), 3, str(again))
    assert all(is_exact for _, is_exact in results)
    if world_size == 2:
        assert [after for after, _ in results] == losses
    # With BatchNorm each rank normalises its own part of the batch, so the first loss of another number of ranks is another.
    assert main(["diff", str(path), str(again)]) == 0


def test_replicas_of_several_models(tmp_path: Path, ranks: Ranks) -> None:
    """Each element is stored once, and part of it by each replica; replicas go on bit for bit, and another number of ranks loads it."""
    path, again = tmp_path / "step", tmp_path / "again"
    results = ranks(4).run(cases.save_replicas, str(path), 3)
    for _, saved, text in results:
        assert saved == results[0][1] or saved == results[1][1]
        assert "of several, head is plain and others are sharded" in text
    files = [load_file(path / f"{rank}_0.safetensors") for rank in range(4)]
    index = read_index(path)
    for key in index.stored:
        assert sum(file[key].size for file in files if key in file) == int(np.prod(index.global_shape(key))), key
    elements = [sum(values.size for values in file.values()) for file in files]
    assert sum(elements[2:]) > 0.1 * sum(elements)  # of the second replica; smallest pieces aren't divided
    for rank, (losses, pieces) in enumerate(ranks(4).run(cases.load_replicas, str(path), 3, 2, str(again))):
        assert (losses, pieces) == results[rank][:2]
    assert main(["diff", str(path), str(again)]) == 0
    ranks(3).run(cases.load_replicas, str(path), 3, 0, str(tmp_path / "of 3"))
    assert main(["diff", str(path), str(tmp_path / "of 3")]) == 0


def stored_values(path: Path, key: str) -> np.ndarray:
    """What the files hold, as the safetensors package reads them."""
    files = [load_file(path / f"{rank}_0.safetensors") for rank in (0, 1)]
    flat = np.concatenate([file[key].reshape(-1) for file in files if key in file])
    return flat.reshape(read_index(path).global_shape(key))


def test_one_model_out_of_several(saved: tuple[Path, list[list[float]]], ranks: Ranks) -> None:
    path, _ = saved
    for text, unexpected, values, unused in ranks(2).run(cases.load_one, str(path)):
        assert "actor.0.weight" in text
        assert {key.partition(".")[0] for key in unexpected} == {"actor", "joint", "head"}
        assert unused == []
        for key, value in values.items():
            np.testing.assert_array_equal(value, stored_values(path, key))


def test_one_model_is_exported(saved: tuple[Path, list[list[float]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = saved
    assert main(["convert", str(path), "--to", "hf", str(tmp_path / "out"), "--model", "actor", "--recipe", "none"]) == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    values = load_file(file)
    assert sorted(values) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    for key, value in values.items():
        np.testing.assert_array_equal(value, stored_values(path, f"actor.{key}"))
    assert main(["convert", str(path), "--to", "hf", str(tmp_path / "other"), "--model", "actress", "--recipe", "none"]) == 2
    assert "no key that begins with 'actress.'; its keys begin with actor, critic, head, joint" in capsys.readouterr().err


def test_what_can_not_be_saved_is_said(tmp_path: Path, ranks: Ranks) -> None:
    for empty, dotted, twice, other, lacking in ranks(2).run(cases.refusals, str(tmp_path / "step")):
        assert empty.startswith("model: the dict is empty; give one model, or a dict")
        assert "not models under names: 'a.b'" in dotted
        assert "one sharded model is given under several of the names actor, same" in twice
        assert "not models under names: 'actor'" in other
        assert "parameters of AdamW are of a sharded model that was not given" in lacking
    assert not list(tmp_path.iterdir())


def test_what_trains_of_several_models(tmp_path: Path, ranks: Ranks) -> None:
    for base, text, mixed in ranks(2).run(cases.trained_alone, str(tmp_path / "step")):
        assert base == ["actor.0.weight", "joint.0.weight"]
        assert "1 of the base's 2 parameters have other values, shapes or dtypes here: joint.0.weight" in text
        assert "of several, head is plain and others are sharded" in mixed
    stored = read_index(tmp_path / "step").stored
    assert "actor.2.weight" in stored and not {"actor.0.weight", "joint.0.weight"} & {*stored}


def test_a_manager_saves_schedules_and_scalers_by_name(tmp_path: Path, ranks: Ranks) -> None:
    for text, epoch, unchanged, scale, left in ranks(2).run(cases.under_a_manager, str(tmp_path / "root")):
        assert "was saved without the lr_schedulers hot (it has cold, warm)" in text
        assert (epoch, unchanged, scale) == (1, 0, 8.0)
        assert left == ["lr_scheduler 'cold'", "grad_scaler 'critic'"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_average_of_the_weights_as_a_second_model(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    for found, right in ranks(world_size).run(cases.average_beside, str(tmp_path / "step")):
        np.testing.assert_allclose(found, right, rtol=1e-6)
