"""A recipe's file that extends a known one: its own rules come first, and what none of them takes is left to the family's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
from harness import RankPool
from published import HIDDEN, LAYERS, Arrays, as_in_paddle, config_of, published
from safetensors.numpy import load_file, save_file

from paddle_fsdp_ckpt.errors import MismatchError
from paddle_fsdp_ckpt.export.from_huggingface import import_huggingface
from paddle_fsdp_ckpt.export.huggingface import export_huggingface
from paddle_fsdp_ckpt.export.recipes import RECIPES, read_recipe
from paddle_fsdp_ckpt.export.recipes.spelling import check_layout, spelled_for

Ranks = Callable[[int], RankPool]
DOCS = Path(__file__).parents[2] / "docs" / "huggingface.md"


def write_recipe(directory: Path, extends: str, *rules: dict[str, Any]) -> str:
    path = directory / "recipe.json"
    path.write_text(json.dumps({"name": "mine", "extends": extends, "rules": rules}))
    return str(path)


def write_model(path: Path, tensors: Arrays, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def with_scales(tensors: Arrays) -> Arrays:
    """With what Qwen3 hasn't."""
    return tensors | {f"model.layers.{i}.self_attn.scale": np.arange(3, dtype=np.float32) + i for i in range(LAYERS)}


@pytest.mark.parametrize("fused", [False, True])
def test_the_recipe_of_the_docs_goes_out_and_back_in(fused: bool, tmp_path: Path, ranks: Ranks) -> None:
    """Matrices that it says to lie as there aren't transposed, though the family's are."""
    marked = re.search(r"<!-- tests/export runs this too -->\n```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert marked is not None
    recipe = tmp_path / "recipe.json"
    recipe.write_text(marked[1])
    right = with_scales(published("qwen3"))
    arrays = with_scales(as_in_paddle("qwen3", published("qwen3"), fused))
    arrays = {key: right[key] if key.endswith(".down_proj.weight") else array for key, array in arrays.items()}
    model = write_model(tmp_path / "model", right, config_of("qwen3", head_dim=3, intermediate_size=10))
    pool = ranks(2)
    pool.run(made_models.save_model, str(tmp_path / "saved"), arrays)
    report = export_huggingface(tmp_path / "saved", tmp_path / "out", recipe=str(recipe), config=model)
    assert report.recipe == "my_qwen3" and report.unchecked is not None
    assert (
        "describes a model without 2 tensors, which rules of the recipe 'my_qwen3' make: model.layers.0.self_attn.scale, "
        in report.unchecked
    )
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert found.keys() == right.keys()
    for name, array in right.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    shapes = {key: array.shape for key, array in arrays.items()}
    loaded = [pool.run(made_models.load_published, str(model), shapes, "float32", {}, {"recipe": str(recipe)}, True)[0]]
    if not fused:
        import_huggingface(model, tmp_path / "start", recipe=str(recipe))
        loaded.append(pool.run(made_models.load_into, str(tmp_path / "start"), shapes, {})[0])
    for values in loaded:
        assert not isinstance(values, str), values
        assert values.keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(values[key], array, err_msg=key)


def test_what_the_configuration_describes_must_be_there(tmp_path: Path, ranks: Ranks) -> None:
    tensors = published("qwen3")
    config = write_model(tmp_path / "model", tensors, config_of("qwen3", head_dim=3, intermediate_size=10))
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), as_in_paddle("qwen3", tensors, fused=False))
    recipe = write_recipe(tmp_path, "qwen3", {"source": "model.norm.weight", "targets": ["model.last_norm.weight"]})
    with pytest.raises(MismatchError, match="the recipe 'mine' doesn't make of .* describes; it lacks model.norm.weight. Mend the recipe"):
        export_huggingface(tmp_path / "saved", tmp_path / "out", recipe=recipe, config=config)


def test_own_rules_come_first(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        "qwen3",
        {"source": "model.layers.{n}.self_attn.q_norm.weight", "targets": ["queries.{n}"]},
        {"source": "model.layers.0.mlp.{*rest}", "targets": ["first.{*rest}"]},
        {"source": "model.layers.{n}.scale", "targets": ["scale.{n}"]},
    )
    mine = read_recipe(Path(recipe))
    assert len(mine.rules) == len(RECIPES["qwen3"].rules) + 2 and mine.is_extended  # one is replaced
    names = ["self_attn.q_norm.weight", "mlp.up_proj.weight", "scale", "self_attn.k_norm.weight"]
    found = mine.rules_of([f"model.layers.{i}.{name}" for i in (0, 1) for name in names])
    assert [rule.target_name(values) for rule, values in found.values()] == [
        *("queries.0", "first.up_proj.weight", "scale.0", "model.layers.0.self_attn.k_norm.weight"),
        *("queries.1", "model.layers.1.mlp.up_proj.weight", "scale.1", "model.layers.1.self_attn.k_norm.weight"),
    ]
    twice = {"source": "model.layers.{n}.mlp.up", "targets": ["up.{n}"]}, {"source": "model.layers.0.mlp.{*x}", "targets": ["{*x}"]}
    both = read_recipe(Path(write_recipe(tmp_path, "qwen3", *twice)))
    with pytest.raises(MismatchError, match=r"taken by several rules: 'model.layers.0.mlp.up' by .* and"):
        both.rules_of(["model.layers.0.mlp.up"])


def test_the_way_back_is_that_of_the_rule_that_takes_the_key(tmp_path: Path) -> None:
    """A tensor of the family's name goes nowhere where another rule takes its key; one of the rule's own name does."""
    recipe = write_recipe(tmp_path, "none", {"source": "a.{n}.w", "targets": ["b.{n}.w"], "transpose": True})
    arrays = {"b.0.w": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.ones(2, np.float32)}
    model = write_model(tmp_path / "model", arrays, {})
    import_huggingface(model, tmp_path / "start", recipe=recipe)
    found = load_file(tmp_path / "start" / "0_0.safetensors")
    assert found.keys() == {"a.0.w", "c"} and (found["a.0.w"] == arrays["b.0.w"].T).all()
    other = write_model(tmp_path / "other", arrays | {"a.1.w": np.ones((2, 2), np.float32)}, {})
    with pytest.raises(
        MismatchError, match=r"'a.1.w' would become 'a.1.w', and that belongs to the rule for 'a.\{n\}.w' of the recipe 'mine'"
    ):
        import_huggingface(other, tmp_path / "nothing", recipe=recipe)


def test_a_self_written_llama_whose_matrices_are_square(tmp_path: Path) -> None:
    """The file's rule says how the one lies of which no shape can tell, under the names that the model has."""
    keys = as_in_paddle("llama", published("llama"), fused=False)
    shapes = {key.replace("llama.", "model."): array.shape for key, array in keys.items()}
    shapes |= {"lm_head.weight": (HIDDEN, HIDDEN), "model.embed_tokens.weight": (HIDDEN, HIDDEN), "model.scale": (1,)}
    head = {"source": "lm_head.weight", "targets": ["lm_head.weight"], "transpose": True, "tied_to": "model.embed_tokens.weight"}
    scale = {"source": "model.scale", "targets": ["model.scale"]}

    def spelled(*rules: dict[str, Any]) -> Any:
        return spelled_for(read_recipe(Path(write_recipe(tmp_path, "llama", *rules))), shapes)

    with pytest.raises(MismatchError, match="1 matrix is .* since it is square: 'lm_head"):
        check_layout(spelled(scale), shapes)
    recipe = spelled(scale, head)
    check_layout(recipe, shapes)
    assert recipe.rules_of(shapes)["model.layers.0.mlp.up_proj.weight"][0].transpose
    del head["tied_to"]
    with pytest.raises(MismatchError, match="no rule of the recipe 'mine' says \"tied_to\""):
        check_layout(spelled(scale, head), shapes)
    shapes["model.layers.0.mlp.up_proj.weight"] = shapes["model.layers.0.mlp.up_proj.weight"][::-1]
    with pytest.raises(MismatchError, match="1 lies otherwise: 'model.layers.0.mlp.up_proj.weight'"):
        check_layout(spelled(scale, head | {"tied_to": "model.embed_tokens.weight"}), shapes)


def test_an_error_offers_it_where_the_family_takes_the_others() -> None:
    keys = list(with_scales(published("qwen3")))
    with pytest.raises(MismatchError) as caught:
        RECIPES["qwen3"].rules_of(keys)
    draft = '{"source": "model.layers.{n}.self_attn.scale", "targets": ["model.layers.{n}.self_attn.scale"]}'
    assert f'one for each form of name, such as {draft}, and with "extends": "qwen3" for just these names; a Paddle' in str(caught.value)
    with pytest.raises(MismatchError) as caught:
        RECIPES["qwen3"].rules_of(["odd"])
    assert "extends" not in str(caught.value)
