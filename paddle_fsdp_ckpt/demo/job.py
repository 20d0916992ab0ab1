"""What one job of the demo is asked to do, and what it hands back: plain data in files, no Paddle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ..errors import counted

Event = dict[str, Any]
"""One thing that a rank reports; ``event["kind"]`` says what: ``started``, ``loaded``, ``step`` or ``saved``."""


@dataclass(frozen=True)
class Job:
    """One training job: the same model, text and schedule in all of them, on some number of ranks.

    Attributes:
        title: what the job is called in the output.
        directory: where its ranks write events, logs and final states.
        world_size: number of ranks.
        steps: the last step to train; the first is 1, or the one after the loaded checkpoint.
        text: file to train on; None for Python's help topics.
        moe: whether the model has experts.
        seed: what the weights are initialised from.
        load_from: checkpoint to resume from.
        save_to: checkpoint to write.
        save_at: the step after which it is written.
    """

    title: str
    directory: str
    world_size: int
    steps: int
    text: str | None
    moe: bool
    seed: int
    load_from: str | None = None
    save_to: str | None = None
    save_at: int | None = None

    def write(self) -> Path:
        """Create the job's directory, write the job into it, and return the file."""
        path = Path(self.directory, "job.json")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Job:
        """Return the job that :meth:`write` wrote."""
        return cls(**json.loads(path.read_text()))

    @property
    def ranks(self) -> str:
        """Return the number of ranks in words."""
        return counted(self.world_size, "rank")

    def log(self, rank: int) -> Path:
        """Return the file that takes a rank's output."""
        return Path(self.directory, f"rank{rank}.log")

    def events(self) -> Path:
        """Return the file to which rank 0 adds a line for each event."""
        return Path(self.directory, "events.jsonl")

    def state(self, what: str, rank: int) -> Path:
        """Return the file that takes a rank's part of the final ``parameters`` or ``optimizer`` state."""
        return Path(self.directory, f"{what}_rank{rank}.safetensors")


class EventReader:
    """Reads a growing file of events; every call to :meth:`new` returns what came since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._rest = ""

    def new(self) -> list[Event]:
        """Return the events of all complete lines that were not returned yet."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open(encoding="utf-8")
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
