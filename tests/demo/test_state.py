"""Final states: put together from the ranks' parts, and compared."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from paddle_fsdp_ckpt.demo.state import Part, identical, largest_difference, read_whole, write_parts


def test_parts_of_all_ranks_make_whole_tensors(tmp_path: Path) -> None:
    weight, bias, scalar = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float16), np.array(7, np.int64)
    first = {"weight": Part(weight.reshape(-1)[:4], 0, (2, 3)), "scalar": Part(scalar, 0, ())}
    second = {"weight": Part(weight.reshape(-1)[4:], 4, (2, 3)), "scalar": Part(scalar, 0, ()), "bias": Part(bias, 0, (2,))}
    paths = [tmp_path / "0", tmp_path / "1"]
    for path, parts in zip(paths, (first, second), strict=True):
        write_parts(path, parts)
    assert identical(read_whole(paths), {"weight": weight, "bias": bias, "scalar": scalar})


def test_a_hole_is_an_error(tmp_path: Path) -> None:
    write_parts(tmp_path / "0", {"weight": Part(np.zeros(3, np.float32), 2, (6,))})
    with pytest.raises(ValueError, match="no rank holds all of weight"):
        read_whole([tmp_path / "0"])


def test_identical_means_every_bit() -> None:
    state = {"a": np.array([0.0, math.nan], np.float32)}
    assert identical(state, {"a": state["a"].copy()})
    assert not identical(state, {"a": np.array([-0.0, math.nan], np.float32)})
    assert not identical(state, {"a": state["a"].astype(np.float64)})
    assert not identical(state, {"a": state["a"].reshape(1, 2)})
    assert not identical(state, {})


def test_the_largest_difference() -> None:
    state = {"a": np.array([1.0, 2.0]), "b": np.array([[3.0]])}
    assert largest_difference(state, state) == 0.0
    assert largest_difference(state, {"a": np.array([1.5, 2.0]), "b": np.array([[1.0]])}) == 2.0
    assert largest_difference(state, {"a": state["a"]}) == math.inf
    assert largest_difference(state, {"a": state["a"], "b": np.array([3.0])}) == math.inf
