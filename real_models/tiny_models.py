"""Tiny models of PaddleFormers, made from scratch."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddleformers import transformers
from paddleformers.utils.log import logger
from shared_settings import SETTINGS, classes_of

logger.set_level("WARNING")  # its Trainer prints 150 lines of settings


def configuration(family: str, **changes: Any) -> Any:
    """PaddleFormers' configuration of a family; ``changes`` are further fields of it."""
    config_class, _ = classes_of(transformers, family)
    made = config_class(**SETTINGS[family], use_cache=False)
    for name, value in changes.items():  # among its arguments it ignores many of them, without a word
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


def build(family: str, seed: int = 11, **changes: Any) -> nn.Layer:
    """Make a model with random weights that depend on nothing but the seed."""
    paddle.seed(seed)
    _, model_class = classes_of(transformers, family)
    model = model_class(configuration(family, **changes))
    # Norms begin as ones, by which a mistake would not show.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.set_value(parameter + 0.1 * paddle.randn(parameter.shape))
    return model
