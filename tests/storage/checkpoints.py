"""What the tests of the disk side share: pieces cut out of whole arrays, checkpoint directories, and ranks that are threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.manifest import FileRecord, Manifest, seal, utc_now
from paddle_fsdp_ckpt.storage.writer import write_rank_file

Held = tuple[Piece, memoryview]


def cut(
    key: str,
    whole: np.ndarray,
    flat: tuple[int, int] | None = None,
    offset: Sequence[int] | None = None,
    local: Sequence[int] | None = None,
) -> Held:
    """Return a piece of a whole array, and its bytes."""
    offset = tuple(offset if offset is not None else (0,) * whole.ndim)
    local = tuple(local if local is not None else whole.shape)
    values = whole[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))].reshape(-1)
    if flat is not None:
        values = values[slice(*flat)]
    piece = Piece(key, str(whole.dtype), whole.shape, offset, local, None if flat is None else Range(*flat))
    return piece, memoryview(np.ascontiguousarray(values).tobytes())


def make_manifest(records: Sequence[FileRecord], step: int | None = 7) -> Manifest:
    versions = {"paddle": "3.3.1", "paddle_fsdp_ckpt": "0.1.0"}
    group = {"parameters": ["w"], "settings": {"beta1": 0.9}}
    optimizer = {"class": "AdamW", "groups": [group], "without_gradient": [], "learning_rate": {"value": 0.1}}
    return Manifest(step, len(records), utc_now(), versions, [optimizer], {"epoch": 3}, tuple(records))


def reseal(fields: dict[str, Any]) -> str:
    """Return the text of a manifest of these fields, with a digest that belongs to it."""
    return seal({key: value for key, value in fields.items() if key != "digest"})


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the fields of a checkpoint's manifest as someone would who makes its digest fit."""
    fields = json.loads((path / MANIFEST_NAME).read_text())
    change(fields)
    (path / MANIFEST_NAME).write_text(reseal(fields))


def write_checkpoint(path: Path, files: Sequence[Sequence[Held]]) -> Path:
    """Write a checkpoint directory that holds, for each rank, these pieces."""
    path.mkdir()
    records = [write_rank_file(path / rank_file_name(rank), pieces) for rank, pieces in enumerate(files)]
    (path / MANIFEST_NAME).write_text(make_manifest(records).to_json())
    return path


class ThreadRendezvous:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, world_size: int, store: dict[str, bytes], changed: threading.Condition) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._changed = changed

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self._store, f"'{key}' is set twice"
            self._store[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_seconds: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._store, timeout_seconds):
                raise TimeoutError(key)
            return self._store[key]

    def forget(self, key: str) -> None:
        with self._changed:
            self._store[key] = b""


def run_ranks(world_size: int, work: Callable[[ThreadRendezvous], object]) -> list[Any]:
    """Return, for each rank, what ``work`` returned, or the exception that it raised."""
    store: dict[str, bytes] = {}
    changed = threading.Condition()

    def attempt(rank: int) -> object:
        try:
            return work(ThreadRendezvous(rank, world_size, store, changed))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(attempt, range(world_size)))
