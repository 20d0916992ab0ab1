"""What runs in the process of PyTorch: adapters that ``peft`` reads."""

from __future__ import annotations

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def adapted_logits(base: str, adapters: str, tokens: np.ndarray) -> tuple[int, list[str], np.ndarray]:
    """Read adapters onto a base, and return how many layers are adapted, which of their tensors were not read, and the logits."""
    model = AutoModelForCausalLM.from_pretrained(base).float()
    adapted = PeftModel.from_pretrained(model, adapters)
    untouched = [name for name, parameter in adapted.named_parameters() if "lora_B" in name and not parameter.any()]
    layers = sum("lora_A" in name for name, _ in adapted.named_parameters())
    adapted.eval()
    with torch.no_grad():
        return layers, untouched, adapted(torch.tensor(tokens)).logits.numpy()


def merged_logits(directory: str, tokens: np.ndarray) -> np.ndarray:
    """Read a whole model, and return the logits."""
    model = AutoModelForCausalLM.from_pretrained(directory).float()
    model.eval()
    with torch.no_grad():
        return np.asarray(model(torch.tensor(tokens)).logits.numpy())
