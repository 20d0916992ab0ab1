"""In place of the package visualdl, which is large: writes what it is told as lines of a file."""

from __future__ import annotations

import json
from pathlib import Path


class LogWriter:
    def __init__(self, logdir: str) -> None:
        Path(logdir).mkdir(parents=True, exist_ok=True)
        self._path = Path(logdir) / "scalars.jsonl"

    def add_scalar(self, *, tag: str, step: int, value: float) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([tag, step, value]) + "\n")

    def close(self) -> None:
        """Nothing is open."""
