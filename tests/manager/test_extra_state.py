"""What a trainer keeps comes back just as it was: types, dtypes, shapes and bytes; nothing else is taken."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddle_fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from paddle_fsdp_ckpt.manager.extra_state import decode_extra_state, encode_extra_state

DTYPES = arrays.boolean_dtypes() | arrays.integer_dtypes(endianness="<") | arrays.unsigned_integer_dtypes(endianness=">")
DTYPES = DTYPES | arrays.floating_dtypes(sizes=(16, 32, 64)) | arrays.complex_number_dtypes(sizes=(64, 128))
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text()
KEYS = st.text(max_size=3) | st.sampled_from(["@array", "@dict"])
TREES = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, paddle.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one.astype("float64") == other.astype("float64")).all())
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@settings(deadline=None)
@given(TREES)
def test_any_tree_comes_back(tree: Any) -> None:
    assert same(tree, decode_extra_state(encode_extra_state(tree, "x"), "x"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
@pytest.mark.parametrize("shape", [[], [1], [3, 2], [0, 4]])
def test_tensors_come_back(dtype: str, shape: list[int]) -> None:
    tensor = paddle.ones(shape).astype(dtype)
    assert same([tensor], decode_extra_state(encode_extra_state([tensor], "x"), "x"))


def test_views_and_reversed_arrays_come_back() -> None:
    array = np.arange(24).reshape(4, 6)
    for view in (array[::-1, ::2], array.T, np.asfortranarray(array), np.float32(1.5), np.bool_(True)):
        back = decode_extra_state(encode_extra_state(view, "x"), "x")
        assert np.array_equal(view, back)
        assert type(back) is type(view)
    tensor = paddle.arange(6).reshape([2, 3]).transpose([1, 0])
    for part in (tensor, tensor[1:], tensor[:, 1], tensor[::2], tensor[0, 0]):
        assert same(part.clone(), decode_extra_state(encode_extra_state(part, "x"), "x"))


def test_what_is_read_is_owned_and_writable() -> None:
    back = decode_extra_state(encode_extra_state([np.zeros(3)], "x"), "x")
    back[0][:] = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, (2, 3)]}, r"x\['a'\]\[1\] is of type tuple"),
        ({1: 2}, "the key 1, which is no str"),
        (np.array(["a"]), "x is of type ndarray"),
        (np.array([object()]), "x is of type ndarray"),
        (np.ma.array([1, 2], mask=[0, 1]), "x is of type MaskedArray.*numpy.asarray makes one, without a mask"),
        (np.zeros(2).view(np.recarray), "x is of type recarray"),
        (np.zeros(2, [("a", "i4")]), "x is of type ndarray"),
        (np.zeros(2, [("a", "i4")])[0], "x is of type void"),
        (np.array(["2026-02-27"], "datetime64[D]"), "x is of type ndarray"),
        ({"f": test_any_tree_comes_back}, r"x\['f'\] is of type function"),
        ({1, 2}, "x is of type set"),
        ([paddle.to_tensor(1j)], r"x\[0\] is of type Tensor"),
    ],
)
def test_other_things_are_refused(value: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        encode_extra_state(value, "x")


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="holds itself"):
        encode_extra_state(tree, "x")


@settings(deadline=None)
@given(TREES, st.data())
def test_damage_is_found_or_harmless(tree: Any, data: st.DataObject) -> None:
    encoded = bytearray(encode_extra_state(tree, "x"))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    del encoded[data.draw(st.integers(1, len(encoded))) :]
    with contextlib.suppress(CorruptCheckpointError):
        decode_extra_state(encoded, "x")


@pytest.mark.parametrize(
    "text",
    [
        '{"@array": ["numpy", "|O", [1], 0]}',
        '{"@array": ["numpy", "<f8", [1000000000000], 0]}',
        '{"@array": ["numpy", ",f4", [1], 0]}',
        '{"@array": ["numpy", "<f8,<f8", [1], 0]}',
        '{"@array": ["numpy", "<f8", [true], 0]}',
        '{"@array": ["paddle", "float32", [1], -4]}',
        '{"@array": ["paddle", "float32", [-1, -1], 0]}',
        '{"@array": ["paddle", "no such", [1], 0]}',
        '{"@array": ["paddle", "float32", [1000000000000], 0]}',
        '{"@array": ["pickle", "<f8", [1], 0]}',
        '{"@array": ["numpy", "<f8", [1], 9223372036854775808]}',
        f'{{"@array": ["paddle", "float32", {[0] * 100}, 0]}}',
        '{"@array": 3}',
        '{"@dict": [1]}',
        '{"a": 1, "a": 2}',
        "[" * 100000,
    ],
)
def test_crafted_text_is_refused(text: str) -> None:
    encoded = len(text).to_bytes(8, "little") + text.encode() + bytes(8)
    with pytest.raises(CorruptCheckpointError, match="x is not what a save writes"):
        decode_extra_state(encoded, "x")
