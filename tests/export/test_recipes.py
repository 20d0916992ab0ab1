"""Recipes: which keys rules take, what becomes of them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
from harness import RankPool
from published import HIDDEN, INNER, WIDTH, Arrays, as_in_paddle, config_of, published
from safetensors.numpy import load_file, save_file

from paddle_fsdp_ckpt.errors import CheckpointError, MismatchError
from paddle_fsdp_ckpt.export.config import ModelConfig
from paddle_fsdp_ckpt.export.huggingface import export_huggingface
from paddle_fsdp_ckpt.export.recipes import RECIPES, choose_recipe, read_recipe
from paddle_fsdp_ckpt.export.recipes.rules import Recipe, Rule, apply_rule
from paddle_fsdp_ckpt.export.recipes.spelling import check_layout, spelled_for
from paddle_fsdp_ckpt.pieces import Piece, whole_piece

Ranks = Callable[[int], RankPool]


def write_recipe(path: Path, *rules: Any, **fields: Any) -> Path:
    path.write_text(json.dumps({"name": "mine", "rules": rules} | fields))
    return path


def whole(key: str, *shape: int) -> Piece:
    return whole_piece(key, "float32", shape)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_families_make_sense(recipe: Recipe) -> None:
    for rule in recipe.rules:
        rule.check()
    sources = [rule.source for rule in recipe.rules]
    assert len(set(sources)) == len(sources)
    recipe.rules_of([source.replace("{layer}", "10").replace("{expert}", "7") for source in sources])


def test_a_recipe_from_a_file(tmp_path: Path, ranks: Ranks) -> None:
    random = np.random.RandomState(1)
    shapes = {"decoder.0.experts.up_gate": (3, 5, 8), "decoder.0.qkv": (16, 5), "decoder.1.norm.scale": (5,), "decoder.1.left": (2,)}
    arrays = {key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    recipe = write_recipe(
        tmp_path / "recipe.json",
        {
            "source": "decoder.{layer}.experts.up_gate",
            "targets": [f"model.layers.{{layer}}.experts.{{expert}}.{name}.weight" for name in ("up", "gate")],
            "unstack": "expert",
            "split": "equal",
            "transpose": True,
        },
        {"source": "decoder.{layer}.qkv", "targets": ["q.{layer}", "k.{layer}", "v.{layer}"], "split": "qkv"},
        {"source": "decoder.1.{*rest}.scale", "targets": ["model.{*rest}.weight"]},
        {"source": "decoder.{layer}.left", "targets": []},
    )
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), arrays)
    config = tmp_path / "config"
    config.mkdir()
    fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (config / "config.json").write_text(json.dumps(fields))
    export_huggingface(tmp_path / "saved", tmp_path / "model", recipe=str(recipe), config=config)
    found = load_file(tmp_path / "model" / "model-00001-of-00001.safetensors")
    stacked, mixed = arrays["decoder.0.experts.up_gate"], arrays["decoder.0.qkv"]
    # Heads of two rows; each of two groups has two query heads, a key and a value.
    right = {"q.0": mixed[[0, 1, 2, 3, 8, 9, 10, 11]], "k.0": mixed[[4, 5, 12, 13]], "v.0": mixed[[6, 7, 14, 15]]}
    right["model.norm.weight"] = arrays["decoder.1.norm.scale"]
    for i in range(3):
        right[f"model.layers.0.experts.{i}.up.weight"] = stacked[i, :, :4].T
        right[f"model.layers.0.experts.{i}.gate.weight"] = stacked[i, :, 4:].T
    assert found.keys() == right.keys()
    for name, array in right.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_keys_that_no_rule_takes_or_two_do() -> None:
    recipe = Recipe("mine", (Rule("a.{n}.b", ("x.{n}",)), Rule("a.{*any}", ("y.{*any}",)), Rule("c", ("c",))))
    assert [rule.source for rule, _ in recipe.rules_of(["a.c", "c"]).values()] == ["a.{*any}", "c"]
    with pytest.raises(MismatchError) as caught:
        recipe.rules_of(["a.1.b", "cc", "c", "a.01.b", "xc"])
    message = str(caught.value)
    assert "2 keys are taken by no rule: 'cc', 'xc'" in message
    assert "1 key is taken by several rules: 'a.1.b' by 'a.{n}.b' and 'a.{*any}'" in message


def test_a_draft_of_rules_for_keys_that_none_takes() -> None:
    keys = [f"decoder.{i}.attn.{one}_proj.weight" for i in range(40) for one in ("q", "k")]
    with pytest.raises(MismatchError) as caught:
        RECIPES["qwen3"].rules_of([*keys, "wte", *(f"other_{i}" for i in range(9))])
    message = str(caught.value)
    assert "90 keys are taken by no rule: 'decoder.0.attn.q_proj.weight' and 39 like it, 'decoder.0.attn.k_proj.weight' and 39" in message
    assert "... (7 more forms)" in message and "It takes names such as 'model.embed_tokens.weight', 'model.norm.weight'" in message
    draft = '"decoder.{layer}.attn.q_proj.weight", "targets": ["model.layers.{layer}.self_attn.q_proj.weight"], "transpose": true}'
    assert draft in message and '{"source": "wte", "targets": ["wte"]}; a Paddle Linear' in message
    assert "recipe= in Python" in message and "The recipe none copies" in message and len(message) < 1200


LINEAR = ("_proj.weight", "lm_head.weight")


def self_written(prefix: str, right: Arrays) -> Arrays:
    """A model with the names of Hugging Face's Llama, or such that begin otherwise, and the matrices of Paddle's Linear."""
    turned = {name: np.ascontiguousarray(a.T) if name.endswith(LINEAR) else a for name, a in right.items()}
    return {prefix + name.removeprefix("model.") if name.startswith("model.") else name: a for name, a in turned.items()}


@pytest.mark.parametrize(("prefix", "world_size"), [("model.", 1), ("", 2)])
def test_a_self_written_llama(prefix: str, world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    right = published("llama")
    arrays = self_written(prefix, right)
    pool = ranks(world_size)
    pool.run(made_models.save_model, str(tmp_path / "saved"), arrays, "float32", {}, True)
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama") | {"intermediate_size": INNER, "head_dim": WIDTH}))
    for number, config in enumerate((tmp_path, None)):
        out = tmp_path / f"model {number}"
        report = export_huggingface(tmp_path / "saved", out, recipe="llama", config=config, optimizer=config is not None)
        assert (report.recipe, report.unchecked, report.optimizer_tensors) == ("llama", None, 0 if config is None else 4 * len(right))
        found = load_file(out / "model-00001-of-00001.safetensors")
        assert found.keys() == right.keys()
        for name, array in right.items():
            np.testing.assert_array_equal(found[name], array)
    save_file(right, tmp_path / "model.safetensors")
    shapes = {name: array.shape for name, array in arrays.items()}
    results = pool.run(made_models.load_published, str(tmp_path), shapes, "float32", {}, {}, True)
    for loaded in results:
        assert not isinstance(loaded, str), loaded
        for name, array in loaded.items():
            np.testing.assert_array_equal(array, arrays[name])
    assert results[0].keys() == arrays.keys()


def test_what_shapes_say_of_a_self_written_llama() -> None:
    arrays = self_written("model.", published("llama"))
    recipe = spelled_for(RECIPES["llama"], arrays)
    assert recipe.family is RECIPES["llama"] and recipe.rules_of(arrays)
    shapes = {name: array.shape for name, array in arrays.items()}
    check_layout(recipe, shapes)
    check_layout(recipe, {name: shape for name, shape in shapes.items() if name != "lm_head.weight"})
    check_layout(recipe, shapes | {"lm_head.weight": shapes["model.embed_tokens.weight"]})  # tied
    for ending in ("0.self_attn.v_proj.weight", "1.mlp.down_proj.weight"):
        turned = {name: shape[::-1] if name.endswith(ending) else shape for name, shape in shapes.items()}
        with pytest.raises(MismatchError, match=rf"1 lies otherwise: '[a-z.]*{ending}' \[.*recipe none; else write a FILE"):
            check_layout(recipe, turned)
    square = {name: (HIDDEN, HIDDEN) if "_proj." in name else shape for name, shape in shapes.items()}
    with pytest.raises(MismatchError, match=r"14 matrices are \[in, out\] or .* square: 'model.*q_proj.weight\"\], \"transpose\": true\}"):
        check_layout(recipe, square)
    with pytest.raises(MismatchError, match=r"1 matrix is .* since it is square: 'lm_head"):
        check_layout(recipe, shapes | {"lm_head.weight": (HIDDEN, HIDDEN)})
    with pytest.raises(MismatchError, match="no 'model.embed_tokens.weight'"):
        check_layout(recipe, {name: shape for name, shape in shapes.items() if "embed" not in name})
    # Fused projections of another's are not taken, nor are names of both kinds at once.
    for other in ("model.layers.0.self_attn.qkv_proj.weight", "llama.norm.weight"):
        with pytest.raises(MismatchError, match=f"1 key is taken by no rule: '{other}'"):
            spelled_for(RECIPES["llama"], [*arrays, other]).rules_of([*arrays, other])
    assert spelled_for(RECIPES["llama"], ["lm_head.weight", "x"]) is RECIPES["llama"]
    check_layout(RECIPES["llama"], dict.fromkeys(as_in_paddle("llama", published("llama"), fused=False), (1, 1)))


def test_two_tensors_of_one_name(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    recipe = write_recipe(tmp_path / "recipe.json", {"source": "{*key}", "targets": ["same"]})
    with pytest.raises(MismatchError, match="gives several tensors one name: 'same'"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", recipe=str(recipe))


@pytest.mark.parametrize(
    ("rule", "piece", "message"),
    [
        (Rule("a", ("b",), transpose=True), whole("a", 2, 3, 4), "says that it is transposed, and it has shape"),
        (Rule("a", ("{n}",), unstack="n"), whole("a", 2), "says that it is stacked, and it has shape"),
        (Rule("a", ("b", "c"), split="equal"), whole("a", 3, 2), "3 rows can't be split into 2 equal parts"),
        (Rule("a", ("b", "c", "d"), split="qkv"), whole("a", 8, 2), "only config.json says how: give --config"),
    ],
)
def test_rules_that_do_not_fit_a_tensor(rule: Rule, piece: Piece, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        list(apply_rule(rule, {}, piece, None))


def test_heads_of_another_width(tmp_path: Path, ranks: Ranks) -> None:
    # For each of 2 key-value heads 2 queries, a key and a value of 3 rows each: 1 head of width 6 would fit the rows too.
    rows = np.arange(48, dtype=np.float32).reshape(24, 2)
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), {"a": rows})
    recipe = str(write_recipe(tmp_path / "recipe.json", {"source": "a", "targets": ["q", "k", "v"], "split": "qkv"}))
    fields = {"model_type": "other", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields))
    export_huggingface(tmp_path / "saved", tmp_path / "model", recipe=recipe, config=config)
    found = load_file(tmp_path / "model" / "model-00001-of-00001.safetensors")
    right = rows.reshape(2, 4, 3, 2)
    for name, part in (("q", right[:, :2]), ("k", right[:, 2]), ("v", right[:, 3])):
        np.testing.assert_array_equal(found[name], part.reshape(-1, 2))
    config.write_text(json.dumps(fields | {"num_attention_heads": 2, "num_key_value_heads": 1}))
    with pytest.raises(MismatchError, match="'a' would have 1 key-value head, each 6 wide, and '.*' says head_dim = 3; give"):
        export_huggingface(tmp_path / "saved", tmp_path / "other", recipe=recipe, config=config)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"source": "a"},
            r"is not a recipe: the rule \{'source': 'a'\} lacks 'targets'; a rule's fields are source, targets, ",
        ),
        (
            {"source": "a", "targets": ["b"], "transpos": True},
            r"\} has 'transpos', which no rule knows \('transpose' perhaps\?\); a rule's fields",
        ),
        ({"targets": ["b"], "zzz": 1}, "lacks 'source', and has 'zzz', which no rule knows; a rule's fields"),
        ({"source": "a", "targets": "b"}, "has targets = 'b'"),
        ({"source": "a", "targets": [1]}, r"has targets = \[1\]"),
        ({"source": "a", "targets": ["b"], "transpose": "yes"}, "has transpose = 'yes'"),
        ({"source": "a.{n}", "targets": ["b.{m}"]}, r"has no placeholder \{m\}"),
        ({"source": "a.{n}", "targets": ["b.{N}"]}, r"'b\.\{N\}' has a brace that is of no placeholder"),
        ({"source": "a.{n1}", "targets": ["b"]}, r"'a\.\{n1\}' has a brace that is of no placeholder"),
        ({"source": "a.{n}.{n}", "targets": ["b"]}, "has a placeholder twice"),
        ({"source": "a", "targets": ["b"], "unstack": "n"}, "not all of its targets have that"),
        ({"source": "a", "targets": ["b", "c"]}, "has 2 targets and split = None"),
        ({"source": "a", "targets": ["b"], "split": "equal"}, "has 1 targets and split = 'equal'"),
        ({"source": "a", "targets": ["b", "c"], "split": "halves"}, "has 2 targets and split = 'halves'"),
        ({"source": "a", "targets": ["b", "c"], "split": "qkv"}, "instead of query, key and value"),
        ({"source": "a", "targets": [], "tied_to": "b"}, "must have just one target"),
        ([], "is not a rule"),
    ],
)
def test_malformed_rules(rule: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_recipe(write_recipe(tmp_path / "recipe.json", rule))


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        (
            "qwen33",
            r"extends 'qwen33', which is no recipe that a file can extend \('qwen3' perhaps\?\); these are llama, .*, none, and no ",
        ),
        ("recipe.json", r"extends 'recipe.json', which is no recipe that a file can extend; these are"),
        ("auto", "extends 'auto', which is no recipe"),
        (["qwen3"], r"extends \['qwen3'\], which is no recipe that a file can extend; these"),
        (None, "extends None, which is no recipe"),
    ],
)
def test_what_a_file_cannot_extend(extends: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"recipe.json' is not a recipe: it {message}"):
        read_recipe(write_recipe(tmp_path / "recipe.json", extends=extends))


def test_an_unknown_field_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"it has 'extend', which no recipe knows \('extends' perhaps\?\); a recipe's fields are name, "
    ):
        read_recipe(write_recipe(tmp_path / "recipe.json", extend="qwen3"))


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "x"}', '{"name": 1, "rules": []}', '{"name": "x", "rules": {}}'])
def test_malformed_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a recipe"):
        read_recipe(tmp_path / "recipe.json")


def test_choosing() -> None:
    config = ModelConfig(Path("config.json"), ({"model_type": "qwen3_moe"}, {"model_type": "llama"}))
    assert choose_recipe("auto", config) is RECIPES["qwen3_moe"]
    assert choose_recipe("qwen2", config) is RECIPES["qwen2"]
    with pytest.raises(CheckpointError, match=r"--config DIR.*load_huggingface.*or give --recipe \(recipe= in Python\), one of llama"):
        choose_recipe("auto", None)
    with pytest.raises(CheckpointError, match="there is no recipe and no file 'qwen9'"):
        choose_recipe("qwen9", config)
