"""Rules that the families of decoders share; names as in PaddleFormers 0.4.1, and in the models on Hugging Face's hub.

From ``_gen_aoa_config`` and ``_get_name_mappings`` in ``paddleformers/transformers/*/modeling.py`` of PaddleFormers 0.4.1: all ``Linear``
weights are transposed, the router's too; ``qkv_proj`` has for each key-value head its queries, its key and its value
(``fuse_attention_qkv``), and the fused projections of the MLP first the gate and then the other half (``fuse_attention_ffn``).
"""

from __future__ import annotations

from .rules import BY_HEADS, EQUAL, Rule

LAYER = "model.layers.{layer}"


def linear(name: str, *, source: str | None = None) -> Rule:
    """The rule of a ``Linear``'s weight, called ``name`` there and, unless it is given, here."""
    return Rule(f"{source or name}.weight", (f"{name}.weight",), transpose=True)


def same(name: str, *, source: str | None = None) -> Rule:
    """The rule of a tensor that lies there as it lies here."""
    return Rule(source or name, (name,))


def attention(prefix: str) -> tuple[Rule, ...]:
    """The rules of a layer's attention, fused or not, with biases or without; ``prefix`` is what Paddle's names begin with."""
    here, there = f"{prefix}.layers.{{layer}}.self_attn", f"{LAYER}.self_attn"
    separate = [
        rule
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for rule in (linear(f"{there}.{name}", source=f"{here}.{name}"), same(f"{there}.{name}.bias", source=f"{here}.{name}.bias"))
    ]
    fused = [
        Rule(f"{here}.qkv_proj.{kind}", tuple(f"{there}.{one}_proj.{kind}" for one in "qkv"), transpose=kind == "weight", split=BY_HEADS)
        for kind in ("weight", "bias")
    ]
    return (*separate, *fused)


def mlp(here: str, there: str, *, fused: str = "up_gate_proj") -> tuple[Rule, ...]:
    """The rules of an MLP or of an expert, fused or not, without biases."""
    separate = [linear(f"{there}.{name}", source=f"{here}.{name}") for name in ("gate_proj", "up_proj", "down_proj")]
    targets = (f"{there}.gate_proj.weight", f"{there}.up_proj.weight")
    return (*separate, Rule(f"{here}.{fused}.weight", targets, transpose=True, split=EQUAL))


def around(prefix: str, *, transposed_head: bool = False) -> tuple[Rule, ...]:
    """The rules of the embedding, the norms and the head."""
    here = f"{prefix}.layers.{{layer}}"
    embedding = f"{prefix}.embed_tokens.weight"
    shape = ("vocab_size", "hidden_size")
    return (
        Rule(embedding, ("model.embed_tokens.weight",), shape=shape),
        same("model.norm.weight", source=f"{prefix}.norm.weight"),
        same(f"{LAYER}.input_layernorm.weight", source=f"{here}.input_layernorm.weight"),
        same(f"{LAYER}.post_attention_layernorm.weight", source=f"{here}.post_attention_layernorm.weight"),
        Rule("lm_head.weight", ("lm_head.weight",), transpose=transposed_head, tied_to=embedding, shape=shape),
    )


def query_and_key_norms() -> tuple[Rule, ...]:
    """The rules of the norms that Qwen3 has of each head's query and key."""
    return (same(f"{LAYER}.self_attn.q_norm.weight"), same(f"{LAYER}.self_attn.k_norm.weight"))


def experts() -> tuple[Rule, ...]:
    """The rules of a layer's router and experts, which are separate here and there; and those of layers without."""
    inner = f"{LAYER}.mlp"
    expert = f"{inner}.experts.{{expert}}"
    return (linear(f"{inner}.gate"), *mlp(expert, expert), *mlp(inner, inner))
