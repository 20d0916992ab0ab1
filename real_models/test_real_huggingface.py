"""A trained model of PaddleFormers becomes one of Hugging Face's transformers with the same logits, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_cases
import numpy as np
import pytest
import torch_cases
from harness import RankPool
from shared_settings import VOCABULARY

from paddle_fsdp_ckpt.cli.main import main

TOKENS = np.random.RandomState(8).randint(0, VOCABULARY, [2, 24])
FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
FAMILIES = ("qwen3_moe", "qwen3", "llama")
CASES = [(family, changes) for family in (*FAMILIES, "qwen2", "qwen2_moe") for changes in ({}, FUSED)]
NAMES = [f"{family}{'-fused' if changes else ''}" for family, changes in CASES]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=NAMES)
def test_a_trained_model_is_read_by_transformers(
    ranks: Callable[[int], RankPool],
    single: RankPool,
    torch_process: RankPool,
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
) -> None:
    checkpoint, configuration, converted = (str(tmp_path / name) for name in ("checkpoint", "configuration", "converted"))
    logits = ranks(2).run(huggingface_cases.train_and_save, family, changes, checkpoint, TOKENS)
    if changes:
        single.run(huggingface_cases.save_configuration, family, configuration)
    else:
        torch_process.run(torch_cases.save_configuration, family, configuration)
    assert main(["convert", checkpoint, "--to", "hf", converted, "--config", configuration, "--max-shard-size", "100KB"]) == 0
    ((info, theirs),) = torch_process.run(torch_cases.read, family, converted, TOKENS)
    assert info == {what: [] for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")}
    for ours in logits:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_is_read_by_paddleformers(ranks: Callable[[int], RankPool], single: RankPool, tmp_path: Path, family: str) -> None:
    checkpoint, configuration, converted, copied = (str(tmp_path / name) for name in ("checkpoint", "configuration", "converted", "copied"))
    logits = ranks(2).run(huggingface_cases.train_and_save, family, {}, checkpoint, TOKENS)[0]
    single.run(huggingface_cases.save_configuration, family, configuration)
    outs = (
        {"none": copied} if family == "llama" else {"auto": converted, "none": copied}
    )  # its Llama can't be read from Hugging Face's layout
    for recipe, out in outs.items():
        assert main(["convert", checkpoint, "--to", "hf", out, "--config", configuration, "--recipe", recipe]) == 0
        (theirs,) = single.run(huggingface_cases.read_with_paddleformers, family, out, TOKENS, recipe == "auto")
        np.testing.assert_allclose(theirs, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "changes"), CASES, ids=NAMES)
def test_a_model_of_transformers_is_loaded(
    ranks: Callable[[int], RankPool],
    single: RankPool,
    torch_process: RankPool,
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
) -> None:
    directory = str(tmp_path / "published")
    (theirs,) = torch_process.run(torch_cases.make, family, directory, TOKENS)
    for pool, sharded in ((ranks(2), True), (single, False)):
        for ours in pool.run(huggingface_cases.load_published, family, changes, directory, TOKENS, sharded):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
