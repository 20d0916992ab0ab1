"""How far a long save or load is, on a terminal and nowhere else; a terminal that fails holds nothing up."""

from __future__ import annotations

import io
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import paddle
import pytest
from harness import RankPool, this_rank
from harness.terminal import HAS_BARS, Terminal, is_clean, lines_over, without_rich
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

import paddle_fsdp_ckpt as ckpt
import paddle_fsdp_ckpt.loading.plan
import paddle_fsdp_ckpt.loading.planned
import paddle_fsdp_ckpt.saving
from paddle_fsdp_ckpt import progress
from paddle_fsdp_ckpt.manager import trainer_state
from paddle_fsdp_ckpt.progress import ProgressLine, watching_file

Ranks = Callable[[int], RankPool]

EVERYTHING_IS_LONG = {"_LONG_SECONDS": 0.0, "_PAUSE_SECONDS": 0.01}


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with patch.multiple(progress, **EVERYTHING_IS_LONG):
        yield Terminal()


@pytest.fixture(params=["with rich", "without rich"])
def shows(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether there are bars: where rich isn't installed, none either way."""
    with ExitStack() as stack:
        if request.param == "without rich":
            stack.enter_context(without_rich())
        yield HAS_BARS and request.param == "with rich"


def test_a_file_is_watched_while_it_grows(tmp_path: Path, terminal: Terminal, shows: bool) -> None:
    path = tmp_path / "file"
    with watching_file(path, 4_000_000, ProgressLine(terminal.stream, "saving")):
        (tmp_path / "new").write_bytes(b"\0" * 1_000_000)
        (tmp_path / "new").rename(path)
        terminal.shown("25% 1.0/4.0 MB" if shows else "")
        path.write_bytes(b"\0" * 3_000_000)
        terminal.shown("75% 3.0/4.0 MB" if shows else "")
    shown = terminal.shown()
    assert bool(shown) is shows
    assert is_clean(shown)
    # Each line has its speed, once there is one, and the time that is left.
    assert all(line.startswith("saving ") and line[-1] in "-0123456789" for line in lines_over(shown) if line)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_it_goes_when_an_exception_passes(terminal: Terminal, error: type[BaseException]) -> None:
    def work() -> None:
        with ProgressLine(terminal.stream) as line:
            line(1, 2)
            terminal.shown("50%" if HAS_BARS else "")
            raise error

    with pytest.raises(error):
        work()
    assert is_clean(terminal.shown())


@pytest.mark.parametrize("what", ["no terminal", "no stream", "closed", "not wanted", "short"])
def test_nothing_is_shown(terminal: Terminal, what: str) -> None:
    stream: Any = {"no terminal": io.StringIO(), "no stream": None}.get(what, terminal.stream)
    if what == "closed":
        stream = io.StringIO()
        stream.close()
    with patch.object(progress, "_LONG_SECONDS", 3600.0 if what == "short" else 0.0):
        line = ProgressLine(stream, is_wanted=what != "not wanted")
    with line:
        line.counter(2)(1)
    assert line.is_shown == (what == "short")
    assert terminal.shown() == ""
    if what == "no terminal":
        assert stream.getvalue() == ""


class Strange(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("failing", ["hung up", "stopped", "no file"])
def test_a_terminal_that_fails_holds_nothing_up(terminal: Terminal, failing: str) -> None:
    if failing == "stopped":  # as by Ctrl-S
        termios.tcflow(terminal.stream, termios.TCOOFF)
    with ProgressLine(Strange() if failing == "no file" else terminal.stream, "loading") as line:
        count = line.counter(1000)
        count(100)
        if failing == "hung up":
            terminal.shown("10%" if HAS_BARS else "")
            terminal.hang_up()
        for _ in range(100):
            count(1)
    assert not [thread for thread in threading.enumerate() if thread.name == "paddle_fsdp_ckpt progress"]


def test_what_draws_is_not_imported_before_it_draws() -> None:
    code = "import sys, paddle_fsdp_ckpt.progress, paddle_fsdp_ckpt.cli.main; print('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout == "False\n"


def save_and_load_on_a_terminal(path: str, with_rich: bool) -> list[str]:
    """What this rank's terminal shows of a save, and of a load that reads twice; each waits until it was shown."""
    shows = with_rich and HAS_BARS and this_rank().rank == 0
    model = paddle.nn.Linear(300, 400)
    ckpt.fully_shard(model, optimizer=None)
    with ckpt.local_parameters(model):
        before = model.weight.numpy().copy()
    shown = []

    def slowly(function: Callable[..., Any], terminal: Terminal) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            done = function(*args, **options)
            seen.append(terminal.shown("100%" if shows else "")[sum(map(len, seen)) :])
            return done

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.multiple(progress, **EVERYTHING_IS_LONG))
        if not with_rich:
            stack.enter_context(without_rich())
        for place, name, call in (
            (ckpt.saving, "write_rank_file", lambda: ckpt.save(path, model=model)),
            (ckpt.loading.planned, "execute_read", lambda: ckpt.load(path, model=model)),
            (ckpt.loading.plan, "verify_first", lambda: ckpt.load(path, model=model, verify_first=True)),
        ):
            terminal, seen = Terminal(), []
            with patch.object(sys, "stderr", terminal.stream), patch.object(place, name, slowly(getattr(place, name), terminal)):
                call()
            shown.append(terminal.shown())
    with ckpt.local_parameters(model):
        assert (model.weight.numpy() == before).all()
    return shown


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_first_rank_shows_saves_and_loads(tmp_path: Path, ranks: Ranks, with_rich: bool) -> None:
    first, other = ranks(2).run(save_and_load_on_a_terminal, str(tmp_path / "step"), with_rich)
    assert other == ["", "", ""]
    for what, shown in zip(("saving", "loading", "loading"), first, strict=True):
        assert shown == "" or with_rich
        assert is_clean(shown)
        assert bool(shown) == (with_rich and HAS_BARS)
        assert all(line.startswith(f"{what} ") for line in lines_over(shown) if line)


def restore_sharded_on_a_terminal(root: str) -> list[str]:
    """What this rank's terminal shows while tensors of the user's own are checked and read; each waits until it was shown."""
    rank = this_rank().rank
    model = paddle.nn.Linear(3, 4)
    ckpt.fully_shard(model, optimizer=None)
    own = paddle.full([1_000_000], 1.0 + rank)
    shown = []
    with ckpt.CheckpointManager(root) as checkpoints:
        sharded = {"average": ShardedWeight("average", own, [1_000_000], [2_000_000], [1_000_000 * rank])}
        checkpoints.save(1, model=model, sharded=sharded)
        own.zero_()
        for name in ("verify_first", "execute_read"):
            terminal, real = Terminal(), getattr(trainer_state, name)

            def slowly(*args: Any, real: Any = real, terminal: Terminal = terminal, **options: Any) -> None:
                real(*args, **options)
                shown.append(terminal.shown("100% 4.0/4.0 MB" if HAS_BARS and rank == 0 else ""))

            with (
                patch.multiple(progress, **EVERYTHING_IS_LONG),
                patch.object(sys, "stderr", terminal.stream),
                patch.object(trainer_state, name, slowly),
            ):
                checkpoints.restore(model=model, sharded=sharded)
    assert (own == 1.0 + rank).all()
    return shown


def test_what_a_manager_restores_besides_is_shown(tmp_path: Path, ranks: Ranks) -> None:
    first, other = ranks(2).run(restore_sharded_on_a_terminal, str(tmp_path / "root"))
    assert other == ["", ""]
    assert [bool(shown) for shown in first] == [HAS_BARS] * 2


def save_in_background_on_a_terminal(root: str) -> tuple[str, str]:
    """What this rank's terminal shows of a save in the background, before and after somebody waits for it."""
    shows = HAS_BARS and this_rank().rank == 0
    model = paddle.nn.Linear(300, 400)
    ckpt.fully_shard(model, optimizer=None)
    terminal, awaited, real = Terminal(), threading.Event(), ckpt.saving.write_image

    def write(*args: Any) -> Any:
        assert awaited.wait(60)
        terminal.shown("saving" if shows else "")
        return real(*args)

    with ExitStack() as stack:
        stack.enter_context(patch.multiple(progress, **EVERYTHING_IS_LONG))
        stack.enter_context(patch.object(sys, "stderr", terminal.stream))
        stack.enter_context(patch.object(ckpt.saving, "write_image", write))
        with ckpt.CheckpointManager(root, async_save=True) as checkpoints:
            checkpoints.save(1, model=model)
            before = terminal.shown()
            awaited.set()
            checkpoints.wait()
            return before, terminal.shown()


def test_a_save_in_the_background_is_shown_to_who_waits_for_it(tmp_path: Path, ranks: Ranks) -> None:
    (before, shown), other = ranks(2).run(save_in_background_on_a_terminal, str(tmp_path / "root"))
    assert (before, *other) == ("", "", "")
    assert is_clean(shown)
    assert bool(shown) == HAS_BARS
