"""A published base into a model of one's own: what may be missing, what may go nowhere, and what errors and reports say of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import huggingface_allowed_cases as cases
import numpy as np
import pytest
from harness import RankPool
from published import HIDDEN, as_in_paddle, published, write_base

from paddle_fsdp_ckpt import HuggingFaceLoadReport

Ranks = Callable[[int], RankPool]
HEAD = {"score.weight": (HIDDEN, 5), "score.bias": (5,)}
ALLOWED = {"allow_missing": ["score.*"], "allow_unexpected": ["lm_head.*"]}


@pytest.mark.parametrize(("world_size", "sharded", "own_names"), [(1, False, True), (1, True, False), (2, True, True), (2, True, False)])
def test_a_base_with_a_new_head(world_size: int, sharded: bool, own_names: bool, tmp_path: Path, ranks: Ranks) -> None:
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors)
    right = as_in_paddle("llama", tensors, fused=not own_names)
    del right["lm_head.weight"]
    if own_names:
        right = {key.replace("llama.", "model."): array for key, array in right.items()}
    shapes = {key: array.shape for key, array in right.items()} | HEAD
    calls = [
        {},
        {"allow_missing": ["score.*"]},
        ALLOWED | {"allow_missing": ("score.weight", "score.b*", "classifier.*")},
        {"allow_missing": "score.*"},
        {"allow_unexpected": [3]},
        ALLOWED | {"allow_missing": ["*"]},
    ]
    results = ranks(world_size).run(cases.load_each, path, shapes, {}, calls, sharded)
    for rank, (rule, tensor, allowed, text, number, every) in enumerate(results):
        assert (rule[0], text[0], number[0]) == ("MismatchError", "CheckpointError", "CheckpointError")
        assert "2 keys are taken by no rule: 'score.bias', 'score.weight'" in rule[1]
        assert "say what may keep its values: allow_missing=['score.*']" in rule[1]
        assert "1 tensor that the model lacks: 'lm_head.weight'" in tensor[1]
        assert "say what may be left out: allow_unexpected=['lm_head.*']" in tensor[1]
        assert "load_huggingface: allow_missing is 'score.*'; give a list of patterns" in text[1]
        assert "load_huggingface: allow_unexpected is [3]; give a list of patterns" in number[1]
        for report, values in (allowed, every):
            assert values.keys() == (set() if rank else shapes.keys())  # rank 0 gathers them
            for key, array in values.items():
                np.testing.assert_array_equal(array, np.full(HEAD[key], cases.BEFORE) if key in HEAD else right[key], err_msg=key)
            unused = ("allow_missing='classifier.*'",) if report is allowed[0] else ()
            there = Path(path)
            assert report == HuggingFaceLoadReport(there, len(tensors) - 1, ("score.bias", "score.weight"), ("lm_head.weight",), unused)
        assert str(allowed[0]).splitlines()[1:] == [
            "- 2 keys missing, left as they were: score.bias, score.weight",
            "- 1 tensor left out: lm_head.weight",
            "- 1 option not needed: allow_missing='classifier.*'",
        ]


def test_on_two_ranks_options_are_the_same_and_masters_stay(tmp_path: Path, ranks: Ranks) -> None:
    tensors = published("llama")
    path = write_base(tmp_path / "base", tensors)
    right = as_in_paddle("llama", tensors, fused=True)
    shapes = {key: array.shape for key, array in right.items() if key != "lm_head.weight"} | HEAD
    for name, message in ranks(2).run(cases.options_that_differ, path, shapes):
        assert name == "RankFailedError"
        assert "the options must be the same on all ranks, and differ" in message and "'allow_missing': ['score.*', 'head.*']" in message
    for masters in ranks(2).run(cases.masters_after, path, shapes, "score.weight", ALLOWED):
        assert {key for key, follows in masters.items() if not follows} <= {"score.weight"}


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_the_files_lack(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    """A fused projection of which a part is missing, a head that ends otherwise, a tied name, and files of which nothing fits."""
    tensors = published("llama")
    right = as_in_paddle("llama", tensors, fused=True)
    del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["lm_head.weight"]
    path = write_base(tmp_path / "base", tensors)
    fused = "llama.layers.0.self_attn.qkv_proj.weight"
    shapes = {key: array.shape for key, array in right.items()} | {"lm_head.weight": (HIDDEN, HIDDEN)}
    calls = [
        {},
        {"allow_missing": ["lm_head.*", fused]},
        {"allow_missing": ["lm_head.*", fused], "allow_unexpected": ["*.0.self_attn.[qv]_proj.weight"]},
        {"recipe": "none", "allow_missing": ["*"], "allow_unexpected": ["*"]},
    ]
    tied = {"score.weight": "llama.embed_tokens.weight"}
    for rank, (needs, half, allowed, nothing) in enumerate(ranks(world_size).run(cases.load_each, path, shapes, {}, calls, True)):
        assert "'lm_head.weight' needs 'lm_head.weight', which is missing" in needs[1]
        assert f"say what may keep its values: allow_missing=['{fused[:-6]}*', 'lm_head.*']" in needs[1]
        assert (
            "2 tensors that the model lacks: 'model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.v_proj.weight'" in half[1]
        )
        assert "not one tensor" in nothing[1]
        report, values = allowed
        assert values.keys() == (set() if rank else shapes.keys())
        assert report.missing == (fused, "lm_head.weight")
        for key, array in values.items():
            np.testing.assert_array_equal(array, np.full(shapes[key], cases.BEFORE) if key in report.missing else right[key], err_msg=key)
    calls = [calls[2] | {"allow_missing": ["lm_head.*", fused, "score.*"]}]
    results = ranks(world_size).run(cases.load_each, path, shapes, tied, calls, True)
    assert all(report.missing == (fused, "lm_head.weight") for ((report, _),) in results)
    np.testing.assert_array_equal(results[0][0][1]["llama.embed_tokens.weight"], right["llama.embed_tokens.weight"])
