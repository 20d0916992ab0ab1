"""``history.jsonl`` is written in its root and nowhere else."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from paddle_fsdp_ckpt.manager.history import CheckpointEvent, steps_in_history, tell
from paddle_fsdp_ckpt.manager.steps import HISTORY_NAME

SAVED = CheckpointEvent("save", 3, 0.1, 0.1, steps=[3])


@pytest.mark.parametrize("is_there", [False, True])
def test_a_link_out_of_the_root_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_there: bool) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    root.mkdir()
    if is_there:
        tell(SAVED, tmp_path, None)
        os.rename(tmp_path / HISTORY_NAME, outside)
    before = outside.read_bytes() if is_there else None
    (root / HISTORY_NAME).symlink_to(outside)
    with caplog.at_level(logging.WARNING, logger="paddle_fsdp_ckpt"):
        tell(SAVED, root, None)
    assert f"'{root / HISTORY_NAME}' could not be written" in caplog.text
    assert steps_in_history(root) == set()
    assert (outside.read_bytes() if outside.exists() else None) == before


def test_what_was_told_is_read(tmp_path: Path) -> None:
    tell(SAVED, tmp_path, None)
    tell(CheckpointEvent("save", 4, 0.1, 0.1, steps=[4], removed=[3]), tmp_path, None)
    assert steps_in_history(tmp_path) == {4}
