"""Tiny models of PaddleFormers, made from scratch, and the settings that PaddleFormers' and Hugging Face's configurations share."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddleformers.transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from paddleformers.utils.log import logger
from shared_settings import SETTINGS

logger.set_level("WARNING")  # its Trainer prints 150 lines of settings

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def configuration(family: str, **changes: Any) -> Any:
    """PaddleFormers' configuration of a family; ``changes`` are further fields of it."""
    made = _CLASSES[family][0](**SETTINGS[family], use_cache=False)
    for name, value in changes.items():  # among its arguments it ignores many of them, without a word
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


def build(family: str, seed: int = 11, **changes: Any) -> nn.Layer:
    """Make a model with random weights that depend on nothing but the seed."""
    paddle.seed(seed)
    model = _CLASSES[family][1](configuration(family, **changes))
    # Norms begin as ones, by which a mistake would not show.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.set_value(parameter + 0.1 * paddle.randn(parameter.shape))
    return model
