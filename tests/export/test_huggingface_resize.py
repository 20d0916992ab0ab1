"""A published base into a model of which one dimension of some tensors has another size: what both have is loaded, the rest stays."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_allowed_cases as cases
import numpy as np
import pytest
from harness import RankPool
from published import HIDDEN, INNER, VOCABULARY, Arrays, as_in_paddle, published, write_base, write_tied_base

from paddle_fsdp_ckpt.loading.report import Resized

Ranks = Callable[[int], RankPool]
Shapes = Mapping[str, tuple[int, ...]]
EMBEDDING, HEAD = "llama.embed_tokens.weight", "lm_head.weight"
RESIZE: dict[str, Any] = {"resize": ["*.embed_tokens.weight", "lm_head.weight"]}


def vocabulary_of(size: int) -> dict[str, tuple[int, ...]]:
    return {EMBEDDING: (size, HIDDEN), HEAD: (HIDDEN, size)}


def leading(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Values where both have such, and else those that the model had before."""
    result = np.full(shape, cases.BEFORE, np.float32)
    box = tuple(slice(0, min(sizes)) for sizes in zip(array.shape, shape, strict=True))
    result[box] = array[box]
    return result


def assert_leading(values: Arrays, right: Arrays, shapes: Shapes, rank: int) -> None:
    assert values.keys() == (set() if rank else shapes.keys())  # rank 0 gathers them
    for key, array in values.items():
        np.testing.assert_array_equal(array, leading(right[key], shapes[key]), err_msg=key)


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (1, True), (2, True), (3, True)])
@pytest.mark.parametrize("size", [VOCABULARY + 4, VOCABULARY - 3])
@pytest.mark.parametrize("is_said", [False, True])
def test_another_vocabulary(world_size: int, sharded: bool, size: int, is_said: bool, tmp_path: Path, ranks: Ranks) -> None:
    """The embedding by rows, the head, which lies the other way round there, by columns; whether config.json has the new size or not."""
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors, **({"vocab_size": size} if is_said else {}))
    right = as_in_paddle("llama", tensors, fused=True)
    shapes = {key: array.shape for key, array in right.items()} | vocabulary_of(size)
    calls = [{}, {"resize": [HEAD]}, {"resize": HEAD}, RESIZE | {"allow_other_shape": ["*"]}]
    for rank, (strict, half, text, (report, values)) in enumerate(ranks(world_size).run(cases.load_each, path, shapes, {}, calls, sharded)):
        offered = f"rows or columns that both have are loaded by resize={[EMBEDDING, HEAD]}. Or say what may keep its values: allow_other"
        assert strict[0] == half[0] == "MismatchError" and offered in strict[1] and f"resize=['{EMBEDDING}']" in half[1]
        assert "load_huggingface: resize is" in text[1]
        assert_leading(values, right, shapes, rank)
        assert report.resized == (
            Resized(EMBEDDING, "model.embed_tokens.weight", (VOCABULARY, HIDDEN), (size, HIDDEN)),
            Resized(HEAD, "lm_head.weight", (HIDDEN, VOCABULARY), (HIDDEN, size)),
        )
        assert report.tensors == len(tensors) and not (report.missing or report.unexpected or report.other_shape)
        assert report.unused_options == ("allow_other_shape='*'",)
        what = "4 rows left as they were" if size > VOCABULARY else "3 rows of it left out"
        assert f"'{EMBEDDING}': [{VOCABULARY}, {HIDDEN}] of 'model.embed_tokens.weight' in it, [{size}, {HIDDEN}] here, {what}" in str(
            report
        )


@pytest.mark.parametrize("is_said", [False, True])
@pytest.mark.parametrize("size", [VOCABULARY + 4, VOCABULARY - 3])
def test_tied_names_count_as_one(is_said: bool, size: int, tmp_path: Path, ranks: Ranks) -> None:
    path, right = write_tied_base(tmp_path / "base", is_said)
    embedding = "model.embed_tokens.weight"
    shapes = {key: array.shape for key, array in right.items() if key != HEAD} | {embedding: (size, HIDDEN)}
    calls = [{"recipe": "qwen2", "resize": [one]} for one in (HEAD, embedding)]
    for rank, loads in enumerate(ranks(2).run(cases.load_each, path, shapes, {HEAD: embedding}, calls, True)):
        for report, values in loads:
            assert_leading(values, right, shapes | {HEAD: (size, HIDDEN)}, rank)
            assert [(one.key, one.now) for one in report.resized] == [(HEAD, (size, HIDDEN))] and report.unused_options == ()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("size", [INNER + 5, INNER - 3])
def test_matrices_that_lie_the_other_way_round(world_size: int, size: int, tmp_path: Path, ranks: Ranks) -> None:
    """By the rows of the files' matrices, and by their columns."""
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors)
    right = as_in_paddle("llama", tensors, fused=False)
    inner = {key: array.shape for key, array in right.items() if ".mlp." in key}
    shapes = {key: array.shape for key, array in right.items()}
    shapes |= {key: tuple(size if one == INNER else one for one in shape) for key, shape in inner.items()}
    for rank, ((report, values),) in enumerate(ranks(world_size).run(cases.load_each, path, shapes, {}, [{"resize": ["*.mlp.*"]}], True)):
        assert_leading(values, right, shapes, rank)
        assert [one.key for one in report.resized] == sorted(inner)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("size", [VOCABULARY + 4, VOCABULARY - 3])
@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_without_a_recipe(world_size: int, size: int, stored: str, tmp_path: Path, ranks: Ranks) -> None:
    """A head that lies as the model's Linear does, whose columns are a part of each row; with a cast too."""
    random = np.random.RandomState(3)
    old, new = ({"embed.weight": (one, HIDDEN), "head.weight": (HIDDEN, one), "head.bias": (one,)} for one in (VOCABULARY, size))
    tensors = {key: random.standard_normal(shape).astype(stored) for key, shape in (old | {"norm": (5,)}).items()}
    path = write_base(tmp_path / "base", tensors)
    shapes = new | {"norm": (5,)}
    calls = [{"recipe": "none", "resize": ["embed.*", "head.*"], "cast": stored != "float32"}]
    for rank, ((report, values),) in enumerate(ranks(world_size).run(cases.load_each, path, shapes, {}, calls, True)):
        assert_leading(values, {key: array.astype(np.float32) for key, array in tensors.items()}, shapes, rank)
        assert [one.key for one in report.resized] == sorted(new)


def test_what_is_made_of_several_tensors_is_not_resized(tmp_path: Path, ranks: Ranks) -> None:
    """Nor what differs in two dimensions; the error offers what it can, which leads out."""
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors)
    right = as_in_paddle("llama", tensors, fused=True)
    fused, both = "llama.layers.1.mlp.gate_up_fused_proj.weight", "llama.layers.0.mlp.down_proj.weight"
    shapes = {key: array.shape for key, array in right.items()} | vocabulary_of(VOCABULARY + 1)
    shapes |= {fused: (HIDDEN, 2 * INNER + 2), both: (INNER + 1, HIDDEN + 1)}
    ((strict, every),) = ranks(1).run(cases.load_each, path, shapes, {}, [{}, {"resize": ["*"]}], True)
    for key in (fused, both):
        assert f"'{key}' needs" in every[1]
    assert "resize=" not in every[1] and EMBEDDING not in every[1]
    offered = {name: ast.literal_eval(text) for name, text in re.findall(r"(resize|allow_\w+)=(\[[^\]]*\])", strict[1])}
    assert offered == {"resize": [EMBEDDING, HEAD], "allow_other_shape": [EMBEDDING, both, fused, HEAD]}
    for rank, ((report, values),) in enumerate(ranks(2).run(cases.load_each, path, shapes, {}, [offered], True)):
        kept = {key: np.zeros((0, 0), np.float32) for key in (fused, both)}
        assert_leading(values, right | kept, shapes, rank)
        assert [one.key for one in report.resized] == [EMBEDDING, HEAD] and {one.key for one in report.other_shape} == {fused, both}


def test_masters_follow(tmp_path: Path, ranks: Ranks) -> None:
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors)
    shapes = {key: array.shape for key, array in as_in_paddle("llama", tensors, fused=True).items()} | vocabulary_of(VOCABULARY + 4)
    for masters in ranks(2).run(cases.masters_after, path, shapes, "none", RESIZE):
        assert all(masters.values())
