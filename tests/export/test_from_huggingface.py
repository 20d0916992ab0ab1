"""Hugging Face models as checkpoints: loaded by real ranks, each value is one that numpy knew before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
from harness import RankPool
from published import SIZES, as_in_paddle, config_of, published
from safetensors.numpy import save_file

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.errors import CheckpointError, IncompleteCheckpointError, TargetExistsError
from paddle_fsdp_ckpt.export.from_huggingface import import_huggingface
from paddle_fsdp_ckpt.export.new_directory import new_directory
from paddle_fsdp_ckpt.storage.format import rank_file_name
from paddle_fsdp_ckpt.storage.verify import verify

Ranks = Callable[[int], RankPool]


def write_model(path: Path, arrays: Mapping[str, np.ndarray], config: Any, files: int = 1) -> Path:
    """Write a model as ``save_pretrained`` does: one file, or several and an index."""
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(dict(arrays), path / "model.safetensors")
        return path
    weight_map = {name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" for number, name in enumerate(arrays)}
    for file in set(weight_map.values()):
        save_file({name: array for name, array in arrays.items() if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize(
    ("family", "world_size", "files"), [("llama", 2, 1), ("qwen2", 1, 3), ("qwen2_moe", 3, 2), ("qwen3", 2, 3), ("qwen3_moe", 2, 1)]
)
def test_families(family: str, world_size: int, files: int, tmp_path: Path, ranks: Ranks) -> None:
    tensors = published(family, biases=family.startswith("qwen2"))
    model = write_model(tmp_path / "model", tensors, config_of(family, **SIZES), files)
    import_huggingface(model, tmp_path / "saved")
    assert verify(tmp_path / "saved").is_good
    right = as_in_paddle(family, tensors, fused=False)
    (found, *_) = ranks(world_size).run(made_models.load_into, str(tmp_path / "saved"), {k: a.shape for k, a in right.items()}, {})
    assert found.keys() == right.keys()
    for key, array in right.items():
        assert found[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("written", [False, True])
def test_tied_weights(family: str, written: bool, tmp_path: Path, ranks: Ranks) -> None:
    tensors = published(family)
    right = as_in_paddle(family, tensors, fused=False)
    embedding = "llama.embed_tokens.weight" if family == "llama" else "model.embed_tokens.weight"
    del tensors["lm_head.weight"], right["lm_head.weight"]
    if written:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = write_model(tmp_path / "model", tensors, config_of(family, tie_word_embeddings=True))
    report = import_huggingface(model, tmp_path / "saved")
    assert report.tied == (tuple(sorted(("lm_head.weight", embedding))),)
    shapes = {key: array.shape for key, array in right.items()}
    (found, *_) = ranks(2).run(made_models.load_into, str(tmp_path / "saved"), shapes, {"lm_head.weight": embedding})
    assert found[embedding].tobytes() == right[embedding].tobytes()


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"tie_word_embeddings": True}, {}, "have other values; say false there"),
        ({}, {"lm_head.weight": None}, "nothing that becomes 'lm_head.weight'"),
        ({"vocab_size": 5}, {}, "vocab_size and hidden_size in"),
        ({}, {"model.layers.0.mlp.more": np.zeros(2, np.float32)}, "1 key is taken by no rule: 'model.layers.0.mlp.more'"),
        ({"model_type": "bert"}, {}, "model_type 'bert'; give --recipe"),
        (SIZES, {"model.layers.1.mlp.up_proj.weight": None}, "model' holds, which lacks model.layers.1.mlp.up_proj.weight; give"),
        (SIZES | {"num_hidden_layers": 1}, {}, "model' holds, which has besides model.layers.1."),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            {"model.layers.0.mlp.up_proj.qweight": np.zeros((2, 10), np.int32)},
            "says that the model is quantized (gptq); take the model as it is published in bfloat16",
        ),
        ({"quantization_config": {"load_in_8bit": True}}, {}, "says that the model is quantized (bitsandbytes)"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    arrays = {name: array for name, array in (published("qwen3") | tensors).items() if array is not None}
    model = write_model(tmp_path / "model", arrays, config_of("qwen3") | changes)
    with pytest.raises(CheckpointError) as caught:
        import_huggingface(model, tmp_path / "saved")
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == ["model"]


def test_what_old_models_have_besides(tmp_path: Path) -> None:
    tensors = published("llama") | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    assert import_huggingface(write_model(tmp_path / "model", tensors, config_of("llama")), tmp_path / "saved").keys == len(tensors) - 1


def test_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", {"a": np.arange(3, dtype=np.float32), "b": np.ones(2, np.float32)}, None, files=2)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(model.glob("*.safetensors"))):
        file.rename(blobs / f"{number}")
        file.symlink_to(Path("..") / "blobs" / f"{number}")
    assert import_huggingface(model, tmp_path / "saved", recipe="none").keys == 2


@pytest.mark.parametrize("files", [1, 2])
def test_tensors_without_elements(files: int, tmp_path: Path) -> None:
    empty = {"a": np.zeros((0, 3), np.float32), "c": np.zeros(0, np.float32)}
    model = write_model(tmp_path / "model", {"b": np.ones(2, np.float32), **empty}, None, files)
    assert import_huggingface(model, tmp_path / "saved", recipe="none").keys == 1
    # What is saved of a model of which other ranks, or nobody, had the values at the time.
    with pytest.raises(IncompleteCheckpointError, match="has 2 tensors, and no values; where ranks each kept a part"):
        import_huggingface(write_model(tmp_path / "other", empty, None, files), tmp_path / "again", recipe="none")
    assert sorted(os.listdir(tmp_path)) == ["model", "other", "saved"]


def damage_index(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = model / "model.safetensors.index.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def replaced_by_one_file(model: Path) -> None:
    for part in model.glob("model-*.safetensors"):
        part.unlink()
    save_file({"a": np.ones(5, np.float32)}, model / "model.safetensors")


def store_in_eight_bits(model: Path) -> None:
    header = json.dumps({name: {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [i, i + 3]} for name, i in (("b", 0), ("d", 3))})
    (model / "model-00002-of-00002.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: (model / "model-00002-of-00002.safetensors").unlink(), "lacks model-00002-of-00002.safetensors"),
        (lambda model: os.truncate(model / "model-00001-of-00002.safetensors", 80), "too short"),
        (lambda model: os.truncate(model / "model-00001-of-00002.safetensors", 150), "it has 150 bytes, and describes"),
        (lambda model: (model / "model.safetensors.index.json").write_text("{"), "is malformed"),
        (lambda model: damage_index(model, lambda fields: fields["weight_map"].update(a="../x")), "is no plain name"),
        (lambda model: damage_index(model, lambda fields: fields["weight_map"].update(e=fields["weight_map"]["a"])), "lack 'e'"),
        (lambda model: damage_index(model, lambda fields: fields["weight_map"].pop("a")), "has 'a', which the index doesn't give it"),
        (lambda model: (model / "model.safetensors.index.json").unlink(), "lacks model.safetensors"),
        # Saved whole where it lay in parts before, by a tool that removes the parts, or leaves them.
        (lambda model: save_file({"a": np.ones(5, np.float32)}, model / "model.safetensors"), "holds two models: 'model.safetensors'"),
        (replaced_by_one_file, "holds two models: 'model.safetensors'"),
        (store_in_eight_bits, "'b' has the dtype 'F8_E4M3', which is not supported; take the model as it is published in bfloat16"),
    ],
)
def test_damaged_models(change: Callable[[Path], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model", {name: np.ones(5, np.float32) for name in "abcd"}, None, files=2)
    change(model)
    assert main(["convert", str(model), "--to", "fc", str(tmp_path / "saved"), "--recipe", "none"]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert os.listdir(tmp_path) == ["model"]


def test_a_checkpoint_and_a_model_taken_for_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    model = write_model(tmp_path / "model", {"w": np.ones(5, np.float32)}, None)
    step = root / "step_00000001"
    import_huggingface(model, step, recipe="none")
    for directory, message in ((step, "is a checkpoint already, this package's"), (root, "holds 1 checkpoint: step_00000001")):
        assert main(["convert", str(directory), "--to", "fc", str(tmp_path / "again"), "--recipe", "none"]) == 2
        error = capsys.readouterr().err
        assert message in error and "`convert DIR --to hf OUT`" in error and "load(path, model=model)" in error
    for command in (["inspect", model], ["verify", model], ["diff", step, model], ["convert", model, "--to", "hf", tmp_path / "again"]):
        assert main([*map(str, command), *(["--recipe", "none"] if command[0] == "convert" else [])]) == 2
        error = capsys.readouterr().err
        assert "is a Hugging Face model, not a checkpoint" in error and "--to fc" in error and "load_huggingface" in error


def test_a_name_on_a_hub_is_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "Qwen3-0.6B"), "--to", "fc", str(tmp_path / "saved")]) == 2
    error = capsys.readouterr().err
    assert "there is no directory" in error and "Qwen3-0.6B" in error and "download the model first" in error
    assert os.listdir(tmp_path) == []


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model", published("qwen3"), config_of("qwen3"))
    command = ["convert", str(model), "--to", "fc", str(tmp_path / "saved")]
    assert main([*command, "--dtype", "bf16"]) == 0
    assert "by the recipe 'qwen3'" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "saved"), "--to", "hf", str(tmp_path / "again"), "--config", str(model)]) == 0
    assert main(command) == 2
    for option in (["--master-weights"], ["--config", "x"], ["--max-shard-size", "5GB"]):
        assert main([*command[:-1], str(tmp_path / "other"), *option]) == 2
        assert "is for --to hf" in capsys.readouterr().err.splitlines()[-1]


def test_a_killed_conversion_leaves_no_checkpoint(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", published("qwen3"), config_of("qwen3"))
    script = """
        import os, signal, sys
        from paddle_fsdp_ckpt.export.from_huggingface import import_huggingface
        import_huggingface(sys.argv[1], sys.argv[2], workers=2, progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
        """
    assert run(script, model, tmp_path / "saved").returncode == -signal.SIGKILL
    assert not (tmp_path / "saved").exists()
    assert len(os.listdir(tmp_path)) == 2
    import_huggingface(model, tmp_path / "saved", workers=2)
    assert sorted(os.listdir(tmp_path)) == ["model", "saved"]
    import_huggingface(model, tmp_path / "again")
    name = rank_file_name(0)
    assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_of_two_writers_at_once_the_second_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_directory(out) as staging:
        (staging / "file").write_text("of the first")
        with pytest.raises(TargetExistsError, match="another process is writing"), new_directory(out):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "file").read_text() == "of the first"


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", {"a": np.zeros((100, 100), np.float32), "b": np.zeros((100, 100), np.float32)}, None)
    script = """
        import resource, sys
        from paddle_fsdp_ckpt.cli.main import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        sys.exit(main(["convert", sys.argv[1], "--to", "fc", sys.argv[2], "--recipe", "none", "--workers", "2"]))
        """
    done = run(script, model, tmp_path / "saved")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"paddle-fsdp-ckpt: OSError: [Errno 27] File too large: '{tmp_path / 'saved'}'; ")
    assert os.listdir(tmp_path) == ["model"]


def run(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60, check=False)
