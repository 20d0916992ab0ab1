"""What a manager tells of its saves and restores: log lines, ``history.jsonl``, and a user's hook."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from ..errors import counted
from ..storage.manifest import utc_now
from .steps import HISTORY_NAME, names_of

_LOG = logging.getLogger("paddle_fsdp_ckpt")


@dataclass(frozen=True)
class CheckpointEvent:
    """A save or a restore that succeeded.

    Attributes:
        kind: which.
        step: its number.
        seconds: from the call to its end.
        blocked_seconds: how long the caller waited on rank 0; less than ``seconds`` where the save went on in the background.
        nbytes: size of the files of all ranks; 0 of a restore.
        metrics: as given to the save.
        steps: those that the root holds afterwards, in ascending order.
        removed: steps that were removed then.
        skipped: name -> in words, why a restore took it for no step.
        fell_back_from: later step -> what is wrong with it, so that a restore took this one.
    """

    kind: Literal["save", "restore"]
    step: int
    seconds: float
    blocked_seconds: float
    nbytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    fell_back_from: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.kind == "restore":
            skipped = "".join(f"; skipped '{name}': {reason}" for name, reason in self.skipped.items())
            return f"restored step {self.step} in {self.seconds:.2f} s{skipped}"
        rate = self.nbytes / 1e6 / max(self.seconds, 1e-9)
        removed = f", removed {names_of(self.removed)}" if self.removed else ""
        return (
            f"saved step {self.step}: {self.nbytes / 1e6:.1f} MB in {self.seconds:.2f} s ({rate:.0f} MB/s), training blocked for "
            f"{self.blocked_seconds:.2f} s; kept {counted(len(self.steps), 'step')}{removed}"
        )


def steps_in_history(root: Path) -> set[int]:
    """Return the steps that a root's history says were saved there and not removed since; none where it can't be read.

    What is no line of it, such as half of one, is passed over.
    """
    steps: set[int] = set()
    with suppress(OSError), open(root / HISTORY_NAME, encoding="utf-8", errors="replace", opener=_open) as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                event = json.loads(line)
                if event["kind"] == "save":
                    steps.add(event["step"])
                    steps.difference_update(event["removed"])
    return steps


def tell(event: CheckpointEvent, root: Path, on_event: Callable[[CheckpointEvent], None] | None) -> None:
    """Log an event, append it to the root's history, and hand it to the hook. What fails of that is logged, and stops nobody."""
    _LOG.info("%s", event)
    try:
        with open(root / HISTORY_NAME, "ab+", opener=_open) as file:
            line = json.dumps({"time": utc_now(), **asdict(event)}).encode() + b"\n"
            file.write(line if _ends_with_a_line(file) else b"\n" + line)
    except OSError as error:
        _LOG.warning("'%s' could not be written: %s", root / HISTORY_NAME, error)
    if on_event is not None:
        try:
            on_event(event)
        except Exception:  # noqa: BLE001 - it is the user's, and training goes on
            _LOG.exception("on_event failed, and training goes on")


def _open(path: str, flags: int) -> int:
    # A named pipe would wait for ever, and a link, in a root from elsewhere, leads out of it.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)


def _ends_with_a_line(file: BinaryIO) -> bool:
    """Tell whether a file is empty or ends with a whole line; one cut short, as on a full disk, would swallow the next."""
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
