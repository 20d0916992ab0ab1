"""Fixtures of the tests with real models; see ``README.md``, "A real Qwen3-MoE". Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from harness import RankPool
from harness.fixtures import rank_pools, ranks, single

__all__ = ["rank_pools", "ranks", "single", "torch_process"]

# The ranks' processes inherit it. Whatever tries to download fails at once.
os.environ |= {"HF_HUB_OFFLINE": "1", "DOWNLOAD_SOURCE": "huggingface"}


@pytest.fixture(scope="session")
def torch_process() -> Iterator[RankPool]:
    """A process for PyTorch and transformers alone: where PaddleFormers is imported, it hides PyTorch from transformers."""
    pool = RankPool(1, initialised=False)
    yield pool
    pool.close()
