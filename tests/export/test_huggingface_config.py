"""Configurations beside checkpoints that become Hugging Face models: whether they describe what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
from harness import RankPool
from published import EXPERTS, GROUPS, HEADS, HIDDEN, INNER, SIZES, VOCABULARY, WIDTH, as_in_paddle, config_of, published
from test_huggingface import SMALL, assert_equal, read_model, write_config

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.errors import CheckpointError, MismatchError
from paddle_fsdp_ckpt.export.huggingface import export_huggingface
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.manifest import Manifest, utc_now
from paddle_fsdp_ckpt.storage.writer import write_rank_file

Ranks = Callable[[int], RankPool]


def test_tied_only_in_the_configuration(tmp_path: Path, ranks: Ranks) -> None:
    arrays = as_in_paddle("qwen3", published("qwen3"), fused=False)
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), arrays)
    config = write_config(tmp_path / "config", config_of("qwen3", tie_word_embeddings=True))
    with pytest.raises(MismatchError, match="'lm_head.weight' is a tensor of its own, which would be lost"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", config=config)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("fused", [False, True])
def test_a_configuration_of_other_tensors(fused: bool, tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), as_in_paddle("qwen3_moe", published("qwen3_moe"), fused))
    for changes, message in (
        ({"num_experts": EXPERTS + 1}, rf"lacks model\.layers\.0\.mlp\.experts\.{EXPERTS}\.gate_proj\.weight"),
        ({"num_experts": EXPERTS - 1}, rf"has besides model\.layers\.0\.mlp\.experts\.{EXPERTS - 1}\.(gate|down)_proj\.weight"),
        ({"mlp_only_layers": [1]}, r"lacks model\.layers\.1\.mlp\.gate_proj\.weight, .*; has besides model\.layers\.1\.mlp\.gate\.weight"),
        ({"moe_intermediate_size": 9}, rf"gate_proj\.weight' \[{INNER}, {HIDDEN}\] for \[9, {HIDDEN}\]"),
        ({"head_dim": 6}, rf"q_proj\.weight' \[{HEADS * WIDTH}, {HIDDEN}\] for \[{HEADS * 6}, {HIDDEN}\]"),
        ({"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.q_proj\.bias"),
    ):
        config = write_config(tmp_path / f"{changes}", config_of("qwen3_moe") | SIZES | changes)
        with pytest.raises(MismatchError, match=f"describes another model than .*, which .*{message}"):
            export_huggingface(tmp_path / "saved", tmp_path / "model", config=config)
    export_huggingface(tmp_path / "saved", tmp_path / "model", config=write_config(tmp_path / "right", config_of("qwen3_moe") | SIZES))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"num_hidden_layers": 3}, "= 3, numbered from 0, and the checkpoint has no layer number 2; give"),
        ("qwen3", {"num_hidden_layers": 1}, "= 1, numbered from 0, and the checkpoint has layer number 1 besides; give"),
        ("qwen3", {"vocab_size": VOCABULARY + 1}, "'model.embed_tokens.weight' becomes"),
        ("qwen3", {"num_key_value_heads": 3}, "can't be those of 4 query heads and 3 key-value heads"),
        ("qwen3", {"num_key_value_heads": "two"}, "num_key_value_heads = 'two', and a whole number"),
        ("qwen3", {"model_type": "gpt"}, "model_type 'gpt'; give --recipe (recipe= in Python), one of llama"),
        ("qwen3", {"model_type": "qwen2"}, "4 keys are taken by no rule: 'model.layers.0.self_attn.q_norm.weight'"),
    ],
)
def test_a_configuration_of_another_model(family: str, changes: dict[str, Any], message: str, tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), as_in_paddle(family, published(family), fused=True))
    with pytest.raises(CheckpointError) as caught:
        export_huggingface(tmp_path / "saved", tmp_path / "model", config=write_config(tmp_path / "config", config_of(family) | changes))
    assert message in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_a_configuration_of_the_quantized_model(tmp_path: Path, ranks: Ranks) -> None:
    right = published("qwen3")
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), as_in_paddle("qwen3", right, fused=True))
    for quantized in ({"quant_method": "fp8"}, None, {"quant_method": None, "weight_quantize_algo": None}):
        config = write_config(tmp_path / "config", config_of("qwen3", quantization_config=quantized))
        for recipe in ("auto", "qwen3"):
            out = tmp_path / f"model {recipe} {quantized}"
            if quantized is None or not quantized["quant_method"]:
                export_huggingface(tmp_path / "saved", out, config=config, recipe=recipe)
                assert_equal(read_model(out), right)
                continue
            with pytest.raises(MismatchError, match=r"is quantized \(fp8\), and the checkpoint's tensors are not; give a configuration wi"):
                export_huggingface(tmp_path / "saved", out, config=config, recipe=recipe)
            assert not out.exists()
    # Tensors that are quantized, copied as they are.
    packed = {"up.qweight": np.arange(6, dtype=np.int32), "up.scales": np.ones(3, np.float16)}
    path = tmp_path / "packed"
    path.mkdir()
    pieces = [(Piece(name, str(array.dtype), array.shape, (0,), array.shape), array.data) for name, array in packed.items()]
    record = write_rank_file(path / rank_file_name(0), pieces)
    (path / MANIFEST_NAME).write_text(Manifest(3, 1, utc_now(), {}, [], None, (record,)).to_json())
    config = write_config(tmp_path / "other", {"model_type": "other", "quantization_config": {"quant_method": "gptq"}})
    export_huggingface(path, tmp_path / "copied", config=config, recipe="none")
    assert_equal(read_model(tmp_path / "copied"), packed)


def test_a_head_that_is_not_there(tmp_path: Path, ranks: Ranks) -> None:
    arrays = as_in_paddle("qwen3", published("qwen3"), fused=False)
    del arrays["lm_head.weight"]
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), arrays)
    with pytest.raises(MismatchError, match="the checkpoint has no 'lm_head.weight'"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", config=write_config(tmp_path / "config", config_of("qwen3")))
    config = write_config(tmp_path / "tied", config_of("qwen3", tie_word_embeddings=True))
    assert export_huggingface(tmp_path / "saved", tmp_path / "model", config=config).tensors == len(arrays)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', None])
def test_a_malformed_configuration(text: str | None, tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), SMALL)
    config = tmp_path / "config"
    if text is not None:
        write_config(config, text)
    with pytest.raises(CheckpointError, match="config.json"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", config=config, recipe="none")
    assert not (tmp_path / "model").exists()


def rule(source: str, *targets: str, **options: Any) -> dict[str, Any]:
    return {"source": source, "targets": list(targets), **options}


def test_copies_and_recipes_are_checked_against_the_configuration(tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    right = published("llama")
    fields = config_of("llama") | {"intermediate_size": INNER, "head_dim": WIDTH}
    turned = {name: np.ascontiguousarray(a.T) if "_proj." in name else a for name, a in right.items()}
    paddle = as_in_paddle("llama", right, fused=False)
    paddle_turned = {name: np.ascontiguousarray(a.T) if "k_proj." in name else a for name, a in paddle.items()}
    saved = {"right": right, "turned": turned, "other": SMALL, "paddle": paddle, "paddle turned": paddle_turned}
    for name, arrays in saved.items():
        ranks(1).run(made_models.save_model, str(tmp_path / name), arrays)
    config = write_config(tmp_path / "config", fields)
    nested = write_config(tmp_path / "nested", {"model_type": "outer", "text_config": fields})
    for name, given, message in (
        ("turned", config, rf"k_proj\.weight' \[{HIDDEN}, {GROUPS * WIDTH}\] for \[{GROUPS * WIDTH}, {HIDDEN}\]"),
        ("turned", nested, r"\(llama for PaddleFormers' names, or a FILE of rules.* or no configuration"),
        ("other", config, r"lacks model\.embed_tokens\.weight, .* has besides .*first\.weight"),
        ("paddle turned", config, r"lacks model\.embed_tokens\.weight, .* has besides .*llama\.embed_tokens\.weight"),
        ("right", write_config(tmp_path / "tied", fields | {"tie_word_embeddings": True}), r"has besides lm_head\.weight"),
    ):
        with pytest.raises(MismatchError, match=f"copied as it is, isn't the model that .*{message}"):
            export_huggingface(tmp_path / name, tmp_path / "model", config=given, recipe="none")
        assert not (tmp_path / "model").exists()
    assert export_huggingface(tmp_path / "right", tmp_path / "model", config=config, recipe="none").unchecked is None
    assert_equal(read_model(tmp_path / "model"), right)
    # PaddleFormers reads its own names and layout with this configuration too; real_models tries that.
    assert export_huggingface(tmp_path / "paddle", tmp_path / "copy", config=config, recipe="none").unchecked is None
    assert_equal(read_model(tmp_path / "copy"), paddle)
    # A recipe of one's own, and that of another family, must make this model too.
    recipe = tmp_path / "recipe.json"
    rules = [rule(name, name) for name in right if not name.endswith("_proj.weight")]
    rules += [rule(name, name, transpose=True) for name in right if name.endswith("_proj.weight")]
    for name, given, message in (
        ("right", rules, rf"k_proj\.weight' \[{HIDDEN}, {GROUPS * WIDTH}\] for \[{GROUPS * WIDTH}, {HIDDEN}\].* \(llama\), give"),
        ("turned", [*rules[1:], rule(rules[0]["source"])], r"it lacks .* give this model's configuration, or none"),
        ("turned", [*rules[1:], rule(rules[0]["source"], "other")], r"it lacks .*; has besides other\."),
    ):
        recipe.write_text(json.dumps({"name": "mine", "rules": given}))
        with pytest.raises(MismatchError, match=f"the recipe 'mine' doesn't make of .* the model that .*{message}"):
            export_huggingface(tmp_path / name, tmp_path / "mine", config=config, recipe=str(recipe))
    with pytest.raises(MismatchError, match="the recipe 'llama' doesn't make of .* the model that "):
        export_huggingface(
            tmp_path / "paddle",
            tmp_path / "mine",
            config=write_config(tmp_path / "qwen3", fields | {"model_type": "qwen3"}),
            recipe="llama",
        )
    assert not (tmp_path / "mine").exists()
    recipe.write_text(json.dumps({"name": "mine", "rules": rules}))
    assert export_huggingface(tmp_path / "turned", tmp_path / "mine", config=config, recipe=str(recipe)).unchecked is None
    assert_equal(read_model(tmp_path / "mine"), right)
    unchecked = export_huggingface(tmp_path / "turned", tmp_path / "by qwen3", config=config, recipe="qwen3").unchecked
    assert (
        unchecked is not None
        and f"the recipe 'qwen3' is not that of '{config / 'config.json'}', which says model_type 'llama'" in unchecked
    )
    assert_equal(read_model(tmp_path / "by qwen3"), right)
    del fields["intermediate_size"]
    lacking = write_config(tmp_path / "lacking", fields)
    unchecked = export_huggingface(tmp_path / "turned", tmp_path / "lacks", config=lacking, recipe=str(recipe)).unchecked
    assert unchecked is not None and "what the recipe makes fits its configuration was not checked: " in unchecked
    for number, (given, message) in enumerate(
        ((fields, "intermediate_size"), ({"model_type": "gpt"}, "model_type 'gpt', which no recipe"))
    ):
        where = str(write_config(tmp_path / f"unknown {number}", given))
        assert (
            main(["convert", str(tmp_path / "other"), "--to", "hf", str(tmp_path / f"out {number}"), "--recipe", "none", "--config", where])
            == 0
        )
        error = capsys.readouterr().err
        assert message in error and "not checked" in error and error.count("\n") == 1
