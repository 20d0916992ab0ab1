"""Checkpoints as Hugging Face models: each value is one that numpy knew before."""

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
from published import as_in_paddle, config_of, published
from safetensors import safe_open
from safetensors.numpy import load_file

from paddle_fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, TargetExistsError
from paddle_fsdp_ckpt.export.config import companion_files
from paddle_fsdp_ckpt.export.huggingface import export_huggingface
from paddle_fsdp_ckpt.export.safetensors_files import INDEX_NAME
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.manifest import Manifest, utc_now
from paddle_fsdp_ckpt.storage.writer import write_rank_file

Ranks = Callable[[int], RankPool]

ROOT = Path(__file__).parents[2]
RANDOM = np.random.RandomState(3)
SMALL = {
    "first.weight": RANDOM.standard_normal((7, 5)).astype(np.float32),
    "first.bias": RANDOM.standard_normal(5).astype(np.float32),
    "conv.weight": RANDOM.standard_normal((3, 4, 2, 2)).astype(np.float32),
    "one": np.array([1.5], np.float32),
}


def read_model(path: Path) -> dict[str, np.ndarray]:
    """All tensors, by the index file, each from the file that it names."""
    index = json.loads((path / INDEX_NAME).read_text())
    files = {name: load_file(path / name) for name in set(index["weight_map"].values())}
    assert sum(map(len, files.values())) == len(index["weight_map"])
    assert sum(array.nbytes for file in files.values() for array in file.values()) == index["metadata"]["total_size"]
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def assert_equal(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == right.keys()
    for name, array in right.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def write_config(directory: Path, fields: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return directory


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_names_and_layouts_as_they_are(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    ranks(world_size).run(made_models.save_model, str(tmp_path / "saved"), SMALL)
    report = export_huggingface(tmp_path / "saved", tmp_path / "new" / "model", recipe="none")
    assert_equal(read_model(tmp_path / "new" / "model"), SMALL)
    assert (report.tensors, report.nbytes) == (4, sum(array.nbytes for array in SMALL.values()))
    assert sorted(report.files) == sorted(os.listdir(tmp_path / "new" / "model"))
    assert os.listdir(tmp_path / "new") == ["model"]


@pytest.mark.parametrize(
    ("family", "fused", "world_size"),
    [
        ("llama", False, 1),
        ("llama", True, 2),
        ("qwen2", False, 2),
        ("qwen2", True, 3),
        ("qwen2_moe", False, 3),
        ("qwen2_moe", True, 1),
        ("qwen3", False, 2),
        ("qwen3", True, 3),
        ("qwen3_moe", False, 1),
        ("qwen3_moe", True, 2),
    ],
)
def test_families(family: str, fused: bool, world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    right = published(family, biases=family.startswith("qwen2"))
    ranks(world_size).run(made_models.save_model, str(tmp_path / "saved"), as_in_paddle(family, right, fused), "float32", {}, not fused)
    config = write_config(tmp_path / "config", config_of(family))
    (config / "tokenizer.json").write_text("{}")
    (config / "model.safetensors").write_text("not a companion")
    report = export_huggingface(tmp_path / "saved", tmp_path / "model", config=config / "config.json" if fused else config)
    assert_equal(read_model(tmp_path / "model"), right)
    assert report.recipe == family
    assert {"config.json", "tokenizer.json"} <= set(report.files)
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_a_configuration_of_any_name_is_the_one_that_is_copied(tmp_path: Path) -> None:
    for name in ("config.json", "mine.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert companion_files(tmp_path) == {name: tmp_path / name for name in ("config.json", "tokenizer.json")}
    assert companion_files(tmp_path / "mine.json") == {"config.json": tmp_path / "mine.json", "tokenizer.json": tmp_path / "tokenizer.json"}


@pytest.mark.parametrize(("experts", "tied"), [(0, True), (3, False)])
def test_the_model_of_the_demo(experts: int, tied: bool, tmp_path: Path, ranks: Ranks) -> None:
    values = ranks(2).run(made_models.save_demo, str(tmp_path / "saved"), experts, tied)[0]
    export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="qwen3_moe" if experts else "qwen3")
    linear = ("_proj.weight", ".gate.weight")
    right = {name: np.ascontiguousarray(array.T) if name.endswith(linear) else array for name, array in values.items()}
    if tied:
        del right["lm_head.weight"]
    assert_equal(read_model(tmp_path / "model"), right)


def test_a_nested_configuration(tmp_path: Path, ranks: Ranks) -> None:
    right = published("qwen3")
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), as_in_paddle("qwen3", right, fused=True))
    fields = config_of("qwen3")
    for number, nested in enumerate(({"text_config": fields}, {"thinker_config": {"text_config": fields}, "num_attention_heads": 1})):
        config = write_config(tmp_path / f"config {number}", {"model_type": "outer", **nested})
        export_huggingface(tmp_path / "saved", tmp_path / f"model {number}", config=config)
        assert_equal(read_model(tmp_path / f"model {number}"), right)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tied_weights(family: str, tmp_path: Path, ranks: Ranks) -> None:
    right = published(family)
    embedding = "llama.embed_tokens.weight" if family == "llama" else "model.embed_tokens.weight"
    arrays = as_in_paddle(family, right, fused=False)
    del arrays["lm_head.weight"]
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), arrays, "float32", {"lm_head.weight": embedding}, True)
    once = {name: array for name, array in right.items() if name != "lm_head.weight"}
    tied = write_config(tmp_path / "tied", config_of(family, tie_word_embeddings=True))
    report = export_huggingface(tmp_path / "saved", tmp_path / "once", config=tied)
    assert_equal(read_model(tmp_path / "once"), once)
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    report = export_huggingface(tmp_path / "saved", tmp_path / "unsaid", recipe=family)
    assert_equal(read_model(tmp_path / "unsaid"), once)
    assert report.notes == ('config.json must say "tie_word_embeddings": true',)
    # A reader who is told that they are two must find two, or would start one at random.
    untied = write_config(tmp_path / "untied", config_of(family))
    export_huggingface(tmp_path / "saved", tmp_path / "twice", config=untied)
    assert_equal(read_model(tmp_path / "twice"), once | {"lm_head.weight": right["model.embed_tokens.weight"]})


def test_what_is_tied_beside_the_head(tmp_path: Path, ranks: Ranks) -> None:
    # Rules that don't say which is the head: a reader who isn't told that they are one needs both.
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), SMALL, "float32", {"head.weight": "first.weight"})
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"name": "mine", "rules": [{"source": "{*key}", "targets": ["net.{*key}"]}]}))
    for fields, names in (
        ({}, ["first", "head"]),
        ({"tie_word_embeddings": False}, ["first", "head"]),
        ({"tie_word_embeddings": True}, ["first"]),
    ):
        out = tmp_path / f"{fields}"
        config = write_config(tmp_path / "config", {"model_type": "other", **fields})
        export_huggingface(tmp_path / "saved", out, recipe=str(recipe), config=config)
        weights = {f"net.{name}.weight": SMALL["first.weight"] for name in names}
        assert_equal(read_model(out), {f"net.{name}": array for name, array in SMALL.items()} | weights)


def paddle_bfloat16(values: np.ndarray) -> np.ndarray:
    import paddle

    return paddle.to_tensor(values).astype("bfloat16").numpy()


def raw(path: Path, name: str) -> tuple[str, bytes]:
    """A tensor's dtype code and bytes, for dtypes that numpy hasn't."""
    file = path / json.loads((path / INDEX_NAME).read_text())["weight_map"][name]
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    start, stop = entry["data_offsets"]
    return entry["dtype"], data[8 + length + start : 8 + length + stop]


def test_bfloat16_is_rounded_to_the_nearest(tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    bits = np.random.RandomState(5).randint(0, 1 << 32, 4096, np.uint64).astype(np.uint32)
    special = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFF800000, 0x00000001, 0x80000000], np.uint32)
    values = np.concatenate([special, bits]).view(np.float32)
    values = values[~np.isnan(values) & ((np.abs(values) < 3e38) | np.isinf(values))]
    values = np.resize(values, (65, 63))
    arrays = {"a.weight": values, "b": values[0]}
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), arrays)
    recipe = tmp_path / "recipe.json"
    rules = [{"source": "a.weight", "targets": ["a"], "transpose": True}, {"source": "b", "targets": ["b"]}]
    recipe.write_text(json.dumps({"name": "mine", "rules": rules}))
    report = export_huggingface(tmp_path / "saved", tmp_path / "model", recipe=str(recipe), dtype="bfloat16")
    (right,) = single.run(paddle_bfloat16, values)
    assert raw(tmp_path / "model", "a") == ("BF16", np.ascontiguousarray(right.T).tobytes())
    assert raw(tmp_path / "model", "b") == ("BF16", right[0].tobytes())
    assert report.nbytes == 2 * (values.size + 63)


def test_values_too_large_for_the_dtype(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), SMALL | {"large": np.array([1e6, 2.0, -1e6], np.float32)})
    with pytest.raises(CheckpointError, match="would become infinite: 2 of 'large'; nothing was written"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="none", dtype="float16")
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_master_weights(world_size: int, tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    tied = {"z.weight": "first.weight", "a.weight": "first.weight"}
    ranks(world_size).run(made_models.save_model, str(tmp_path / "saved"), SMALL, "bfloat16", tied, True)
    export_huggingface(tmp_path / "saved", tmp_path / "masters", recipe="none", master_weights=True)
    found = read_model(tmp_path / "masters")
    (name,) = found.keys() - SMALL.keys() | found.keys() & {"first.weight"}
    assert_equal(found, {key: array for key, array in SMALL.items() if key != "first.weight"} | {name: SMALL["first.weight"]})
    export_huggingface(tmp_path / "saved", tmp_path / "low", recipe="none")
    for key in ("conv.weight", "first.bias"):
        assert raw(tmp_path / "low", key) == ("BF16", single.run(paddle_bfloat16, SMALL[key])[0].tobytes())


def test_master_weights_that_are_not_there(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), SMALL, "float32", {}, True)
    with pytest.raises(CheckpointError, match="holds no master weights"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="none", master_weights=True)


def test_only_low_precision_lacks_master_weights(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.mkdir()
    dtypes = {"a.weight": "bfloat16", "a.weight.w_0": "float32", "b.weight": "float32", "c.weight": "bfloat16"}
    pieces = [
        (Piece(key, dtype, (6,), (0,), (6,)), np.zeros(6, np.float32 if dtype == "float32" else np.uint16).data)
        for key, dtype in dtypes.items()
    ]
    record = write_rank_file(path / rank_file_name(0), pieces)
    (path / MANIFEST_NAME).write_text(Manifest(3, 1, utc_now(), {}, [], None, (record,)).to_json())
    report = export_huggingface(path, tmp_path / "model", recipe="none", master_weights=True)
    assert report.notes == ("1 tensor has no master weight, taken as stored: c.weight",)


def test_files_of_limited_size(tmp_path: Path, ranks: Ranks) -> None:
    arrays = {f"p{i}.weight": np.full((10, i + 1), i, np.float32) for i in range(9)}
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), arrays)
    report = export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="none", max_shard_nbytes=500)
    assert_equal(read_model(tmp_path / "model"), arrays)
    names = sorted(set(report.files) - {INDEX_NAME})
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert 2025 * 4 * 10 / 45 / 500 < len(names) < 9
    for name in names:
        with safe_open(tmp_path / "model" / name, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
        assert sum(array.nbytes for array in load_file(tmp_path / "model" / name).values()) <= 500


def test_a_directory_of_stock_paddle(tmp_path: Path, ranks: Ranks) -> None:
    for number, tied in enumerate([{"lm_head.weight": "model.embed_tokens.weight"}, {}]):
        right = published("qwen3")
        arrays = as_in_paddle("qwen3", right, fused=False)
        if tied:
            del arrays["lm_head.weight"], right["lm_head.weight"]
        ranks(2).run(made_models.save_with_stock, str(tmp_path / f"saved {number}"), arrays, tied)
        export_huggingface(tmp_path / f"saved {number}", tmp_path / f"model {number}", recipe="qwen3")
        assert_equal(read_model(tmp_path / f"model {number}"), right)


def test_damage_is_found_on_the_way(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(made_models.save_model, str(tmp_path / "saved"), SMALL)
    file = tmp_path / "saved" / "1_0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="1_0.safetensors"):
        export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="none")
    assert os.listdir(tmp_path) == ["saved"]


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.mkdir()
    piece = Piece("w", "float32", (6,), (0,), (6,))
    records = [write_rank_file(path / rank_file_name(rank), [(piece, np.full(6, rank, np.float32).data)]) for rank in range(2)]
    (path / MANIFEST_NAME).write_text(Manifest(3, 2, utc_now(), {}, [], None, tuple(records)).to_json())
    with pytest.raises(CorruptCheckpointError, match="hold different values for the same elements"):
        export_huggingface(path, tmp_path / "model", recipe="none")


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.mkdir()
    arrays = {"a": np.ones(3, np.int8), "b": np.ones(3, np.float64), "c": np.ones(3, np.float16), "d": np.ones((), np.float32)}
    records = []
    for rank, (name, array) in enumerate(arrays.items()):
        piece = Piece(name, str(array.dtype), array.shape, (0,) * array.ndim, array.shape)
        records.append(write_rank_file(path / rank_file_name(rank), [(piece, array.data)]))
    (path / MANIFEST_NAME).write_text(Manifest(3, 4, utc_now(), {}, [], None, tuple(records)).to_json())
    export_huggingface(path, tmp_path / "model", recipe="none")
    assert_equal(read_model(tmp_path / "model"), arrays)
    data = (tmp_path / "model" / "model-00001-of-00001.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert all((8 + length + header[name]["data_offsets"][0]) % array.itemsize == 0 for name, array in arrays.items())


def test_nothing_is_written_over(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), SMALL)
    out = tmp_path / "model"
    out.mkdir()
    export_huggingface(tmp_path / "saved", out, recipe="none")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(TargetExistsError, match="is not empty"):
        export_huggingface(tmp_path / "saved", out, recipe="none")
    with pytest.raises(TargetExistsError, match="is no directory"):
        export_huggingface(tmp_path / "saved", out / INDEX_NAME, recipe="none")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def run_without_paddle(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script where importing Paddle fails."""
    no_paddle = """
        import sys
        class NoPaddle:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("paddle", "torch"):
                    raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        sys.meta_path.insert(0, NoPaddle())
        """
    command = [sys.executable, "-c", textwrap.dedent(no_paddle) + textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def test_a_killed_conversion_leaves_no_model(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), SMALL)
    script = """
        import os, signal
        from paddle_fsdp_ckpt.export.huggingface import export_huggingface
        export_huggingface(sys.argv[1], sys.argv[2], recipe="none", progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
        """
    assert run_without_paddle(script, str(tmp_path / "saved"), str(tmp_path / "model")).returncode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    assert len(os.listdir(tmp_path)) == 2
    export_huggingface(tmp_path / "saved", tmp_path / "model", recipe="none")
    assert_equal(read_model(tmp_path / "model"), SMALL)
    assert sorted(os.listdir(tmp_path)) == ["model", "saved"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(made_models.save_model, str(tmp_path / "saved"), {"a": np.zeros((100, 100), np.float32)})
    script = """
        import resource
        from paddle_fsdp_ckpt.cli.main import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        sys.exit(main(["convert", sys.argv[1], "--to", "hf", sys.argv[2], "--recipe", "none"]))
        """
    done = run_without_paddle(script, str(tmp_path / "saved"), str(tmp_path / "model"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"paddle-fsdp-ckpt: OSError: [Errno 27] File too large: '{tmp_path / 'model'}'; ")
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["saved"]


LARGE = {"wide.weight": (2560, 4096), "tall.weight": (4096, 2560), "flat.weight": (5_000_000,)}


def test_memory_stays_below_the_largest_tensor(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(made_models.save_constant, str(tmp_path / "saved"), LARGE)
    recipe = tmp_path / "recipe.json"
    rules = [{"source": name, "targets": [name], "transpose": len(shape) == 2} for name, shape in LARGE.items()]
    recipe.write_text(json.dumps({"name": "mine", "rules": rules}))
    script = """
        from pathlib import Path
        from paddle_fsdp_ckpt.export.huggingface import export_huggingface
        def peak():
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
        export_huggingface(sys.argv[1], sys.argv[2] + "small", recipe="none")
        before = peak()
        export_huggingface(sys.argv[3], sys.argv[2], recipe=sys.argv[4], dtype="bfloat16")
        print(peak() - before)
        """
    ranks(1).run(made_models.save_model, str(tmp_path / "small"), SMALL)
    done = run_without_paddle(script, str(tmp_path / "small"), str(tmp_path / "model"), str(tmp_path / "saved"), str(recipe))
    assert done.returncode == 0, done.stderr
    largest = max(4 * int(np.prod(shape)) for shape in LARGE.values())
    assert int(done.stdout) < largest + (32 << 20)
