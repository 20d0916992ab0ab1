"""What both PaddleFormers' and transformers' configurations of the tiny models say, and their classes; without importing either of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

VOCABULARY = 256

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "norm_topk_prob": True}

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "qwen2": _DECODER,
    "qwen2_moe": {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 36},
    "qwen3": _DECODER,
    "qwen3_moe": {**_DECODER, **_EXPERTS},
}
"""By family, as both libraries name it."""

_STEMS = {"llama": "Llama", "qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}


def classes_of(library: ModuleType, family: str) -> tuple[Any, Any]:
    """Return a library's classes of a family's configuration and model, which both libraries name alike."""
    return getattr(library, f"{_STEMS[family]}Config"), getattr(library, f"{_STEMS[family]}ForCausalLM")
