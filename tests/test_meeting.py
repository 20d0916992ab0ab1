"""What a caller's path stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_fsdp_ckpt.meeting import absolute_path


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute_path("~/step") == absolute_path(Path("~/step")) == tmp_path / "step"
