"""What runs on the ranks: models of PaddleFormers that are to be, or were, models of Hugging Face."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from tiny_models import build, configuration
from training_cases import prepare

import paddle_fsdp_ckpt as ckpt


def train_and_save(family: str, changes: dict[str, Any], path: str, tokens: np.ndarray) -> np.ndarray:
    """Train two steps, save, and return the logits."""
    training = prepare(build(family, **changes), sharded=True)
    training.run(1, 2)
    ckpt.save(path, model=training.model, optimizer=training.optimizer, step=2)
    return _logits(training.model, tokens)


def load_published(family: str, changes: dict[str, Any], directory: str, tokens: np.ndarray, sharded: bool) -> np.ndarray:
    """Load what transformers saved, into a model that began otherwise, and return the logits."""
    model = build(family, **changes)
    if sharded:
        ckpt.fully_shard(model, optimizer=None)
    ckpt.load_huggingface(directory, model=model)
    return _logits(model, tokens)


def read_with_paddleformers(family: str, directory: str, tokens: np.ndarray, convert_from_hf: bool) -> np.ndarray:
    """Read a converted checkpoint with PaddleFormers' own loader, and return the logits."""
    model = type(build(family)).from_pretrained(directory, convert_from_hf=convert_from_hf, dtype="float32")
    return _logits(model, tokens)


def save_configuration(family: str, directory: str) -> None:
    """Write the ``config.json`` of a tiny model as PaddleFormers does."""
    configuration(family).save_pretrained(directory)


def _logits(model: nn.Layer, tokens: np.ndarray) -> np.ndarray:
    model.eval()
    with paddle.no_grad():
        return np.asarray(model(input_ids=paddle.to_tensor(tokens), return_dict=True).logits.numpy())
