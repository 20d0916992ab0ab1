"""What runs in the process of PyTorch: models of Hugging Face's transformers, made from scratch or read from a directory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from shared_settings import SETTINGS, classes_of


def save_configuration(family: str, directory: str) -> None:
    """Write the ``config.json`` of a tiny model."""
    config_class, model_class = classes_of(transformers, family)
    config_class(**SETTINGS[family], architectures=[model_class.__name__]).save_pretrained(directory)


def read(family: str, directory: str, tokens: np.ndarray) -> tuple[dict[str, list[str]], np.ndarray]:
    """Read a model with ``from_pretrained``; return which keys it missed, did not expect or found in another shape, and its logits."""
    _, model_class = classes_of(transformers, family)
    model, info = model_class.from_pretrained(directory, torch_dtype=torch.float32, output_loading_info=True)
    return {what: sorted(map(str, keys)) for what, keys in info.items()}, _logits(model, tokens)


def make(family: str, directory: str, tokens: np.ndarray) -> np.ndarray:
    """Make a model with random weights, save it with ``save_pretrained``, and return its logits."""
    config_class, model_class = classes_of(transformers, family)
    torch.manual_seed(4)
    model = model_class(config_class(**SETTINGS[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, max_shard_size="100KB")
    return _logits(model, tokens)


def _logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model.eval()(torch.from_numpy(tokens)).logits.numpy())
