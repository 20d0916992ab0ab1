"""Llama. Paddle's model calls its decoder ``llama``; its head is a matrix [hidden, vocabulary], unless it is tied to the embedding."""

from __future__ import annotations

from .decoder import LAYER, around, attention, mlp
from .rules import Recipe, Rule

LLAMA = Recipe(
    "llama",
    (
        *around("llama", transposed_head=True),
        *attention("llama"),
        *mlp("llama.layers.{layer}.mlp", f"{LAYER}.mlp", fused="gate_up_fused_proj"),
        Rule("llama.layers.{layer}.self_attn.rotary_emb.inv_freq", ()),  # computed anew by every version
    ),
    prefixes=("llama.", "model.", ""),  # the others: of models that somebody wrote with Hugging Face's names
)
