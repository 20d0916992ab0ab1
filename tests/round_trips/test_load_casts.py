"""Promise 4: values of another dtype are converted where that was asked for, by the right rounding, and said; integers never are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import RankPool
from loaded_bases import Arrays, Saved, assert_values, is_state, load_on
from option_cases import (
    cast_memory,
    from_low_precision,
    load_mixed,
    refused,
    save_large_value,
    save_mixed,
    states_of_another_dtype,
    to_low_precision,
)
from test_strict import check

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(("saved_model", "model", "rounded"), [("base", "double", False), ("double", "base", True)])
def test_values_are_converted(saved_model: str, model: str, rounded: bool, saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved(saved_model)
    for world_size in (1, 2, 3):
        _, after, report = load_on(ranks(world_size), path, model, "adamw", 1, cast=True)
        dtype = np.float32 if rounded else np.float64
        expected = {key: array.astype(dtype) for key, array in values.items()}
        assert_values(after, expected)
        others = {"out.weight"}  # which is the embedding's
        assert {one.key for one in report.casts} == values.keys() - others
        dtypes = ("float64", "float32") if rounded else ("float32", "float64")
        assert {(one.saved, one.now, one.may_have_rounded) for one in report.casts} == {(*dtypes, rounded)}
    assert not report.is_exact and f"{len(report.casts)} keys converted" in str(report)


def test_without_cast_the_error_names_it(saved: Saved, ranks: Ranks) -> None:
    results = ranks(2).run(refused, saved()[0], "double", "adamw", [{}])
    check(results, ["checkpoint has float32, the model wants float64 (cast=True converts it)", "cast=True"])


@pytest.mark.parametrize(("saved_model", "model"), [("counting", "measuring"), ("measuring", "counting")])
def test_integers_are_never_converted(saved_model: str, model: str, saved: Saved, ranks: Ranks) -> None:
    results = ranks(2).run(refused, saved(saved_model)[0], model, "adamw", [{"cast": True}])
    check(results, ["1 of another dtype: 'count'"])
    assert all("converts" not in message for _, message, _ in results)


def test_values_too_large_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "large")
    ranks(2).run(save_large_value, path)
    results = ranks(2).run(refused, path, "half", None, [{"cast": True, "parts": {"model"}}])
    check(results, ["of another dtype: rank ", "'head.weight': ", "of its float32 values are too large for float16"])
    assert results[0] == results[1]


def joined(ranks: list[dict[str, Any]]) -> Arrays:
    """Put pieces together; a bfloat16 as its bits."""
    arrays: dict[str, list[tuple[int, np.ndarray]]] = {}
    for pieces in ranks:
        for key, ((start, _), dtype, data) in pieces.items():
            arrays.setdefault(key, []).append((start, np.frombuffer(data, "uint16" if dtype == "bfloat16" else dtype)))
    return {key: np.concatenate(list(dict(sorted(parts)).values())) for key, parts in arrays.items()}


def bits_to_float32(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype).astype(np.float32)


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_float32_into_low_precision_with_master_weights(dtype: str, step: float, world_size: int, saved: Saved, ranks: Ranks) -> None:
    path, values, _ = saved()
    results = ranks(world_size).run(to_low_precision, path, dtype)
    seen = set()
    for pieces, report in results:
        for key, ((start, stop), found, data) in pieces.items():
            name = key.removesuffix(".w_0")
            exact = values[name][start:stop]
            array = bits_to_float32(data, found)
            if is_state(key):
                assert found == "float32"
                np.testing.assert_array_equal(array, exact, err_msg=key)
            else:
                assert found == dtype
                np.testing.assert_array_less(np.abs(array - exact), np.abs(exact) * step * (1 + 1e-6) + 1e-7, err_msg=key)
            seen.add(key)
        assert {one.source for one in report.casts if one.key.endswith(".w_0")} == {key for key in values if not is_state(key)} - {
            "out.weight"
        }
        assert {one.key for one in report.casts if one.may_have_rounded} == {key for key in values if not is_state(key)} - {"out.weight"}
    assert "head.weight.w_0" in seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_low_precision_into_float32_takes_the_master_weights(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(world_size).run(from_low_precision, str(tmp_path / "low"))
    stored, found = joined([pieces for pieces, _, _ in results]), joined([pieces for _, pieces, _ in results])
    for key, array in found.items():
        name = {"out.weight": "embed.weight"}.get(key, key)
        np.testing.assert_array_equal(array, stored[key if is_state(key) else f"{name}.w_0"], err_msg=key)
    assert stored["head.weight"].dtype == np.uint16
    for _, _, report in results:
        assert {one.key for one in report.casts} == {key for key in found if not is_state(key)} - {"out.weight"}
        assert all(one.source == f"{one.key}.w_0" and not one.may_have_rounded for one in report.casts)
        assert not report.unexpected


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
def test_states_of_another_dtype(dtypes: tuple[str, str], tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(2).run(states_of_another_dtype, str(tmp_path / "states"), dtypes)
    check(
        [refusal for _, _, refusal, _ in results], [f"'embed.weight.velocity_0': checkpoint has {dtypes[0]}, the model wants {dtypes[1]}"]
    )
    saved, found = joined([pieces for pieces, _, _, _ in results]), joined([pieces for _, pieces, _, _ in results])
    assert saved.keys() == found.keys() == {one.key for one in results[0][3].casts} | {"out.weight"}
    for key, array in found.items():
        before, after = (bits_to_float32(values.tobytes(), dtype) for values, dtype in zip((saved[key], array), dtypes, strict=True))
        if dtypes[1] == "bfloat16":
            bits = before.view(np.uint32)
            before = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
        elif dtypes[1] == "float16":
            before = before.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(after, before, err_msg=key)


def test_two_dtypes_in_one_group(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "mixed")
    saved = joined(ranks(2).run(save_mixed, path))
    assert saved["blocks.0.norm.weight"].dtype == np.float32 and saved["blocks.0.up.weight"].dtype == np.uint16
    assert "blocks.0.up.weight.w_0" in saved and "blocks.0.norm.weight.w_0" not in saved
    for world_size in (1, 2, 3):
        results = ranks(world_size).run(load_mixed, path)
        assert_values(joined([pieces for pieces, _ in results]), saved)
        assert all(is_exact for _, is_exact in results)


def test_conversion_needs_little_memory(tmp_path: Path, single: RankPool) -> None:
    for traced, right in single.run(cast_memory, str(tmp_path / "wide")):
        assert right
        assert traced < 64 << 20
