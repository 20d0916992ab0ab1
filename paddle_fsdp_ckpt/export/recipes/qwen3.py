"""Qwen3, dense and with experts."""

from __future__ import annotations

from .decoder import LAYER, around, attention, experts, mlp, query_and_key_norms
from .rules import Recipe

QWEN3 = Recipe("qwen3", (*around("model"), *attention("model"), *query_and_key_norms(), *mlp(f"{LAYER}.mlp", f"{LAYER}.mlp")))

QWEN3_MOE = Recipe("qwen3_moe", (*around("model"), *attention("model"), *query_and_key_norms(), *experts()))
