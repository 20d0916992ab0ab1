"""The checkpoints of a run: saved in step directories, some of them kept, and the newest restored."""

from .history import CheckpointEvent
from .manager import CheckpointManager
from .restoring import RestoreReport
from .retention import KeepBest, KeepEvery, KeepLast, KeepNewestOfEach, Retention

__all__ = [
    "CheckpointEvent",
    "CheckpointManager",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNewestOfEach",
    "RestoreReport",
    "Retention",
]
