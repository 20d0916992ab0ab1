"""How far a long save or load is, on a terminal and nowhere else."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from harness import RankPool

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import progress
from paddle_fsdp_ckpt.progress import ProgressLine, watching_file

Ranks = Callable[[int], RankPool]


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_a_file_is_watched_while_it_grows(tmp_path: Path) -> None:
    terminal = Terminal()
    path = tmp_path / "file"
    with watching_file(path, 4 << 20, ProgressLine(terminal, "saving ")):
        (tmp_path / "new").write_bytes(b"\0" * (1 << 20))
        (tmp_path / "new").rename(path)
        assert terminal.written.wait(60)
    first, *shown, last = terminal.getvalue().split("\r\x1b[K")
    assert (first, {*shown}, last) == ("", {"saving 25 % of 4 MiB"}, "")


@pytest.mark.parametrize(("is_terminal", "after_seconds", "is_wanted"), [(False, 0.0, True), (True, 3600.0, True), (True, 0.0, False)])
def test_nothing_is_shown(is_terminal: bool, after_seconds: float, is_wanted: bool) -> None:
    terminal = Terminal(is_terminal=is_terminal)
    with ProgressLine(terminal, after_seconds=after_seconds, is_wanted=is_wanted) as line:
        line(1, 2)
        line.counter(2)(1)
    assert terminal.getvalue() == ""


def save_and_load_on_a_terminal(path: str) -> tuple[str, str]:
    """What rank 0's and the others' terminals show of a save, which is too short to be watched, and of a load that is read twice."""
    kept: Any = progress.sys.stderr, progress._LONG_SECONDS, progress._PAUSE_SECONDS
    model = paddle.nn.Linear(300, 400)
    ckpt.fully_shard(model, optimizer=None)
    shown = []
    try:
        progress._LONG_SECONDS = progress._PAUSE_SECONDS = 0.0
        progress.sys.stderr = terminal = Terminal()
        ckpt.save(path, model=model)
        shown.append(terminal.getvalue())
        progress.sys.stderr = terminal = Terminal()
        ckpt.load(path, model=model, verify_first=True)
        shown.append(terminal.getvalue())
    finally:
        progress.sys.stderr, progress._LONG_SECONDS, progress._PAUSE_SECONDS = kept
    return shown[0], shown[1]


def test_the_first_rank_shows_it(tmp_path: Path, ranks: Ranks) -> None:
    (saving, loading), other = ranks(2).run(save_and_load_on_a_terminal, str(tmp_path / "step"))
    assert other == ("", "")
    assert set(saving.split("\r\x1b[K")) <= {"", *(f"saving {percent} % of 0 MiB" for percent in range(101))}
    assert loading.count("loading 100 % of 0 MiB") == 2
    assert loading.endswith("\r\x1b[K")
