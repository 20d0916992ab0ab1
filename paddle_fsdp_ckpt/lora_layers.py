"""LoRA layers in a model: a frozen ``weight`` [in, out], ``lora_A`` [in, r] and ``lora_B`` [r, out], as in PaddleFormers 0.4.1.

Such a layer computes with ``weight + scaling * lora_A @ lora_B``; see ``LoRALinear`` in ``paddleformers/peft/lora/lora_layers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from paddle import nn

from .fsdp import walk

_MATRICES = ("lora_A", "lora_B")


def lora_scalings(model: nn.Layer) -> dict[str, float]:
    """Return what each LoRA layer of a model says that it multiplies the product of its matrices by; of merged ones nothing."""
    return {
        name: float(layer.scaling)
        for name, layer in _lora_layers(model)
        if isinstance(getattr(layer, "scaling", None), (int, float)) and not _is_merged(layer)
    }


def merged_lora_layers(model: nn.Layer) -> list[str]:
    """Return the names of the LoRA layers whose product is in their weight at the moment."""
    return [name for name, layer in _lora_layers(model) if _is_merged(layer)]


def _lora_layers(model: nn.Layer) -> Iterator[tuple[str, nn.Layer]]:
    return ((name, layer) for name, layer in walk(model) if all(layer._parameters.get(one) is not None for one in _MATRICES))


def _is_merged(layer: nn.Layer) -> bool:
    return getattr(layer, "merged", False) is True
