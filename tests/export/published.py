"""Small models as Hugging Face publishes them, and the same as Paddle holds them: by numpy alone, from PaddleFormers' own words.

``LlamaAttention.forward``: the fused projection's output is, for each key-value head, its queries, its key and its value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, INNER, VOCABULARY, HEADS, GROUPS, WIDTH = 12, 10, 17, 4, 2, 3
LAYERS, EXPERTS = 2, 3
SIZES = {
    "head_dim": WIDTH,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "num_experts": EXPERTS,
}
"""What :func:`config_of` leaves out, so that not all tensors' shapes follow."""

Arrays = dict[str, np.ndarray]


def config_of(family: str, **others: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "tie_word_embeddings": False,
    } | others


def shapes_of(family: str, biases: bool) -> dict[str, tuple[int, ...]]:
    """The tensors that ``transformers`` publishes; those of Qwen2 with biases in the attention."""
    moe = family.endswith("moe")
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    found["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, rows in (("q", HEADS * WIDTH), ("k", GROUPS * WIDTH), ("v", GROUPS * WIDTH)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if biases:
                found[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        found[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = (HIDDEN,)
        if family.startswith("qwen3"):
            for name in ("q_norm", "k_norm"):
                found[f"{layer}.self_attn.{name}.weight"] = (WIDTH,)
        mlps = [f"{layer}.mlp.experts.{j}" for j in range(EXPERTS)] if moe else [f"{layer}.mlp"]
        if moe:
            found[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        if family == "qwen2_moe":
            mlps.append(f"{layer}.mlp.shared_expert")
            found[f"{layer}.mlp.shared_expert_gate.weight"] = (1, HIDDEN)
        for mlp in mlps:
            found |= {f"{mlp}.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
            found[f"{mlp}.down_proj.weight"] = (HIDDEN, INNER)
    return found


def published(family: str, biases: bool = False) -> Arrays:
    random = np.random.RandomState(7)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes_of(family, biases).items()}


def as_in_paddle(family: str, tensors: Arrays, fused: bool) -> Arrays:
    """The same model in PaddleFormers' names and layouts."""
    found: Arrays = {}
    for name, tensor in tensors.items():
        key = name.replace("model.", "llama.", 1) if family == "llama" else name
        is_linear = ("_proj." in name or name.endswith("gate.weight")) and tensor.ndim == 2
        found[key] = np.ascontiguousarray(tensor.T) if is_linear or (family == "llama" and name == "lm_head.weight") else tensor
    if fused:
        for key in [key for key in found if ".q_proj." in key]:
            parts = [found.pop(key.replace(".q_proj.", f".{one}_proj.")) for one in "qkv"]
            by_head = [part.reshape(*part.shape[:-1], GROUPS, -1) for part in parts]
            mixed = np.concatenate(by_head, -1)
            found[key.replace(".q_proj.", ".qkv_proj.")] = mixed.reshape(*mixed.shape[:-2], -1)
        name = "gate_up_fused_proj" if family == "llama" else "up_gate_proj"
        for key in [key for key in found if ".gate_proj." in key]:
            gate, up = found.pop(key), found.pop(key.replace(".gate_proj.", ".up_proj."))
            found[key.replace("gate_proj", name)] = np.concatenate([gate, up], -1)
    return found


def write_base(path: Path, tensors: Arrays, **others: Any) -> str:
    """Write a Llama of these tensors, whose ``config.json`` has these other fields."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_of("llama", **others)))
    save_file(tensors, path / "model.safetensors")
    return str(path)


def write_tied_base(path: Path, is_said: bool) -> tuple[str, Arrays]:
    """Write a Llama whose head is the embedding, and return also what Qwen2, whose head lies as the embedding does, has of it.

    Args:
        path: of the base.
        is_said: whether ``config.json`` says that they are one.
    """
    tensors = published("llama")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return write_base(path, tensors, tie_word_embeddings=is_said), as_in_paddle("qwen2", tensors, fused=True)
