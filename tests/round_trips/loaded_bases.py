"""What tests of loads with options have in common: checkpoints to load, and what all ranks have once they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_cases import whole
from harness import RankPool
from option_cases import load, save

Arrays = dict[str, np.ndarray]


class Saved:
    """Checkpoints of 2 ranks: their paths, what is in them, and how the runs went on."""

    def __init__(self, root: Path, pool: RankPool) -> None:
        self._root, self._pool = root, pool
        self._made: dict[str, tuple[str, Arrays, Arrays]] = {}

    def __call__(self, model: str = "base", optimizer: str | None = "adamw") -> tuple[str, Arrays, Arrays]:
        name = f"{model} {optimizer}"
        if name not in self._made:
            path = str(self._root / name)
            results = self._pool.run(save, path, model, optimizer)
            self._made[name] = path, whole([saved for saved, _ in results]), whole([later for _, later in results])
        return self._made[name]


def is_state(key: str) -> bool:
    return key.endswith("_0")


def load_on(pool: RankPool, *args: Any, **options: Any) -> tuple[Arrays, Arrays, Any]:
    """What all ranks had and have, and their reports, which are the same."""
    results = pool.run(load, *args, options)
    reports = [after.report for _, after, _ in results]
    for report in reports:
        for name in (
            "missing",
            "unexpected",
            "casts",
            "other_shape",
            "started_afresh",
            "unused_options",
            "mapped",
            "without_state",
            "parts",
            "copied_tied",
        ):
            assert getattr(report, name) == getattr(reports[0], name)
    return whole([before for before, _, _ in results]), whole([after for _, after, _ in results]), reports[0]


def assert_values(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert found[key].dtype == array.dtype, key
        np.testing.assert_array_equal(found[key], array, err_msg=key)
