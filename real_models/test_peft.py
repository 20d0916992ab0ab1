"""PaddleFormers' ``LoRAModel`` trains sharded at parity, and what it trained is read by ``peft`` and, merged, by ``transformers``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft_cases
import peft_torch_cases
import pytest
import torch_cases
from harness import RankPool
from shared_settings import SETTINGS, VOCABULARY

from paddle_fsdp_ckpt.cli.main import main

TOKENS = np.random.RandomState(8).randint(0, VOCABULARY, [2, 24])


@pytest.mark.parametrize(("family", "fused"), [("qwen3", False), ("llama", True)])
def test_adapters_of_paddleformers(
    ranks: Callable[[int], RankPool], single: RankPool, torch_process: RankPool, tmp_path: Path, family: str, fused: bool
) -> None:
    """Losses and logits of all ways are the same."""
    changes: dict[str, Any] = {"fuse_attention_qkv": True} if fused else {}
    base, adapters, config, hf_base, hf, peft = (str(tmp_path / name) for name in ("base", "adapters", "config", "hf base", "hf", "peft"))
    ranks(2).run(peft_cases.save_base, base, family, changes)
    (losses,) = single.run(peft_cases.train_plain, family, changes)
    for found, _ in (trained := ranks(2).run(peft_cases.train_and_save, adapters, family, changes, TOKENS)):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
    logits = trained[0][1]
    for world_size in (1, 3):
        for resumed, left in ranks(world_size).run(peft_cases.resume, adapters, family, changes):
            np.testing.assert_allclose(resumed, losses[2:], rtol=1e-5)
            assert left > 20

    torch_process.run(torch_cases.save_configuration, family, config)
    assert main(["convert", base, "--to", "hf", hf_base, "--config", config]) == 0
    assert main(["convert", adapters, "--to", "peft", peft, "--config", config]) == 0
    assert main(["convert", adapters, "--to", "hf", hf, "--base", base, "--config", config]) == 0
    ((layers, untouched, by_peft),) = torch_process.run(peft_torch_cases.adapted_logits, hf_base, peft, TOKENS)
    assert (layers, untouched) == (4 * SETTINGS[family]["num_hidden_layers"], [])
    (merged,) = torch_process.run(peft_torch_cases.merged_logits, hf, TOKENS)
    (plain,) = torch_process.run(peft_torch_cases.merged_logits, hf_base, TOKENS)
    np.testing.assert_allclose(by_peft, logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(merged, logits, rtol=0, atol=1e-4)
    assert np.abs(plain - logits).max() > 1e-2, "the adapters make no difference, so this test shows nothing"
