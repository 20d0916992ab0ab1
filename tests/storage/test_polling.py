"""How long passes between two looks for something."""

from __future__ import annotations

import pytest

from paddle_fsdp_ckpt.storage import polling


def test_who_waits_loses_a_tenth_and_looks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(polling.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(polling.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    for there_at in (0.0, 0.003, 0.07, 0.4, 3.0):
        clock[0] = 0.0
        looks: list[float] = []

        def look(there_at: float = there_at, looks: list[float] = looks) -> str | None:
            looks.append(clock[0])
            return "there" if clock[0] >= there_at else None

        assert polling.look_until_there(look, 5.0) == "there"
        assert looks[-1] <= min(1.11 * there_at + 0.0003, there_at + 0.051)
        assert len(looks) < 130
    clock[0] = 0.0
    assert polling.look_until_there(lambda: None, 0.5) is None
    assert 0.5 <= clock[0] < 0.56


def test_no_time_is_one_look() -> None:
    looks: list[int] = []
    assert polling.look_until_there(lambda: looks.append(1), 0.0) is None
    assert looks == [1]
