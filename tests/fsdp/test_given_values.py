"""What ``set_value`` was given is compared by all of its bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_fsdp_ckpt.fsdp.given_values import GivenValues


def checksum_of(value: paddle.Tensor, index: int = 0) -> int:
    given = GivenValues(are_compared=True)
    shard: Any = SimpleNamespace(index=index)
    given.note(shard, value)
    return given.checksum


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_bit_of_a_large_value_counts(dtype: str) -> None:
    values = paddle.to_tensor(np.random.default_rng(1).standard_normal([700, 300], np.float32)).astype(dtype)
    right = checksum_of(values)
    assert checksum_of(values.clone()) == right
    assert checksum_of(values.t().contiguous().t()) == right, "however it lies in memory"
    assert checksum_of(values, 1) != right
    for place in (0, 1, 104_999, 209_999):
        other = values.flatten().clone()
        other[place] = -other[place]
        assert checksum_of(other.reshape([700, 300])) != right
