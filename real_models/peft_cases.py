"""What runs on the ranks: a model of PaddleFormers with its LoRA adapters, trained and resumed."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from harness.training import train_on_tokens
from paddle import nn
from paddle.nn import functional as F
from paddleformers.peft import LoRAConfig, LoRAModel
from shared_settings import VOCABULARY
from tiny_models import build

import paddle_fsdp_ckpt as ckpt

BATCH = 6
TARGETS = [".*q_proj", ".*k_proj", ".*v_proj", ".*qkv_proj", ".*down_proj"]


def save_base(path: str, family: str, changes: dict[str, Any]) -> None:
    """Save the base alone, as one who never heard of LoRA does."""
    ckpt.save(path, model=build(family, **changes))


def adapted(family: str, changes: dict[str, Any]) -> tuple[nn.Layer, Any]:
    """Return a plain model with adapters that are not zero, and an optimizer over all of it."""
    config = LoRAConfig(target_modules=TARGETS, r=4, lora_alpha=10, dtype="float32")
    model = LoRAModel(build(family, **changes), config)
    model.train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            values = np.random.RandomState(len(name)).standard_normal(parameter.shape) * 0.05
            parameter.set_value(values.astype("float32"))
    return model, paddle.optimizer.AdamW(5e-3, parameters=model.parameters())


def train(model: nn.Layer, optimizer: Any, first: int, last: int) -> list[float]:
    """Train on this rank's rows; the losses are of the global batch."""

    def loss_of(tokens: paddle.Tensor) -> paddle.Tensor:
        scores = model(input_ids=tokens, return_dict=True).logits[:, :-1]
        return F.cross_entropy(scores.reshape([-1, VOCABULARY]), tokens[:, 1:].reshape([-1]))

    return train_on_tokens(loss_of, optimizer, range(first, last), vocabulary=VOCABULARY, shape=(BATCH, 12))


def train_plain(family: str, changes: dict[str, Any]) -> list[float]:
    """Train four steps in one process, and return the losses."""
    model, optimizer = adapted(family, changes)
    return train(model, optimizer, 0, 4)


def train_and_save(path: str, family: str, changes: dict[str, Any], tokens: np.ndarray) -> tuple[list[float], np.ndarray]:
    """Train two steps sharded, save what trains, and return the losses of four steps and the logits after two."""
    model, optimizer = adapted(family, changes)
    ckpt.fully_shard(model, optimizer=optimizer)
    losses = train(model, optimizer, 0, 2)
    ckpt.save(path, model=model, optimizer=optimizer, step=2, trainable_only=True)
    with paddle.no_grad():
        logits = model(input_ids=paddle.to_tensor(tokens), return_dict=True).logits.numpy()
    return [*losses, *train(model, optimizer, 2, 4)], logits


def resume(path: str, family: str, changes: dict[str, Any]) -> tuple[list[float], int]:
    """Resume upon the same base, and return the losses, and how many parameters were left to the base."""
    model, optimizer = adapted(family, changes)
    ckpt.fully_shard(model, optimizer=optimizer)
    train(model, optimizer, 20, 21)
    report = ckpt.load(path, model=model, optimizer=optimizer)
    return train(model, optimizer, 2, 4), len(report.base)
