"""LoRA adapters merged into their base, and by themselves in ``peft``'s layout: values against numpy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora_models
import made_models
import numpy as np
import pytest
from harness import RankPool
from published import as_in_paddle, config_of, published
from safetensors.numpy import load_file, save_file
from test_huggingface import assert_equal, read_model, write_config

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.errors import CheckpointError, MismatchError
from paddle_fsdp_ckpt.export.from_huggingface import import_huggingface
from paddle_fsdp_ckpt.export.huggingface import export_huggingface
from paddle_fsdp_ckpt.export.peft import export_peft
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME
from paddle_fsdp_ckpt.storage.manifest import Manifest

Ranks = Callable[[int], RankPool]


class Saved:
    """What a family's LoRA run left, and what its exports must be."""

    def __init__(self, root: Path, ranks: RankPool, family: str, fused: bool) -> None:
        self.root, self.family = root, family
        arrays = as_in_paddle(family, published(family), fused)
        weights = [key for key in arrays if key.endswith("_proj.weight")]
        odd = next((key for key in weights if ".qkv_proj." in key), weights[0]).removesuffix(".weight")
        adapters = lora_models.adapters_for(weights, arrays, {odd: 3})
        self.scalings = {key.removesuffix(".weight"): 4.0 for key in weights} | {odd: 0.7}
        # A norm trains too, in the checkpoints of its own name.
        self.norm = next(key for key in arrays if key.endswith(("model.norm.weight", "llama.norm.weight")))
        self.merged = lora_models.merged(arrays, adapters, self.scalings)
        ranks.run(lora_models.save_lora, str(root), arrays, adapters, self.scalings)
        (root / "norm").mkdir()
        ranks.run(lora_models.save_lora, str(root / "norm"), arrays, adapters, self.scalings, [self.norm])
        ranks.run(lora_models.save_plainly, str(root / "merged"), self.merged)
        self.config = write_config(root / "config", config_of(family))
        self.arrays, self.adapters = arrays, adapters

    def export(self, source: str, **options: Any) -> dict[str, np.ndarray]:
        out = self.root / f"out {len(list(self.root.iterdir()))}"
        export_huggingface(self.root / source, out, config=self.config, **options)
        return read_model(out)


@pytest.fixture(scope="module", params=[("llama", False), ("qwen3", True)], ids=["llama", "qwen3 fused"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rank_pools: Any) -> Saved:
    return Saved(tmp_path_factory.mktemp("lora"), rank_pools.pool(2), *request.param)


def test_adapters_are_merged_into_their_base(saved: Saved) -> None:
    right = saved.export("merged")
    assert_equal(saved.export("adapters", base=saved.root / "base"), right)
    assert_equal(saved.export("full", merge_lora=True, workers=3), right)
    with pytest.raises(CheckpointError, match="LoRA adapters' states are not those of the weights"):
        saved.export("full", merge_lora=True, optimizer=True)
    assert_equal(saved.export("wrapped", base=saved.root / "base"), right)
    assert_equal(saved.export("wrapped", base=saved.root / "wrapped full"), right)
    assert_equal(saved.export("wrapped full", merge_lora=True), right)
    assert_equal(saved.export("norm/adapters", base=saved.root / "norm" / "base"), right)
    assert any(not np.array_equal(right[name], value) for name, value in saved.export("base").items())
    half = saved.export("adapters", base=saved.root / "base", dtype="float16")
    assert_equal(half, {name: value.astype(np.float16) for name, value in right.items()})


def test_a_base_by_other_names(saved: Saved, tmp_path: Path, ranks: Ranks) -> None:
    right = saved.export("merged")
    own = "llama." if saved.family == "llama" else "model."
    renamed = {name.replace(own, "net.decoder.", 1): array for name, array in saved.arrays.items()}
    ranks(2).run(made_models.save_model, str(tmp_path / "renamed"), renamed)
    assert_equal(saved.export("adapters", base=tmp_path / "renamed"), right)
    doubled = {name: array * 2 for name, array in saved.arrays.items()}
    ranks(1).run(made_models.save_several, str(tmp_path / "several"), {"ema": doubled, "model": saved.arrays})
    assert_equal(saved.export("adapters", base=tmp_path / "several"), right)
    ranks(1).run(made_models.save_several, str(tmp_path / "others"), {"ema": doubled, "model": doubled})
    for options in ({}, {"allow_other_base": True}):
        with pytest.raises(MismatchError, match=r"with each of 'ema\.', 'model\.' in front.*--to hf OUT --model NAME`, and give that"):
            saved.export("adapters", base=tmp_path / "others", **options)
    ranks(1).run(made_models.save_several, str(tmp_path / "less"), {"model": dict(list(saved.arrays.items())[1:])})
    with pytest.raises(MismatchError, match="lacks .* of the base of"):
        saved.export("adapters", base=tmp_path / "less")


def test_a_hugging_face_model_is_a_base(tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    half = {name: tensor.astype(np.float16) for name, tensor in published("llama").items()}
    tensors = {name: tensor.astype(np.float32) for name, tensor in half.items()}
    # Of a Llama that somebody wrote with Hugging Face's names.
    arrays = {name.replace("llama.", "model.", 1): array for name, array in as_in_paddle("llama", tensors, fused=False).items()}
    weights = [name for name in arrays if name.endswith(("q_proj.weight", "down_proj.weight"))]
    adapters = lora_models.adapters_for(weights, arrays, {})
    scalings = {name.removesuffix(".weight"): 2.0 for name in weights}
    ranks(1).run(lora_models.save_lora, str(tmp_path), arrays, adapters, scalings)
    merged = lora_models.merged(arrays, adapters, scalings)
    config = write_config(tmp_path / "base of hf", config_of("llama"))
    save_file(half, tmp_path / "base of hf" / "model.safetensors")  # load_huggingface(cast=True) converts them too
    before = set(tmp_path.iterdir())
    command = ["convert", str(tmp_path / "adapters"), "--to", "hf", str(tmp_path / "out"), "--base", str(tmp_path / "base of hf")]
    assert main([*command, "--config", str(config)]) == 0
    ranks(1).run(lora_models.save_plainly, str(tmp_path / "merged"), merged)
    export_huggingface(tmp_path / "merged", tmp_path / "right", config=config)
    assert_equal(read_model(tmp_path / "out"), read_model(tmp_path / "right"))
    save_file({name: array + 1 for name, array in tensors.items()}, tmp_path / "base of hf" / "model.safetensors")
    command[4] = str(tmp_path / "other out")
    assert main([*command, "--config", str(config)]) == 2
    assert f"'{tmp_path / 'base of hf'}' is not the base of '{tmp_path / 'adapters'}'" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before | {tmp_path / name for name in ("out", "merged", "right")}


def test_names_and_layouts_as_they_are(saved: Saved, tmp_path: Path) -> None:
    export_huggingface(saved.root / "full", tmp_path / "model", recipe="none", merge_lora=True)
    assert_equal(read_model(tmp_path / "model"), saved.merged)


def test_large_weights_are_merged_in_strips(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tensors", "values", "merging"):
        monkeypatch.setattr(f"paddle_fsdp_ckpt.export.{module}.BATCH_NUMEL", 23)
    assert_equal(saved.export("full", merge_lora=True), saved.export("merged"))
    export_huggingface(saved.root / "full", tmp_path / "model", recipe="none", merge_lora=True)
    assert_equal(read_model(tmp_path / "model"), saved.merged)


@pytest.mark.parametrize("source", ["adapters", "full", "wrapped full"])
def test_adapters_alone_in_the_layout_of_peft(saved: Saved, source: str, tmp_path: Path) -> None:
    report = export_peft(saved.root / source, tmp_path / "peft", config=saved.config)
    assert report.files == ("adapter_model.safetensors", "adapter_config.json")
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["task_type"]) == ("LORA", 2, 8, "CAUSAL_LM")
    right, base = saved.export("merged"), saved.export("base")
    changed = [name for name in right if not np.array_equal(right[name], base[name])]
    assert sorted(f"{name}.weight" for name in config["target_modules"]) == sorted(changed)
    assert set(config["rank_pattern"]) == set(config["alpha_pattern"])
    assert len(config["rank_pattern"]) == (3 if saved.family == "qwen3" else 1)  # the parts of a fused projection
    assert len(tensors) == 2 * len(changed)
    for name in changed:
        module = name.removesuffix(".weight")
        a, b = (tensors.pop(f"base_model.model.{module}.lora_{one}.weight").astype(np.float64) for one in "AB")
        scaling = config["alpha_pattern"].get(module, 8) / config["rank_pattern"].get(module, 2)
        np.testing.assert_allclose(base[name] + scaling * (b @ a), right[name], rtol=0, atol=1e-5)


def test_what_does_not_fit_is_refused(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "model"

    def refused(source: str, **options: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            export_huggingface(saved.root / source, out, config=saved.config, **options)
        assert not out.exists()
        return str(caught.value)

    assert "was saved without its base; give that by --base" in refused("adapters")
    assert "was saved without its base" in refused("adapters", merge_lora=True)
    assert "holds LoRA adapters, such as" in refused("full")
    assert "was not saved with trainable_only" in refused("full", base=saved.root / "base")
    assert "holds no LoRA layers" in refused("base", merge_lora=True)
    count = len(saved.arrays)
    norms = sum("norm" in name for name in saved.arrays)
    said = refused("adapters", base=saved.root / "other")
    assert f"is not the base of '{saved.root / 'adapters'}': {count - norms} of its {count} parameters have other values" in said
    assert saved.export("adapters", base=saved.root / "other", allow_other_base=True)
    assert "--lora-alpha 3 is not what layers" in refused("full", merge_lora=True, lora_alpha=3)
    with pytest.raises(MismatchError, match="more that trained than LoRA layers.*norm.weight"):
        export_peft(saved.root / "norm" / "adapters", out, config=saved.config)


def test_what_trained_besides_is_found_under_any_name(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(lora_models.save_trained_head, str(tmp_path))
    for source, model_name in (("wrapped", None), ("several", "actor")):
        with pytest.raises(MismatchError, match=r"more that trained than LoRA layers.*: lm_head\.weight; export"):
            export_peft(tmp_path / source, tmp_path / "out", recipe="qwen3", model_name=model_name)
    assert not (tmp_path / "out").exists()


O_PROJ, NORM, EMBEDDING, HEAD = "model.layers.0.self_attn.o_proj.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(("dtype", "master_weights"), [("float32", False), ("bfloat16", True)])
def test_what_trained_besides_takes_the_place_of_the_base(dtype: str, master_weights: bool, tmp_path: Path, ranks: Ranks) -> None:
    # A base with master weights of its own; a norm trains, and a weight beside the LoRA matrices that it has.
    right = published("qwen3")
    base = as_in_paddle("qwen3", right, fused=False)
    trained = {NORM: base[NORM] * np.float32(1.7), O_PROJ: base[O_PROJ] * np.float32(0.3)}
    adapters = lora_models.adapters_for([O_PROJ], base, {})
    layer = O_PROJ.removesuffix(".weight")
    ranks(2).run(made_models.save_model, str(tmp_path / "base"), base, dtype, {}, master_weights)
    arrays = base | adapters | trained
    ranks(2).run(lora_models.save_what_trained, str(tmp_path / "adapters"), arrays, list(trained), {layer: 2.0}, dtype, {})
    options: dict[str, Any] = {"recipe": "qwen3", "dtype": "float32", "master_weights": master_weights}
    export_huggingface(tmp_path / "adapters", tmp_path / "model", base=tmp_path / "base", **options)
    merged = lora_models.merged(base | trained, adapters, {layer: 2.0})
    assert_equal(read_model(tmp_path / "model"), right | {NORM: merged[NORM], O_PROJ: np.ascontiguousarray(merged[O_PROJ].T)})


def test_only_the_adapters_have_master_weights(tmp_path: Path, ranks: Ranks) -> None:
    right = published("qwen3")
    for array in right.values():
        array.view(np.uint32)[...] &= 0xFFFF0000  # bfloat16 has them
    base = as_in_paddle("qwen3", right, fused=False)
    adapters = lora_models.adapters_for([O_PROJ], base, {})
    layer = O_PROJ.removesuffix(".weight")
    ranks(2).run(made_models.save_model, str(tmp_path / "base"), base, "bfloat16")
    ranks(2).run(lora_models.save_what_trained, str(tmp_path / "adapters"), base | adapters, [], {layer: 2.0}, "bfloat16", {})
    options: dict[str, Any] = {"base": tmp_path / "base", "recipe": "qwen3", "dtype": "float32", "master_weights": True}
    export_huggingface(tmp_path / "adapters", tmp_path / "model", **options)
    merged = np.ascontiguousarray(lora_models.merged(base, adapters, {layer: 2.0})[O_PROJ].T)
    assert_equal(read_model(tmp_path / "model"), right | {O_PROJ: merged})
    plain = lora_models.adapters_for([O_PROJ], base, {})
    ranks(2).run(lora_models.save_what_trained, str(tmp_path / "float"), base | plain, [], {layer: 2.0}, "float32", {})
    ranks(2).run(made_models.save_model, str(tmp_path / "float base"), base)
    with pytest.raises(CheckpointError, match="float' holds no master weights; leave"):
        export_huggingface(tmp_path / "float", tmp_path / "other", **options | {"base": tmp_path / "float base"})


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("trains", [EMBEDDING, HEAD])
def test_what_trained_apart_from_a_tied_base(trains: str, stock: bool, tmp_path: Path, ranks: Ranks) -> None:
    right = published("qwen3")
    right[HEAD] = right[EMBEDDING]
    arrays = as_in_paddle("qwen3", right, fused=False)
    base = {name: array for name, array in arrays.items() if name != HEAD}
    if stock:
        ranks(2).run(made_models.save_with_stock, str(tmp_path / "base"), base, {HEAD: EMBEDDING})
    else:
        ranks(2).run(made_models.save_model, str(tmp_path / "base"), base, "float32", {HEAD: EMBEDDING})
    adapters = lora_models.adapters_for([O_PROJ], arrays, {})
    layer = O_PROJ.removesuffix(".weight")
    right[O_PROJ] = np.ascontiguousarray(lora_models.merged(arrays, adapters, {layer: 2.0})[O_PROJ].T)
    right[trains] = right[trains] + 1
    apart = arrays | adapters | {trains: right[trains]}
    ranks(2).run(lora_models.save_what_trained, str(tmp_path / "apart"), apart, [trains], {layer: 2.0}, "float32", {})
    for number, config in enumerate((None, write_config(tmp_path / "untied", config_of("qwen3")))):
        export_huggingface(tmp_path / "apart", tmp_path / f"{number}", base=tmp_path / "base", recipe="qwen3", config=config)
        assert_equal(read_model(tmp_path / f"{number}"), right)
    config = write_config(tmp_path / "tied", config_of("qwen3", tie_word_embeddings=True))
    with pytest.raises(MismatchError, match="'lm_head.weight' is a tensor of its own, which would be lost"):
        export_huggingface(tmp_path / "apart", tmp_path / "model", base=tmp_path / "base", config=config)
    # Where the model has both names for one tensor, they still are one.
    together = {name: array for name, array in apart.items() if name != HEAD} | {EMBEDDING: right[trains]}
    ranks(2).run(lora_models.save_what_trained, str(tmp_path / "one"), together, [EMBEDDING], {layer: 2.0}, "float32", {HEAD: EMBEDDING})
    export_huggingface(tmp_path / "one", tmp_path / "model", base=tmp_path / "base", config=config)
    assert_equal(read_model(tmp_path / "model"), {name: right[trains if name == EMBEDDING else name] for name in right if name != HEAD})


def test_layers_whose_names_end_alike_are_told_apart(tmp_path: Path, ranks: Ranks) -> None:
    scalings = {"proj": 4.0, "enc.proj": 1.0, "enc.more": 1.0, "enc.1.up": 3.0}
    others = ["encoder.1.up", "dec.proj", "out"]
    ranks(1).run(lora_models.save_layers, str(tmp_path / "saved"), scalings, others)
    export_peft(tmp_path / "saved", tmp_path / "peft", recipe="none")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    for name in (*scalings, *others):
        # What peft 0.21 makes of the file: a text must match a whole name, and the first key that matches the end of a name counts.
        assert bool(re.fullmatch(config["target_modules"], name)) == (name in scalings), name
        key = next((one for one in config["alpha_pattern"] if re.match(rf"(.*\.)?({one})$", name)), None)
        if name in scalings:
            assert config["alpha_pattern"].get(key, config["lora_alpha"]) / config["r"] == scalings[name], name


def test_adapters_of_a_self_written_llama(tmp_path: Path, ranks: Ranks) -> None:
    random = np.random.RandomState(3)
    layer = "layers.0.self_attn.q_proj"
    arrays = {f"{layer}.lora_A": random.randn(6, 2), f"{layer}.lora_B": random.randn(2, 5), f"{layer}.weight": random.randn(6, 5)}
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), {name: array.astype(np.float32) for name, array in arrays.items()})
    export_peft(tmp_path / "saved", tmp_path / "peft", recipe="llama", lora_alpha=4.0)
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    there = "base_model.model.model.layers.0.self_attn.q_proj"
    assert sorted(found) == [f"{there}.lora_A.weight", f"{there}.lora_B.weight"]
    np.testing.assert_array_equal(found[f"{there}.lora_A.weight"], arrays[f"{layer}.lora_A"].T.astype(np.float32))


def test_a_quantized_base_and_no_master_weights(tmp_path: Path) -> None:
    halves = {"up.lora_A": np.full((4, 2), 0.3, np.float32), "up.lora_B": np.full((2, 4), 0.7, np.float32)}
    (tmp_path / "quantized").mkdir()
    save_file({"up.weight": np.ones((4, 4), np.int8), **halves}, tmp_path / "quantized" / "model.safetensors")
    import_huggingface(tmp_path / "quantized", tmp_path / "saved", recipe="none")
    with pytest.raises(MismatchError, match="are no floating point numbers, as of a quantized model: 'up.weight' int8; give the base"):
        export_huggingface(tmp_path / "saved", tmp_path / "out", recipe="none", merge_lora=True, lora_alpha=4.0)
    with pytest.raises(CheckpointError, match="holds no master weights; leave --master-weights"):
        export_peft(tmp_path / "saved", tmp_path / "out", recipe="none", master_weights=True, lora_alpha=4.0)
    assert not (tmp_path / "out").exists()


def test_adapters_that_peft_wants_otherwise(tmp_path: Path, ranks: Ranks) -> None:
    base = as_in_paddle("qwen3", published("qwen3"), fused=False)
    adapters = lora_models.adapters_for([EMBEDDING, O_PROJ], base, {})
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), base | adapters)
    recipe = tmp_path / "recipe.json"
    rule = O_PROJ.replace(".0.", ".{layer}.")
    recipe.write_text(json.dumps({"name": "mine", "extends": "qwen3", "rules": [{"source": rule, "targets": [rule]}]}))
    for name, key in (("qwen3", EMBEDDING), (str(recipe), O_PROJ)):
        left = {f"{key.removesuffix('.weight')}.lora_{one}" for one in "AB"}
        arrays = base | {name: array for name, array in adapters.items() if name in left}
        saved = tmp_path / f"{key} only"
        ranks(1).run(made_models.save_model, str(saved), arrays)
        with pytest.raises(MismatchError, match=f"doesn't transpose '{key}', .* merge them into their base, --to hf"):
            export_peft(saved, tmp_path / "peft", recipe=name, lora_alpha=4.0)
        export_huggingface(saved, tmp_path / f"{key} merged", recipe=name, merge_lora=True, lora_alpha=4.0)
        right = lora_models.merged(base, adapters, {key.removesuffix(".weight"): 2.0})
        np.testing.assert_array_equal(read_model(tmp_path / f"{key} merged")[key], right[key])
    with pytest.raises(CheckpointError, match="is nan, and a finite number is needed"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="qwen3", merge_lora=True, lora_alpha=float("nan"))


def test_layers_that_are_no_lora_are_refused(saved: Saved, tmp_path: Path, ranks: Ranks) -> None:
    first = next(iter(saved.scalings))
    for number, (name, shape, words) in enumerate(
        (("lora_AB", (2, 2), "no LoRA of just"), ("lora_A", (12, 2, 1), r"must be \[in, r\]"), ("lora_A", (12, 5), r"must be \[in, r\]"))
    ):
        strange = saved.adapters | {f"{first}.{name}": np.zeros(shape, np.float32)}
        ranks(2).run(lora_models.save_plainly, str(tmp_path / f"{number}"), {**saved.arrays, **strange})
        with pytest.raises(MismatchError, match=words):
            export_huggingface(tmp_path / f"{number}", tmp_path / "model", recipe="none", merge_lora=True)


def test_on_the_command_line(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapters, base, config = (str(saved.root / name) for name in ("adapters", "base", "config"))
    assert main(["convert", adapters, "--to", "hf", str(tmp_path / "hf"), "--base", base, "--config", config]) == 0
    assert f"{len(saved.scalings)} LoRA adapters were merged" in capsys.readouterr().out
    assert_equal(read_model(tmp_path / "hf"), saved.export("merged"))
    assert main(["convert", adapters, "--to", "peft", str(tmp_path / "peft"), "--config", config]) == 0
    assert main(["convert", adapters, "--to", "peft", str(tmp_path / "2"), "--config", config, "--base", base]) == 2
    assert "--base is for --to hf" in capsys.readouterr().err
    # Without what the checkpoint says of the scaling it must be given.
    manifest = Manifest.from_json((saved.root / "full" / MANIFEST_NAME).read_text())
    unsaid = tmp_path / "unsaid"
    unsaid.mkdir()
    for file in (saved.root / "full").iterdir():
        (unsaid / file.name).write_bytes(file.read_bytes())
    fields = vars(manifest) | {"lora": {}}
    (unsaid / MANIFEST_NAME).write_text(Manifest(**fields).to_json())
    command = ["convert", str(unsaid), "--to", "peft", str(tmp_path / "3"), "--config", config]
    assert main(command) == 2
    assert "doesn't say how these LoRA layers scale" in capsys.readouterr().err
    assert main([*command, "--lora-alpha", "8"]) == 0
    assert json.loads((tmp_path / "3" / "adapter_config.json").read_text())["lora_alpha"] == 8
