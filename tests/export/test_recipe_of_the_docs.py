"""The recipe in docs/huggingface.md, as it stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import made_models
import numpy as np
from harness import RankPool
from safetensors.numpy import load_file

from paddle_fsdp_ckpt.export.huggingface import export_huggingface

TEXT = Path(__file__).parents[2] / "docs" / "huggingface.md"
SHAPES = {
    "net.emb.weight": (9, 4),
    "net.0.out.weight": (6, 4),
    "net.0.qkv.weight": (4, 8),
    "net.0.experts": (2, 4, 6),
    "net.norm.weight": (4,),
    "net.steps": (1,),
}


def test_the_recipe_works(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    marked = re.search(r"<!-- tests/export runs this -->\n```json\n(.*?)```", TEXT.read_text(), re.DOTALL)
    assert marked is not None
    (tmp_path / "recipe.json").write_text(marked[1])
    arrays = {key: np.random.RandomState(1).standard_normal(shape).astype(np.float32) for key, shape in SHAPES.items()}
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), arrays, "float32", {"head.weight": "net.emb.weight"})
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True})
    )
    export_huggingface(tmp_path / "saved", tmp_path / "model", recipe=str(tmp_path / "recipe.json"), config=tmp_path)
    found = load_file(tmp_path / "model" / "model-00001-of-00001.safetensors")
    layer = "model.layers.0"
    right = {
        "model.embed_tokens.weight": arrays["net.emb.weight"],
        "model.norm.weight": arrays["net.norm.weight"],
        f"{layer}.o_proj.weight": arrays["net.0.out.weight"].T,
        f"{layer}.q_proj.weight": arrays["net.0.qkv.weight"][:, :4].T,
        f"{layer}.k_proj.weight": arrays["net.0.qkv.weight"][:, 4:6].T,
        f"{layer}.v_proj.weight": arrays["net.0.qkv.weight"][:, 6:].T,
    }
    for i in range(2):
        right[f"{layer}.experts.{i}.gate.weight"] = arrays["net.0.experts"][i, :, :3].T
        right[f"{layer}.experts.{i}.up.weight"] = arrays["net.0.experts"][i, :, 3:].T
    assert found.keys() == right.keys()
    for name, array in right.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
