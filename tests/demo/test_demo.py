"""The demo from end to end, on real ranks, and its exit status when something is wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_fsdp_ckpt.demo import __main__ as demo
from paddle_fsdp_ckpt.demo import launch
from paddle_fsdp_ckpt.demo.job import Event, Job

STEPS = ["--steps", "4"]


@pytest.fixture
def resume_on_two_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_RESUME_RANKS", (2,))


@pytest.fixture
def tamper(monkeypatch: pytest.MonkeyPatch, resume_on_two_only: None) -> Callable[[Callable[[Job], Job]], None]:
    """``tamper(change)`` has each resumed job run as ``change`` of it."""

    def install(change: Callable[[Job], Job]) -> None:
        def run(job: Job, on_event: Callable[[Event], None]) -> None:
            original(job if job.load_from is None else change(job), on_event)

        monkeypatch.setattr(launch, "run", run)

    original = launch.run
    return install


def test_every_resume_is_as_promised(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paddle_fsdp_ckpt.demo", *STEPS, "--keep", str(tmp_path / "kept")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "on 2 ranks: bit for bit" in result.stdout
    assert "on 1 rank: " in result.stdout
    assert "on 3 ranks: " in result.stdout
    assert "All as promised" in result.stdout
    assert (tmp_path / "kept" / "checkpoint" / "manifest.json").exists()


@pytest.mark.usefixtures("resume_on_two_only")
def test_experts_resume_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    # Enough steps that some experts have no tokens in some of them.
    assert demo.main(["--moe", "--steps", "16", "--save-at", "12"]) == 0
    assert "on 2 ranks: bit for bit" in capsys.readouterr().out


@pytest.mark.usefixtures("resume_on_two_only")
def test_a_text_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("so little to read " * 50)
    assert demo.main(["--steps", "2", "--text", str(text)]) == 0
    assert str(text) in capsys.readouterr().out


def test_a_resume_that_differs_is_found(tmp_path: Path, tamper: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("something else to read " * 50)
    tamper(lambda job: dataclasses.replace(job, text=str(text)))
    assert demo.main(STEPS) == 1
    assert "not bit for bit, which must not be" in capsys.readouterr().out


def _change_file(job: Job, change: Callable[[bytes], bytes]) -> Job:
    path = Path(job.load_from or "", "1_0.safetensors")
    path.write_bytes(change(path.read_bytes()))
    return job


def test_a_checkpoint_with_a_flipped_bit_is_not_resumed_from(tamper: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    tamper(lambda job: _change_file(job, lambda content: content[:-1] + bytes([content[-1] ^ 1])))
    assert demo.main(STEPS) == 2
    assert "CorruptCheckpointError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save-at", "24"], "can't save after step 24 of 24"),
        (["--steps", "1"], "can't save after step 0 of 1"),
        (["--text", "no such file"], "can't train on this text"),
        (["--text", "{empty}"], "the text has 0 bytes"),
        (["--keep", "{empty}"], "is there already"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(SystemExit) as error:
        demo.main([argument.format(empty=empty) for argument in arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
