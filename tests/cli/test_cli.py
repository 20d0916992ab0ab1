"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from harness.terminal import HAS_BARS, Terminal, is_clean, without_rich

from paddle_fsdp_ckpt import progress
from paddle_fsdp_ckpt.cli import main as cli
from paddle_fsdp_ckpt.cli.command import Report
from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.cli.show import show
from paddle_fsdp_ckpt.export.text import Block, BlockReport, Table
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.discarded import digest_of_manifest
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.manifest import Manifest, utc_now
from paddle_fsdp_ckpt.storage.verify import verify
from paddle_fsdp_ckpt.storage.writer import write_rank_file

COMMAND = [sys.executable, "-m", "paddle_fsdp_ckpt"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step"
    path.mkdir()
    piece = Piece("w", "float32", (6,), (0,), (6,))
    record = write_rank_file(path / rank_file_name(0), [(piece, np.arange(6, dtype=np.float32).data)])
    (path / MANIFEST_NAME).write_text(Manifest(3, 1, utc_now(), {"paddle": "3.3.1"}, [], None, (record,)).to_json())
    return path


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("command", ["verify", "salvage"])
def test_exit_status_and_output(checkpoint: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(checkpoint)]) == 0
    assert "1 key" in capsys.readouterr().out
    damage(checkpoint / "0_0.safetensors")
    assert main([command, str(checkpoint), "--workers", "2"]) == 1
    assert "'w'" in capsys.readouterr().out
    assert main([command, str(checkpoint), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["path"] == str(checkpoint)
    assert main([command, str(checkpoint / "nowhere")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("paddle-fsdp-ckpt: there is no checkpoint")


@pytest.mark.parametrize(
    "arguments", [[], ["verify"], ["frob", "x"], ["verify", "x", "--workers", "0"], ["verify", "x", "--workers", "many"]]
)
def test_a_wrong_command_line_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: paddle-fsdp-ckpt" in capsys.readouterr().err


def test_it_runs_as_a_module_without_paddle(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "paddle.py").write_text("raise ImportError('no Paddle here')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    done = subprocess.run([*COMMAND, "verify", str(checkpoint)], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "nothing is wrong"
    room = [sys.executable, "-m", "paddle_fsdp_ckpt.cli"]
    done = subprocess.run([*room, "--version"], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.startswith("paddle-fsdp-ckpt ")


def test_numbers_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "num_key_value_heads": 1}))
    assert main(["plan", str(tmp_path), "--json", "--world-size", "2", "--world-size", "4,8", "2"]) == 0
    assert [one["world_size"] for one in json.loads(capsys.readouterr().out)["worlds"]] == [2, 4, 8]
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), "--world-size", "2,0"])
    assert "argument --world-size: '0' is not a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize("with_rich", [True, False])
def test_progress_is_shown_on_a_terminal_and_nothing_is_left_of_it(checkpoint: Path, with_rich: bool) -> None:
    terminal = Terminal()

    def verify_slowly(*args: Any, **options: Any) -> Any:
        report = verify(*args, **options)
        terminal.shown("100%" if with_rich and HAS_BARS else "")
        return report

    with ExitStack() as stack:
        stack.enter_context(patch.object(progress, "_LONG_SECONDS", 0.0))
        stack.enter_context(patch.object(cli, "verify", verify_slowly))
        stack.enter_context(patch.object(sys, "stderr", terminal.stream))
        if not with_rich:
            stack.enter_context(without_rich())
        assert main(["verify", str(checkpoint)]) == 0
    shown = terminal.shown()
    assert bool(shown) == (with_rich and HAS_BARS)
    assert is_clean(shown)


def test_tables_on_a_terminal_say_the_same(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = pty.openpty()
    subprocess.run([*COMMAND, "inspect", str(checkpoint), "--keys"], stdout=theirs, check=True, timeout=60)
    os.close(theirs)
    shown = re.sub(r"\x1b\[[0-9;]*m|[^\x20-\x7e]", " ", os.read(ours, 100_000).decode())
    os.close(ours)
    assert main(["inspect", str(checkpoint), "--keys"]) == 0
    assert sorted(shown.split()) == sorted(capsys.readouterr().out.split())


def test_a_root_is_verified_checkpoint_by_checkpoint(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("step_00000003", "step_00000004"):
        shutil.copytree(checkpoint, root / name)
    (root / "history.jsonl").write_text("")
    (root / ".step_00000005.staging-0123456789abcdef").mkdir()
    assert main(["verify", str(root)]) == 0
    output = capsys.readouterr().out
    assert output.count("every byte is right") == 2
    assert "(.step_00000005.staging-0123456789abcdef is what a killed save left behind; it may be deleted)" in output
    assert output.endswith("nothing is wrong\n")
    damage(root / "step_00000003" / "0_0.safetensors")
    (root / "step_00000005").mkdir()
    assert main(["verify", str(root), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [one["is_good"] for one in report["checkpoints"]] == [False, True]
    assert report["problems"] == ["step_00000005: it is called as a step and is no checkpoint"]
    assert main(["verify", str(root)]) == 1
    output = capsys.readouterr().out
    assert "- step_00000003: 0_0.safetensors: damaged" in output
    assert output.endswith("damaged or incomplete: 2 of 3\n")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_of_a_root_a_step_that_was_given_up_is_named(
    command: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    for step in (1, 2, 3):
        shutil.copytree(checkpoint, root / f"step_{step:08d}")
    manifest = Manifest.from_json((checkpoint / MANIFEST_NAME).read_text())
    written = (root / "step_00000003" / MANIFEST_NAME).stat().st_mtime_ns
    assert main([command, str(root)]) == 0
    assert "given up" not in capsys.readouterr().out
    (root / "step_00000002" / MANIFEST_NAME).write_text(replace(manifest, step=2, discarded={3: written}).to_json())
    assert main([command, str(root)]) == 0
    said = "(step_00000003 was given up by the run that saved step_00000002: no manager restores it, and that run's next save removes it)"
    assert said in capsys.readouterr().out.splitlines()
    assert main([command, str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["given_up"] == {"step_00000003": "step_00000002"}
    os.utime(root / "step_00000003" / MANIFEST_NAME, ns=(written + 1, written + 1))  # as of one that was saved anew
    assert main([command, str(root)]) == 0
    assert "given up" not in capsys.readouterr().out
    digest = digest_of_manifest(root / "step_00000003")
    (root / "step_00000002" / MANIFEST_NAME).write_text(replace(manifest, step=2, discarded={3: digest}).to_json())
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    assert main([command, str(tmp_path / "copy")]) == 0
    output = capsys.readouterr().out
    assert said in output.splitlines()
    if command == "inspect":
        assert [line.split()[1] for line in output.splitlines() if line.endswith("whole, given up")] == ["step_00000003"]


@dataclass(frozen=True)
class OneTable(BlockReport):
    """A report of one table."""

    table: Table

    def blocks(self) -> Iterator[Block]:
        yield self.table


def test_names_and_numbers_on_a_terminal_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model.layers.{i}.mlp.experts.{i}.up_proj.weight" for i in (7, 88)]
    numbers = [["-0.243179", "0.2431791", "-1.00244e-05", "0", "0"], ["-10.243179", "2.43179e+07", "1.52e-05", "100,000", "0"]]
    rows = [[name, "float32", "[4096, 128]", *some] for name, some in zip(names, numbers, strict=True)]
    wide = Table(["key", "dtype", "shape", "min", "max", "mean", "NaN", "infinite"], rows, right=range(3, 8))
    small = Table(["key", "shape", "min"], [[row[0], row[2], row[3]] for row in rows], right={2})
    ranges = "; ".join(f"{i}: [{i * 1000}, {i * 1000 + 1000})" for i in range(9))
    long = Table(["key", "shape", "min", "saved by rank"], [[row[0], row[2], row[3], ranges] for row in rows], right={2})
    monkeypatch.setenv("TERM", "xterm")
    for table, width, is_drawn in (
        (wide, 80, False),
        (wide, 140, True),
        (small, 80, True),
        (small, 52, False),
        (long, 100, True),
        (long, 60, False),
    ):
        terminal = Terminal()
        with monkeypatch.context() as patched:
            patched.setenv("COLUMNS", str(width))
            patched.setattr(sys, "stdout", terminal.stream)
            show(cast(Report, OneTable(table)), as_json=False)
        terminal.stream.flush()
        lines = terminal.shown("-10.243179").splitlines()
        cells = {cell.strip() for line in lines for cell in re.split(r"  +", line)}
        assert set(rows[0] if table is wide else [rows[0][0], *rows[0][2:4]]) <= cells
        if HAS_BARS:
            assert all(len(line) <= width for line in lines) or (table is long and not is_drawn)
            assert any("\u2500" in line for line in lines) == is_drawn


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_what_the_locale_has_no_characters_for_is_no_finding(checkpoint: Path, encoding: str) -> None:
    odd = checkpoint.with_name("\u4e2d\udcff")  # the second is a byte that is no UTF-8
    checkpoint.rename(odd)
    environment = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict", "PYTHONUTF8": "0"}
    good = subprocess.run([*COMMAND, "verify", odd], env=environment, capture_output=True, check=False)
    assert (good.returncode, good.stderr) == (0, b"")
    assert b"\\udcff" in good.stdout
    refused = subprocess.run([*COMMAND, "verify", odd / "x"], env=environment, capture_output=True, check=False)
    assert refused.returncode == 2
    assert b"\\udcff" in refused.stderr


def test_a_report_that_cannot_be_written_is_no_finding(checkpoint: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "verify", checkpoint], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("paddle-fsdp-ckpt: the report could not be written: ")
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
