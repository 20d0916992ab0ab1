"""``convert --optimizer``: each state beside its tensor, cut and transposed alike; numpy knew the values before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import made_models
import numpy as np
import pytest
from harness import RankPool
from published import as_in_paddle, config_of, published
from safetensors.numpy import load_file

from paddle_fsdp_ckpt.errors import CheckpointError, MismatchError
from paddle_fsdp_ckpt.export.huggingface import export_huggingface

Ranks = Callable[[int], RankPool]


def read(directory: Path, stem: str) -> dict[str, np.ndarray]:
    index = json.loads((directory / f"{stem}.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(directory / name) for name in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


@pytest.mark.parametrize(("fused", "workers"), [(True, 1), (True, 3), (False, 2)])
def test_states_lie_as_their_tensors(fused: bool, workers: int, tmp_path: Path, ranks: Ranks) -> None:
    tensors = published("qwen3_moe")
    arrays = as_in_paddle("qwen3_moe", tensors, fused)
    ranks(2).run(made_models.save_states, str(tmp_path / "saved"), arrays, "AdamW", {"moment1": 2.0, "moment2": 4.0})
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config_of("qwen3_moe")))
    shown: list[tuple[int, int]] = []
    report = export_huggingface(
        tmp_path / "saved",
        tmp_path / "model",
        config=tmp_path / "config",
        optimizer=True,
        workers=workers,
        max_shard_nbytes=4000,
        progress=lambda done, total: shown.append((done, total)),
    )
    inside = tmp_path / "model" / "optimizer"
    states = read(inside, "states")
    assert states.keys() == {f"{name}.{state}" for name in tensors for state in ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(states[f"{name}.moment1"], 2 * tensor, name)
        np.testing.assert_array_equal(states[f"{name}.moment2"], 4 * tensor, name)
        np.testing.assert_array_equal(states[f"{name}.beta1_pow_acc"], np.float32([0.9]))
    model = read(tmp_path / "model", "model")
    assert all(np.array_equal(model[name], tensor) for name, tensor in tensors.items()) and model.keys() == tensors.keys()
    described = json.loads((inside / "optimizer.json").read_text())
    assert (described["format_version"], described["step"]) == (1, 3)
    (optimizer,) = described["optimizers"]
    assert (optimizer["class"], optimizer["learning_rate"]) == ("AdamW", {"value": 0.5})
    assert sorted(optimizer["groups"][0]["parameters"]) == sorted(tensors)
    assert report.optimizer_tensors == len(states)
    assert f"{len(states)} tensors with optimizer states" in str(report)
    assert set(report.files) == {path.relative_to(tmp_path / "model").as_posix() for path in (tmp_path / "model").rglob("*.*")}
    total = report.nbytes + report.optimizer_nbytes
    assert shown[-1] == (total, total) and shown == sorted(shown)


def test_master_weights_and_tied_parameters(tmp_path: Path, ranks: Ranks) -> None:
    arrays = {"a.weight": np.random.RandomState(1).standard_normal((4, 3)).astype(np.float32), "b.bias": np.ones(5, np.float32)}
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), arrays, "bfloat16", {"z.weight": "a.weight"}, True)
    export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="none", optimizer=True, master_weights=True)
    states = read(tmp_path / "model" / "optimizer", "states")
    np.testing.assert_array_equal(states["a.weight.master_weight"], arrays["a.weight"])
    assert sorted(name for name in states if name.endswith("master_weight")) == ["a.weight.master_weight", "b.bias.master_weight"]
    np.testing.assert_array_equal(read(tmp_path / "model", "model")["a.weight"], arrays["a.weight"])


def test_one_model_of_several_with_what_it_shares(tmp_path: Path, ranks: Ranks) -> None:
    arrays = {"a.weight": np.random.RandomState(1).standard_normal((4, 3)).astype(np.float32), "b.bias": np.ones(5, np.float32)}
    ranks(1).run(made_models.save_tied_models, str(tmp_path / "saved"), arrays, "a.weight")
    for name in ("actor", "critic"):
        out = tmp_path / name
        export_huggingface(tmp_path / "saved", out, recipe="none", optimizer=True, master_weights=True, dtype="float32", model_name=name)
        states = read(out / "optimizer", "states")
        assert {key.rpartition(".")[2] for key in states if key.startswith("a.weight.")} >= {"moment1", "moment2", "master_weight"}
        np.testing.assert_array_equal(states["a.weight.master_weight"], arrays["a.weight"])
        np.testing.assert_array_equal(read(out, "model")["a.weight"], arrays["a.weight"])
        (optimizer,) = json.loads((out / "optimizer" / "optimizer.json").read_text())["optimizers"]
        assert [group["parameters"] for group in optimizer["groups"]] == [["a.weight", "b.bias"]]


def test_what_can_not_be_exported(tmp_path: Path, ranks: Ranks) -> None:
    arrays = {"a.weight": np.ones((4, 3), np.float32)}
    ranks(1).run(made_models.save_model, str(tmp_path / "bare"), arrays)
    with pytest.raises(CheckpointError, match="holds no states of an optimizer; leave --optimizer"):
        export_huggingface(tmp_path / "bare", tmp_path / "model", recipe="none", optimizer=True)
    ranks(2).run(made_models.save_states, str(tmp_path / "saved"), arrays, "ASGD", {"d": 2.0, "y": 3.0})
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"name": "mine", "rules": [{"source": "a.weight", "targets": ["a.weight"], "transpose": True}]}))
    with pytest.raises(MismatchError, match=r"1 state lies otherwise than its parameter.*'a.weight.y_0' \[1, 12\]"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", recipe=str(recipe), optimizer=True)
    assert not (tmp_path / "model").exists()
    export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="none", optimizer=True)
    states = read(tmp_path / "model" / "optimizer", "states")
    np.testing.assert_array_equal(states["a.weight.d"], 2 * arrays["a.weight"])
    np.testing.assert_array_equal(states["a.weight.y"], np.full((1, 12), 3, np.float32))
