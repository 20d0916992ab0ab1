"""LoRA layers in a model: a frozen ``weight`` [in, out], ``lora_A`` [in, r] and ``lora_B`` [r, out], as in PaddleFormers 0.4.1.

Such a layer computes with ``weight + scaling * lora_A @ lora_B``; see ``LoRALinear`` in ``paddleformers/peft/lora/lora_layers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real

from paddle import nn

from .errors import listing
from .fsdp import walk

_MATRICES = ("lora_A", "lora_B")


def lora_scalings(model: nn.Layer) -> dict[str, float]:
    """Return what each LoRA layer of a model says that it multiplies the product of its matrices by; of merged ones nothing."""
    return {
        name: float(layer.scaling)
        for name, layer in _lora_layers(model)
        if isinstance(getattr(layer, "scaling", None), Real) and not _is_merged(layer)
    }


def lora_a_of(layer: str) -> str:
    """Return the name of a LoRA layer's first matrix."""
    return f"{layer}.{_MATRICES[0]}" if layer else _MATRICES[0]


def scaling_differences(model: nn.Layer, saved: Mapping[str, float]) -> list[str]:
    """Say which LoRA layers of a model scale otherwise than they did; ``saved`` says how, by the names of their first matrices."""
    pairs = [(layer, saved.get(lora_a_of(layer), now), now) for layer, now in lora_scalings(model).items()]
    other = [f"'{layer}' by {was:g} then and by {now:g} now" for layer, was, now in pairs if was != now]
    return [f"LoRA layers scale otherwise: {listing(other)}"] if other else []


def merged_lora_layers(model: nn.Layer) -> list[str]:
    """Return the names of the LoRA layers whose product is in their weight at the moment."""
    return [name for name, layer in _lora_layers(model) if _is_merged(layer)]


def _lora_layers(model: nn.Layer) -> Iterator[tuple[str, nn.Layer]]:
    return ((name, layer) for name, layer in walk(model) if all(layer._parameters.get(one) is not None for one in _MATRICES))


def _is_merged(layer: nn.Layer) -> bool:
    return getattr(layer, "merged", False) is True
