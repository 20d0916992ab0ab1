"""``convert`` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.manifest import Manifest, utc_now
from paddle_fsdp_ckpt.storage.writer import write_rank_file

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step"
    path.mkdir()
    record = write_rank_file(path / rank_file_name(0), [(Piece("w", "float32", (2, 3), (0, 0), (2, 3)), WEIGHT.data)])
    (path / MANIFEST_NAME).write_text(Manifest(3, 1, utc_now(), {"paddle": "3.3.1"}, [], None, (record,)).to_json())
    return path


def test_exit_status_and_output(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", str(checkpoint), "--to", "hf", str(tmp_path / "model"), "--recipe", "none"]
    assert main(command) == 0
    assert "1 tensor, 24 B in 2 files, by the recipe 'none'" in capsys.readouterr().out
    np.testing.assert_array_equal(load_file(tmp_path / "model" / "model-00001-of-00001.safetensors")["w"], WEIGHT)
    assert main(command) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("paddle-fsdp-ckpt: ")
    assert output.err.count("\n") == 1
    command[4] = str(tmp_path / "other")
    assert main([*command, "--json", "--dtype", "bf16", "--max-shard-size", "1KiB", "--workers", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(tmp_path / "other")
    assert report["nbytes"] == 12


@pytest.mark.parametrize(
    ("option", "forms"),
    [
        (["--optimizer"], "hf"),
        (["--master-weights"], "hf and peft"),
        (["--config", "x"], "hf and peft"),
        (["--max-shard-size", "1GB"], "hf"),
    ],
)
def test_what_is_for_hugging_face_only(
    option: list[str], forms: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(checkpoint), "--to", "fc", str(tmp_path / "model"), *option]) == 2
    assert f"{option[0]} is for --to {forms}; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--workers", "0"], ["--max-shard-size", "5XB"], ["--max-shard-size", "0"], ["--dtype", "int8"], ["--to", "onnx"]]
)
def test_a_wrong_command_line_is_2(options: list[str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(checkpoint), "--to", "hf", str(tmp_path / "model"), *options])
    assert caught.value.code == 2
    assert not (tmp_path / "model").exists()


def test_it_runs_without_paddle(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "paddle.py").write_text("raise ImportError('no Paddle here')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    command = [
        sys.executable,
        "-m",
        "paddle_fsdp_ckpt",
        "convert",
        str(checkpoint),
        "--to",
        "hf",
        str(tmp_path / "model"),
        "--recipe",
        "none",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
