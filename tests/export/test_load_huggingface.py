"""Published weights straight into models: each value is one that numpy knew before."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
from harness import RankPool
from published import as_in_paddle, config_of, published
from safetensors.numpy import save_file

Ranks = Callable[[int], RankPool]


def write_model(path: Path, arrays: Mapping[str, np.ndarray], config: Any = None) -> str:
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    save_file(dict(arrays), path / "model.safetensors")
    return str(path)


def shapes_of(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {key: array.shape for key, array in arrays.items()}


@pytest.mark.parametrize(
    ("family", "fused", "world_size", "sharded"),
    [
        ("llama", False, 2, True),
        ("llama", True, 3, True),
        ("qwen2", True, 2, True),
        ("qwen2_moe", False, 1, True),
        ("qwen2_moe", True, 3, True),
        ("qwen3", True, 1, False),
        ("qwen3", False, 3, True),
        ("qwen3_moe", True, 2, True),
    ],
)
def test_families(family: str, fused: bool, world_size: int, sharded: bool, tmp_path: Path, ranks: Ranks) -> None:
    tensors = published(family, biases=family.startswith("qwen2"))
    path = write_model(tmp_path / "model", tensors, config_of(family))
    right = as_in_paddle(family, tensors, fused)
    found = ranks(world_size).run(made_models.load_published, path, shapes_of(right), "float32", {}, {}, sharded)[0]
    assert not isinstance(found, str), found
    assert found.keys() == right.keys()
    for key, array in right.items():
        assert found[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_that_paddle_cut(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    arrays = {"a.weight": np.arange(77, dtype=np.float32).reshape(7, 11), "b.weight": np.arange(40, dtype=np.float32).reshape(5, 8)}
    path = write_model(tmp_path / "model", arrays)
    assert sum(ranks(world_size).run(made_models.load_where_paddle_cut, path, shapes_of(arrays))) == 77 + 40


@pytest.mark.parametrize("world_size", [1, 3])
def test_stacked_experts(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    stacked = np.random.RandomState(1).standard_normal((5, 6, 8)).astype(np.float32)
    tensors = {f"{name}.{i}": np.ascontiguousarray(stacked[i, :, k : k + 4].T) for i in range(5) for name, k in (("gate", 0), ("up", 4))}
    tensors |= {"rows.a": stacked[0, :2], "rows.b": stacked[0, 2:4]}
    rules = [
        {"source": "experts", "targets": ["gate.{i}", "up.{i}"], "unstack": "i", "transpose": True, "split": "equal"},
        {"source": "rows", "targets": ["rows.a", "rows.b"], "split": "equal"},
    ]
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "mine", "rules": rules}))
    path = write_model(tmp_path / "model", tensors)
    shapes = {"experts": stacked.shape, "rows": (4, 8)}
    found = ranks(world_size).run(made_models.load_published, path, shapes, "float32", {}, {"recipe": str(tmp_path / "recipe.json")}, True)[
        0
    ]
    assert not isinstance(found, str), found
    np.testing.assert_array_equal(found["experts"], stacked)
    np.testing.assert_array_equal(found["rows"], stacked[0, :4])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("written", [False, True])
def test_tied_weights(family: str, written: bool, tmp_path: Path, ranks: Ranks) -> None:
    tensors = published(family)
    embedding = "llama.embed_tokens.weight" if family == "llama" else "model.embed_tokens.weight"
    right = as_in_paddle(family, tensors, fused=False)
    del tensors["lm_head.weight"]
    if written:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    path = write_model(tmp_path / "model", tensors, config_of(family, tie_word_embeddings=True))
    head = right.pop("lm_head.weight").shape
    found = ranks(2).run(made_models.load_published, path, shapes_of(right), "float32", {"lm_head.weight": embedding}, {}, True)[0]
    assert not isinstance(found, str), found
    np.testing.assert_array_equal(found[embedding], right[embedding])
    # Nor does a model need a name for its head, which looks up the embedding itself.
    found = ranks(2).run(made_models.load_published, path, shapes_of(right), "float32", {}, {}, True)[0]
    assert not isinstance(found, str), found
    assert found.keys() == right.keys() and all(np.array_equal(found[key], right[key]) for key in right)
    if written:
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
        other = write_model(tmp_path / "other", tensors, config_of(family, tie_word_embeddings=True))
        found = ranks(2).run(made_models.load_published, other, shapes_of(right), "float32", {}, {}, True)[0]
        assert isinstance(found, str) and "has 1 tensor that the model lacks: 'lm_head.weight'" in found
    # A model that doesn't tie them begins with equal ones.
    shapes = shapes_of(right) | {"lm_head.weight": head}
    found = ranks(2).run(made_models.load_published, path, shapes, "float32", {}, {}, True)[0]
    assert not isinstance(found, str), found
    np.testing.assert_array_equal(found["lm_head.weight"], right[embedding].T if family == "llama" else right[embedding])


def test_other_dtypes(tmp_path: Path, ranks: Ranks) -> None:
    arrays = {"a.weight": np.random.RandomState(2).standard_normal((7, 5)).astype(np.float16)}
    arrays |= {f"b{number}": np.arange(5, dtype=np.float16) for number in range(6)}
    path = write_model(tmp_path / "model", arrays)
    options = {"recipe": "none"}
    refused = ranks(2).run(made_models.load_published, path, shapes_of(arrays), "float32", {}, options, True)
    (said,) = (part for part in str(refused[0]).splitlines() if "float16" in part)
    assert "7 keys are float32 in the model and float16 in the files (cast=True converts them): 'b0', 'b1', " in said
    assert said.endswith("... (2 more)") and said.count("float16") == 1
    found = ranks(2).run(made_models.load_published, path, shapes_of(arrays), "float32", {}, options | {"cast": True}, True)[0]
    assert not isinstance(found, str), found
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array.astype(np.float32))
    assert all(all(one.values()) for one in ranks(2).run(made_models.masters_follow, path, shapes_of(arrays)))


def test_a_quantized_model(tmp_path: Path, ranks: Ranks) -> None:
    tensors = published("qwen3")
    scales = {f"{name}_scale": np.ones((array.shape[0], 1), np.float32) for name, array in tensors.items() if "_proj." in name}
    whole = {name: array.astype(np.int8) if f"{name}_scale" in scales else array for name, array in tensors.items()}
    config = config_of("qwen3", quantization_config={"quant_method": "compressed-tensors"})
    path = write_model(tmp_path / "model", whole | scales, config)
    shapes = shapes_of(as_in_paddle("qwen3", tensors, fused=False))
    options = {"cast": True, "allow_unexpected": ["*_scale"]}
    for result in ranks(2).run(made_models.load_published, path, shapes, "float32", {}, options, True):
        assert "says that the model is quantized (compressed-tensors); take the model as it is published in bfloat16" in result


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (
            {"a": (3, 2), "b": (4,), "c": (2,)},
            {"recipe": "none"},
            "'c' needs 'c', which is missing. Or say what may keep its values: allow_missing=['c']",
        ),
        (
            {"a": (3, 2)},
            {"recipe": "none"},
            "has 1 tensor that the model lacks: 'b'; nothing was changed. Or say what may be left out: allow_unexpected=['b']",
        ),
        ({"a": (2, 3), "b": (4,)}, {"recipe": "none"}, "'a' needs 'a' of shape [2, 3], and it has [3, 2]"),
        ({"a": (3, 2), "b": (4,)}, {}, "which family the model is of can't be told"),
        ({"a": (3, 2), "b": (4,)}, {"recipe": "qwen3"}, "2 keys are taken by no rule"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_does_not_fit(
    world_size: int, shapes: dict[str, tuple[int, ...]], options: dict[str, Any], message: str, tmp_path: Path, ranks: Ranks
) -> None:
    path = write_model(tmp_path / "model", {"a": np.zeros((3, 2), np.float32), "b": np.zeros(4, np.float32)})
    results = ranks(world_size).run(made_models.load_published, path, shapes, "float32", {}, options, True)
    assert all(isinstance(one, str) for one in results)
    assert any(message in str(one) for one in results), results
