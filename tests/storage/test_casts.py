from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from checkpoints import cut, write_checkpoint
from harness import RankPool
from paddle_casts import paddle_casts

from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage import casts
from paddle_fsdp_ckpt.storage.casts import can_cast, convert, may_overflow, may_round, read_cast
from paddle_fsdp_ckpt.storage.index import read_index

FLOATS = ("float64", "float32", "float16", "bfloat16")


def bits_of(dtype: str) -> type[np.unsignedinteger]:
    return {"float64": np.uint64, "float32": np.uint32}.get(dtype, np.uint16)


def as_float64(values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # NaN
        return ((values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values).astype(np.float64)


def every_value(dtype: str) -> np.ndarray:
    """All values of a 16-bit type, in the form of as_array; of others, values of every size, and such beside the middle of two bfloat16."""
    if dtype in ("float16", "bfloat16"):
        bits = np.arange(1 << 16, dtype=np.uint16)
        return bits if dtype == "bfloat16" else bits.view(np.float16)
    anything = np.random.RandomState(0).randint(0, 1 << 32, 20_000, dtype=np.uint64)
    if dtype == "float32":
        middles = (anything << np.uint64(16) | np.uint64(0x8000)) & np.uint64(0xFFFFFFFF)
        return np.concatenate([middles, middles + np.uint64(1), middles - np.uint64(1), anything]).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaN
        float32 = every_value("float32").astype(np.float64)
    wide = (anything << np.uint64(32) | anything).view(np.float64)
    return np.concatenate([float32, np.nextafter(float32, np.inf), np.nextafter(float32, -np.inf), wide])


def neighbours(value: float, dtype: str) -> tuple[float, float]:
    """The values of a 16-bit type on both sides, found in the sorted list of all of them."""
    sides = SORTED[dtype]
    position = int(np.searchsorted(sides, value))
    return sides[position - 1], sides[min(position, len(sides) - 1)]


def _sorted_values(dtype: str) -> np.ndarray:
    found = as_float64(every_value(dtype), dtype)
    return np.unique(found[np.isfinite(found)])


SORTED = {dtype: _sorted_values(dtype) for dtype in ("float16", "bfloat16")}


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_widening_is_exact_and_nan_and_infinity_stay(source: str, target: str) -> None:
    if source == target:
        return
    values = every_value(source)
    converted, overflows = convert(values, source, target)
    before, after = as_float64(values, source), as_float64(converted, target)
    assert converted.dtype == (np.uint16 if target == "bfloat16" else target)
    np.testing.assert_array_equal(np.isnan(after), np.isnan(before))
    np.testing.assert_array_equal(after[np.isinf(before)], before[np.isinf(before)])
    np.testing.assert_array_equal(np.signbit(after), np.signbit(before))
    assert overflows == np.count_nonzero(np.isinf(after) & np.isfinite(before))
    if not may_round(source, target):
        np.testing.assert_array_equal(after, before)
    if not may_overflow(source, target):
        assert overflows == 0


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
@pytest.mark.parametrize("source", FLOATS)
def test_the_nearest_is_taken_and_of_two_the_even(source: str, target: str) -> None:
    """Judged by exact fractions and the list of all values of the type."""
    if source == target:
        return
    values = every_value(source)
    values = values[np.random.RandomState(1).permutation(len(values))[:4000]]
    exact = as_float64(values, source)
    converted = convert(values, source, target)[0]
    bits = converted.view(np.uint16)
    rounded = as_float64(converted, target)
    for value, got, its_bits in zip(exact.tolist(), rounded.tolist(), bits.tolist(), strict=True):
        if not np.isfinite(value) or not np.isfinite(got):
            continue
        below, above = neighbours(value, target)
        others = [abs(Fraction(side) - Fraction(value)) for side in (below, above)]
        mine = abs(Fraction(got) - Fraction(value))
        assert mine <= min(others)
        if others[0] == others[1] and below != above:
            assert its_bits % 2 == 0


def test_a_float64_is_not_rounded_twice() -> None:
    just_above = np.array([1 + 2**-8 + 2**-40, -(1 + 2**-8 + 2**-40), 1 + 2**-8, 1 + 3 * 2**-8, 2.0**-133 * (0.5 + 2**-40), 2.0**-134])
    assert [hex(bits) for bits in convert(just_above, "float64", "bfloat16")[0].tolist()] == [
        "0x3f81",
        "0xbf81",
        "0x3f80",
        "0x3f82",
        "0x1",
        "0x0",
    ]


@pytest.mark.parametrize(
    ("source", "target", "largest", "too_large"),
    [
        ("float32", "float16", 65519.99, 65520.0),
        ("float64", "float32", 3.4028235e38, 3.5e38),
        ("float32", "bfloat16", 3.3895e38, 3.3962e38),
        ("float64", "bfloat16", 3.3895e38, 3.3962e38),
    ],
)
def test_values_that_become_infinite_are_counted(source: str, target: str, largest: float, too_large: float) -> None:
    values = np.array([largest, -largest, too_large, -too_large, np.inf, np.nan], source)
    converted, overflows = convert(values, source, target)
    assert overflows == 2
    assert np.isinf(as_float64(converted, target)).tolist() == [False, False, True, True, True, False]


def test_as_paddle_converts(single: RankPool) -> None:
    """Not compared: NaN, of which Paddle has one; float64 to 16 bits, which it rounds twice; and what it gets wrong.

    Paddle 3.3.1 on CPU makes a float16 of up to 6e-5 of a float32 between 1.6e-27 and 6.7e-24.
    """
    pairs = [(a, b) for a in FLOATS for b in FLOATS if a != b and (a == "float32" or "16" not in b)]
    values = {dtype: every_value(dtype) for dtype in FLOATS}
    (by_paddle,) = single.run(paddle_casts, values, pairs)
    for (source, target), expected in zip(pairs, by_paddle, strict=True):
        converted = convert(values[source], source, target)[0]
        sizes = np.abs(as_float64(values[source], source))
        chosen = ~np.isnan(sizes) & ((target != "float16") | (sizes < 1e-27) | (sizes > 1e-23))
        np.testing.assert_array_equal(converted.view(bits_of(target))[chosen], expected.view(bits_of(target))[chosen], f"{source} {target}")


@pytest.mark.parametrize(("source", "target"), [("float32", "int64"), ("int32", "int64"), ("bool", "float32"), ("float32", "float32")])
def test_nothing_else_is_converted(source: str, target: str) -> None:
    assert not can_cast(source, target) and not may_round(source, target) and not may_overflow(source, target)


@pytest.mark.parametrize("chunk_nbytes", [8, 40, 1 << 20])
def test_reading_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_nbytes: int) -> None:
    monkeypatch.setattr(casts, "_CHUNK_NBYTES", chunk_nbytes)
    whole, scalar = np.random.RandomState(0).rand(6, 7).astype(np.float32), np.array(2.5)
    files = [[cut("w", whole, flat=(0, 20)), cut("s", scalar)], [cut("w", whole, flat=(20, 42))]]
    index = read_index(write_checkpoint(tmp_path / "step", files))
    wanted = [
        Piece("w", "float64", (6, 7), (0, 0), (6, 7), Range(11, 40)),
        Piece("s", "float32", (), (), ()),
        Piece("w", "bfloat16", (6, 7), (1, 2), (4, 3)),
        Piece("w", "float16", (6, 7), (0, 0), (6, 7), Range(5, 5)),
    ]
    buffers = [np.zeros(29), np.zeros(1, np.float32), np.zeros(12, np.uint16), np.zeros(0, np.float16)]
    assert read_cast(index, wanted, [memoryview(one.view(np.uint8)) for one in buffers]) == [0, 0, 0, 0]
    np.testing.assert_array_equal(buffers[0], whole.reshape(-1)[11:40].astype(np.float64))
    assert buffers[1][0] == 2.5
    np.testing.assert_array_equal(buffers[2], convert(whole[1:5, 2:5].reshape(-1), "float32", "bfloat16")[0])
    assert read_cast(index, wanted, None) == [0, 0, 0, 0]


def test_looking_for_values_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "_CHUNK_NBYTES", 12)
    values = np.array([1, 1e5, 2, -1e6, 3, np.inf, 7e4], np.float32)
    index = read_index(write_checkpoint(tmp_path / "step", [[cut("w", values)]]))
    assert read_cast(index, [Piece("w", "float16", (7,), (0,), (7,)), Piece("w", "float64", (7,), (0,), (7,))], None) == [3, 0]
    assert read_cast(index, [], None) == []
