"""Qwen2, dense and with experts."""

from __future__ import annotations

from .decoder import LAYER, around, attention, experts, linear, mlp
from .rules import Recipe

_SHARED = f"{LAYER}.mlp.shared_expert"

QWEN2 = Recipe("qwen2", (*around("model"), *attention("model"), *mlp(f"{LAYER}.mlp", f"{LAYER}.mlp")))

QWEN2_MOE = Recipe(
    "qwen2_moe",
    (*around("model"), *attention("model"), *experts(), *mlp(_SHARED, _SHARED), linear(f"{LAYER}.mlp.shared_expert_gate")),
)
