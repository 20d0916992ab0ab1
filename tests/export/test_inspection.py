"""What ``inspect`` says of checkpoints whose contents are known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import made_models
import numpy as np
import pytest
from harness import RankPool

from paddle_fsdp_ckpt.errors import CheckpointError, IncompleteCheckpointError, size_text
from paddle_fsdp_ckpt.export import values
from paddle_fsdp_ckpt.export.inspection import Amount, Inspection, Steps, inspect
from paddle_fsdp_ckpt.export.roots import entries_of, verify_root
from paddle_fsdp_ckpt.export.statistics import Statistics
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.reserved_keys import METRICS_KEY
from paddle_fsdp_ckpt.storage.verify import verify

Ranks = Callable[[int], RankPool]

ARRAYS = {
    "first.weight": np.random.RandomState(3).standard_normal((7, 5)).astype(np.float32),
    "first.bias": np.array([np.nan, -np.inf, 1.0, 2.5, np.nan], np.float32),
}


def inspect_one(path: Path, **options: object) -> Inspection:
    found = inspect(path, **options)  # type: ignore[arg-type]
    assert isinstance(found, Inspection)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_it_holds(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "saved"
    ranks(world_size).run(made_models.save_model, str(path), ARRAYS, "bfloat16", {"z": "first.weight"}, True)
    found = inspect_one(path)
    assert (found.step, found.world_size, found.files, found.is_good) == (3, world_size, world_size + 1, True)
    assert found.nbytes == verify(path).nbytes == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    assert found.tied == (("first.weight", "z"),)
    assert found.amounts == (
        Amount("parameters and buffers", "bfloat16", 3, 75, 150),
        Amount("master weights", "float32", 2, 40, 160),
        Amount("beta1_pow_acc", "float32", 2, 2, 8),
        Amount("beta2_pow_acc", "float32", 2, 2, 8),
        Amount("moment1", "float32", 2, 40, 160),
        Amount("moment2", "float32", 2, 40, 160),
    )
    (optimizer,) = found.optimizers
    assert optimizer.cls == "AdamW"
    assert [group.parameters for group in optimizer.groups] == [2]
    text = str(found)
    assert "AdamW, learning rate 0.001\n  2 parameters: weight_decay 0.01, no grad_clip\n    amsgrad False, beta1 0.9, " in text
    assert "tied      first.weight = z" in text
    assert "health    sizes and headers are right" in text
    assert json.loads(json.dumps(found.to_json()))["world_size"] == world_size


def test_keys_and_ranges(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), {"w": np.zeros((40, 5), np.float32), "b": np.zeros(3, np.float32)})
    (found,) = inspect_one(tmp_path / "saved", keys="w*").keys
    # 203 elements and padding to 64 make 320; the first of two ranks keeps 192 of them.
    assert (found.key, found.dtype, found.shape, found.ranges) == ("w", "float32", (40, 5), ("0: [0, 192)", "1: [192, 200)"))
    assert len(inspect_one(tmp_path / "saved", keys="*").keys) == 2
    numbers = {f"layers.{i}.{name}": np.zeros(3, np.float32) for i in (10, 2, 1) for name in ("w10", "w9")}
    ranks(2).run(made_models.save_model, str(tmp_path / "numbers"), numbers)
    names = [one.key for one in inspect_one(tmp_path / "numbers", keys="*").keys]
    assert names == [f"layers.{i}.{name}" for i in (1, 2, 10) for name in ("w9", "w10")]
    with pytest.raises(IncompleteCheckpointError, match="no key of the form 'x'; it has b, w"):
        inspect(tmp_path / "saved", keys="x")
    with pytest.raises(IncompleteCheckpointError, match=r"it has layers\.1\.w9, .*, layers\.10\.w9, \.\.\. \(1 more\)$"):
        inspect(tmp_path / "numbers", keys="x")


def test_statistics(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "BATCH_NUMEL", 4)
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), ARRAYS)
    weight, bias = sorted(inspect_one(tmp_path / "saved", statistics=True).keys, key=lambda one: -len(one.key))
    right = ARRAYS["first.weight"].astype(np.float64)
    assert weight.statistics is not None
    assert (weight.statistics.minimum, weight.statistics.maximum) == (right.min(), right.max())
    assert weight.statistics.mean == pytest.approx(right.mean(), rel=1e-12)
    assert bias.statistics == Statistics(-np.inf, 2.5, 1.75, 2, 1)
    ranks(2).run(made_models.save_model, str(tmp_path / "low"), ARRAYS, "bfloat16")
    (bias,) = inspect_one(tmp_path / "low", keys="*bias", statistics=True).keys
    assert bias.statistics == Statistics(-np.inf, 2.5, 1.75, 2, 1)


def test_stock_paddle(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(made_models.save_with_stock, str(tmp_path / "saved"), {"a.weight": np.ones((4, 3), np.float32)}, {})
    found = inspect_one(tmp_path / "saved", keys="*")
    assert (found.kind, found.step, found.world_size, found.created) == ("a checkpoint of stock Paddle", None, 2, None)
    assert found.amounts == (Amount("parameters and buffers", "float32", 1, 12, 48),)
    assert found.optimizers == ()
    assert "every key is whole; stock Paddle keeps no digests of values" in str(found)


def test_what_is_wrong_besides_keys(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_by_manager, str(tmp_path), ARRAYS, 0.5, np.zeros(2, np.float32), 0.25, 0.9)
    (step,) = (one for one in tmp_path.iterdir() if one.is_dir())
    whole = inspect_one(step)
    assert whole.is_good and whole.health == "whole"
    index = read_index(step)
    ((*_, offset),) = index.stored[METRICS_KEY]
    with open(step / "0_0.safetensors", "r+b") as file:
        file.seek(offset)
        file.write(b"x")
    found = inspect_one(step)
    assert not found.is_good and found.problems == () and found.health == "1 thing is wrong"
    assert "at or near the metrics and " in str(found)
    assert "key is not whole" not in str(found) and "nothing was changed" not in str(found)
    (step / "0.metadata").unlink()
    found = inspect_one(step)
    assert found.health == "2 things are wrong"
    assert f"'{step}' lacks the file 0.metadata; " in str(found) and "Only stock Paddle reads this file" in str(found)


def test_a_root_of_many(tmp_path: Path, ranks: Ranks) -> None:
    settings = {"learning_rate": 0.1, "extra_state": None}
    for step in (10, 9):
        arguments = (ARRAYS, [(list(ARRAYS), {})], settings | {"step": step})
        ranks(1).run(made_models.save_groups, str(tmp_path / f"step_{step}"), *arguments)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    (tmp_path / ".step_11.staging-0123456789abcdef").mkdir()
    found = inspect(tmp_path)
    assert isinstance(found, Steps)
    assert [(one.step, one.path.name) for one in found.checkpoints] == [(9, "step_9"), (10, "step_10")]
    assert found.is_good
    assert [line.split()[:3] for line in str(found).splitlines()[3:]] == [["9", "step_9", "1"], ["10", "step_10", "1"]]
    with pytest.raises(CheckpointError, match="holds 2 checkpoints; keys can be listed of one of them: step_10, step_9"):
        inspect(tmp_path, keys="*")
    (tmp_path / "step_9" / "0_0.safetensors").unlink()
    found = inspect(tmp_path)
    assert not found.is_good
    assert "- step_9: " in str(found)
    assert str(found).splitlines()[0] == str(verify_root(entries_of(tmp_path))).splitlines()[0]
    assert str(found).startswith(f"'{tmp_path}': 2 checkpoints, 1 of them damaged or incomplete\n")
    shutil.rmtree(tmp_path / "step_9")
    shutil.rmtree(tmp_path / "step_10")
    with pytest.raises(IncompleteCheckpointError, match="is not a checkpoint"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1234, "1.23 KB"), (999_600, "1 MB"), (61 * 10**9, "61 GB"), (5 * 10**18, "5e+03 PB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
