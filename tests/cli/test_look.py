"""``inspect`` and ``diff`` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.manifest import Manifest, utc_now
from paddle_fsdp_ckpt.storage.writer import write_rank_file


def write_checkpoint(path: Path, stop: int, first: float) -> Path:
    """A checkpoint of one rank that holds the first elements of six."""
    path.mkdir()
    values = np.arange(6, dtype=np.float32)
    values[0] = first
    record = write_rank_file(path / rank_file_name(0), [(Piece("w", "float32", (6,), (0,), (6,), Range(0, stop)), values[:stop].data)])
    (path / MANIFEST_NAME).write_text(Manifest(3, 1, utc_now(), {"paddle": "3.3.1"}, [], None, (record,)).to_json())
    return path


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_checkpoint(tmp_path / "whole", 6, 0.0)
    assert main(["inspect", str(whole), "--keys", "--stats"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["w", "float32", "[6]", "0", "5", "2.5", "0", "0"]
    part = write_checkpoint(tmp_path / "part", 5, 0.0)
    assert main(["inspect", str(part), "--stats"]) == 1
    assert "1 key is not whole: 'w'" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["checkpoints"]) == 2
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_checkpoint(tmp_path / "one", 6, 0.0), write_checkpoint(tmp_path / "other", 6, 8.0)
    assert main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "no difference: 1 key, equal bit for bit\n"
    assert main(["diff", str(one), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["values"][0]["largest"] == 8.0
    assert main(["diff", str(one), str(write_checkpoint(tmp_path / "part", 5, 0.0))]) == 2
    assert "doesn't hold all elements of 1 key" in capsys.readouterr().err


def test_several_patterns_and_directories_behind_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (str(write_checkpoint(tmp_path / name, 6, 0.0)) for name in ("one", "other"))
    for words in (
        [one, "--keys"],
        ["--keys", one],
        ["--keys", "w", one],
        ["--keys", "--stats", one],
        ["--keys=w", one],
        ["--key", "w", one],
    ):
        assert main(["inspect", *words]) == 0
        assert "\nw  " in capsys.readouterr().out
    for words in (
        [one, other, "--keys", "w", "[w]"],
        ["--keys", "w", "[w]", one, other],
        [one, "--weights-only", "--keys", "w", "[w]", other],
        ["--keys", "w", "--keys", "[w]", one, other],
        ["--keys", "w", one, "--weights-only", other],
    ):
        assert main(["diff", *words]) == 0
        assert "no difference: 1 key" in capsys.readouterr().out
    for words in (["inspect", one, "--keys", "w", "x"], ["diff", one, other, "--keys", "w", "x"]):
        assert main(words) == 2
        assert "a key of the form 'x'" in capsys.readouterr().err.replace("no key", "a key")
    changed = str(write_checkpoint(tmp_path / "changed", 6, 8.0))
    assert main(["diff", one, "--keys", "w", changed, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["one"] == one
    with pytest.raises(SystemExit):
        main(["diff", one, "--keys"])
    assert "expected at least one argument" in capsys.readouterr().err


def test_they_run_without_paddle(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one", 6, 0.0)
    (tmp_path / "paddle.py").write_text("raise ImportError('no Paddle here')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    for command in (["inspect", str(one), "--stats"], ["diff", str(one), str(one)]):
        whole = [sys.executable, "-m", "paddle_fsdp_ckpt", *command]
        done = subprocess.run(whole, capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
