"""A published base into a model of which some tensors have another shape: a larger vocabulary, or a new head under the old one's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import huggingface_allowed_cases as cases
import numpy as np
import pytest
from harness import RankPool
from published import GROUPS, HIDDEN, INNER, VOCABULARY, WIDTH, Arrays, as_in_paddle, published, write_base, write_tied_base

from paddle_fsdp_ckpt.huggingface_report import OtherShape

Ranks = Callable[[int], RankPool]
LARGER = VOCABULARY + 4
EMBEDDING, HEAD = "llama.embed_tokens.weight", "lm_head.weight"
GROWN = {EMBEDDING: (LARGER, HIDDEN), HEAD: (HIDDEN, LARGER)}
STORED = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
BOTH = tuple(OtherShape(key, {STORED[key]: (VOCABULARY, HIDDEN)}, GROWN[key]) for key in GROWN)
REFUSED = {
    key: f"'{key}' needs '{name}' of shape [{LARGER}, {HIDDEN}], and it has [{VOCABULARY}, {HIDDEN}]" for key, name in STORED.items()
}


def assert_values(values: Arrays, right: Arrays, shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
    """What ``right`` lacks must be as it was before."""
    assert values.keys() == (set() if rank else shapes.keys())  # rank 0 gathers them
    for key, array in values.items():
        np.testing.assert_array_equal(array, right[key] if key in right else np.full(shapes[key], cases.BEFORE), err_msg=key)


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (2, True)])
def test_a_larger_vocabulary(world_size: int, sharded: bool, tmp_path: Path, ranks: Ranks) -> None:
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors)
    right = as_in_paddle("llama", tensors, fused=True)
    shapes = {key: array.shape for key, array in right.items()} | GROWN
    offered = {"allow_other_shape": [EMBEDDING, HEAD]}
    calls = [{}, {"allow_other_shape": [EMBEDDING]}, {"allow_other_shape": EMBEDDING}, offered, {"allow_other_shape": ["*.norm.*", "*"]}]
    results = ranks(world_size).run(cases.load_each, path, shapes, {}, calls, sharded)
    for rank, (strict, half, text, allowed, every) in enumerate(results):
        assert (strict[0], half[0], text[0]) == ("MismatchError", "MismatchError", "CheckpointError")
        assert all(words in strict[1] for words in REFUSED.values()) and "nothing was changed" in strict[1]
        assert strict[1].endswith(f". Or say what may keep its values: allow_other_shape={offered['allow_other_shape']}")
        assert REFUSED[HEAD] in half[1] and EMBEDDING not in half[1] and half[1].endswith(f"allow_other_shape=['{HEAD}']")
        assert f"load_huggingface: allow_other_shape is '{EMBEDDING}'; give a list of patterns" in text[1]
        for report, values in (allowed, every):
            assert_values(values, {key: array for key, array in right.items() if key not in GROWN}, shapes, rank)
            assert (report.tensors, report.missing, report.unexpected, report.other_shape) == (len(tensors) - 2, (), (), BOTH)
        assert allowed[0].unused_options == () and every[0].unused_options == ("allow_other_shape='*.norm.*'",)
        shown = [f"'{key}': '{name}' [{VOCABULARY}, {HIDDEN}] there, {list(GROWN[key])} here" for key, name in STORED.items()]
        assert str(allowed[0]).splitlines()[1:] == [f"- 2 keys of another shape there, left as they were: {', '.join(shown)}"]


@pytest.mark.parametrize("is_said", [False, True])
def test_tied_names_count_as_one(is_said: bool, tmp_path: Path, ranks: Ranks) -> None:
    """Qwen's head lies as the embedding does; whether config.json says that they are one or not, one pattern is enough."""
    path, right = write_tied_base(tmp_path / "base", is_said)
    embedding = "model.embed_tokens.weight"
    shapes = {key: array.shape for key, array in right.items() if key != HEAD} | {embedding: (LARGER, HIDDEN)}
    calls = [{"recipe": "qwen2"}, *({"recipe": "qwen2", "allow_other_shape": [one]} for one in (HEAD, embedding))]
    for rank, (strict, *allowed) in enumerate(ranks(2).run(cases.load_each, path, shapes, {HEAD: embedding}, calls, True)):
        assert strict[1].endswith(f"allow_other_shape=['{HEAD}']")
        for report, values in allowed:
            assert_values(
                values,
                {key: array for key, array in right.items() if key not in (HEAD, embedding)},
                shapes | {HEAD: (LARGER, HIDDEN)},
                rank,
            )
            assert [(one.key, one.now) for one in report.other_shape] == [(HEAD, (LARGER, HIDDEN))]
            assert report.unused_options == report.unexpected == report.missing == ()


def test_fused_projections_and_what_is_missing_besides(tmp_path: Path, ranks: Ranks) -> None:
    """One that can't be split as the files' heads are, one whose halves are wider, and a key that the files lack: errors offer both."""
    tensors = published("llama")
    right = as_in_paddle("llama", tensors, fused=True)
    del tensors["model.norm.weight"]
    path = write_base(tmp_path / "base", tensors)
    heads, inner = "llama.layers.0.self_attn.qkv_proj.weight", "llama.layers.1.mlp.gate_up_fused_proj.weight"
    shapes = {key: array.shape for key, array in right.items()} | {heads: (HIDDEN, 23), inner: (HIDDEN, 2 * INNER + 2)}
    offered = {"allow_missing": ["llama.norm.*"], "allow_other_shape": [heads, inner]}
    for rank, (strict, allowed) in enumerate(ranks(2).run(cases.load_each, path, shapes, {}, [{}, offered], True)):
        assert "'llama.norm.weight' needs 'model.norm.weight', which is missing" in strict[1]
        assert f"'{heads}': 23 rows can't be those of 4 query heads and 2 key-value heads" in strict[1]
        assert f"'{inner}' needs 'model.layers.1.mlp.up_proj.weight' of shape [{INNER + 1}, {HIDDEN}]" in strict[1]
        assert strict[1].endswith(f"what may keep its values: {', '.join(f'{name}={one}' for name, one in offered.items())}")
        report, values = allowed
        assert_values(values, {key: array for key, array in right.items() if key not in (heads, inner, "llama.norm.weight")}, shapes, rank)
        assert report.missing == ("llama.norm.weight",) and report.unexpected == report.unused_options == ()
        parts = {"q": HIDDEN, "k": GROUPS * WIDTH, "v": GROUPS * WIDTH}
        stored = {f"model.layers.0.self_attn.{one}_proj.weight": (rows, HIDDEN) for one, rows in parts.items()}
        assert report.other_shape[0] == OtherShape(heads, stored, (HIDDEN, 23)) and report.other_shape[1].key == inner


@pytest.mark.parametrize("width", [5, HIDDEN])
def test_a_new_head_in_a_self_written_llama(width: int, tmp_path: Path, ranks: Ranks) -> None:
    """How the head lies can't be told where it is square, and doesn't matter where it isn't read."""
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors)
    right = {key.replace("llama.", "model."): array for key, array in as_in_paddle("llama", tensors, fused=False).items()}
    shapes = {key: array.shape for key, array in right.items()} | {HEAD: (HIDDEN, width)}
    for rank, ((report, values),) in enumerate(
        ranks(2).run(cases.load_each, path, shapes, {}, [{"allow_other_shape": ["lm_head.*"]}], True)
    ):
        assert_values(values, {key: array for key, array in right.items() if key != HEAD}, shapes, rank)
        assert report.other_shape == (OtherShape(HEAD, {HEAD: (VOCABULARY, HIDDEN)}, (HIDDEN, width)),)


def test_what_no_pattern_helps(tmp_path: Path, ranks: Ranks) -> None:
    """A configuration that contradicts files that fit, and a model of which nothing has the shape that it has there."""
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors, vocab_size=LARGER)
    fitting = {key: array.shape for key, array in as_in_paddle("llama", tensors, fused=False).items()}
    wider = {key: tuple(size + 1 for size in shape) for key, shape in fitting.items()}
    calls = [{}, {"allow_other_shape": ["*"]}]
    for strict, allowed in ranks(2).run(cases.load_each, path, fitting, {}, calls, True):
        assert strict == allowed and f"vocab_size and hidden_size in '{path}/config.json' make it [{LARGER}, {HIDDEN}]" in strict[1]
    for strict, allowed in ranks(2).run(cases.load_each, path, wider, {}, calls, True):
        assert "'llama.norm.weight' needs 'model.norm.weight' of shape [13], and it has [12]" in strict[1] and "Or say" not in strict[1]
        assert f"not one tensor of '{path}' goes into the model" in allowed[1]


def test_masters_stay(tmp_path: Path, ranks: Ranks) -> None:
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors)
    shapes = {key: array.shape for key, array in as_in_paddle("llama", tensors, fused=True).items()} | GROWN
    for masters in ranks(2).run(cases.masters_after, path, shapes, HEAD, {"allow_other_shape": list(GROWN)}):
        assert {key for key, follows in masters.items() if not follows} <= {HEAD}
