"""A checkpoint of adapters without their base can be read, for ever. ``make.py`` made it; it is never changed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from golden_adapters import PATH, STEP, load, values_of
from harness import RankPool

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.storage.index import read_index

BASE = ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_loaded_onto_its_base(world_size: int, ranks: Callable[[int], RankPool]) -> None:
    for report, found, said in ranks(world_size).run(load, str(PATH)):
        assert (report.step, report.base, report.other_base) == (STEP, BASE, [])
        assert found.keys() == {f"{layer}.lora_{matrix}" for layer in (0, 1) for matrix in "AB"}
        for name, value in found.items():
            np.testing.assert_array_equal(value, values_of(name, list(value.shape)), err_msg=name)
        assert f"4 of the base's 4 parameters have other values, shapes or dtypes here: {', '.join(BASE)}; " in said


def test_it_is_whole() -> None:
    assert ckpt.verify(PATH).is_good
    manifest = read_index(PATH).manifest
    assert manifest is not None
    assert manifest.lora == {"0": 2.5, "1": 2.5}
    assert manifest.base is not None
    assert {name: (one.dtype, one.shape) for name, one in manifest.base.items()} == {
        "0.weight": ("bfloat16", (4, 5)),
        "0.bias": ("bfloat16", (5,)),
        "1.weight": ("float32", (5, 3)),
        "1.bias": ("float32", (3,)),
    }
