"""Adapters on a frozen base: trained at parity, saved without the base, and restored onto the same base only."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lora_cases as cases
import numpy as np
import pytest
from harness import RankPool, assemble, assert_equal_states

from paddle_fsdp_ckpt.export.difference import compare
from paddle_fsdp_ckpt.export.inspection import inspect
from paddle_fsdp_ckpt.storage.base_parameter import BaseParameter
from paddle_fsdp_ckpt.storage.checksums import sum_of_elements
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.manifest import Manifest
from paddle_fsdp_ckpt.storage.verify import verify

Ranks = Callable[[int], RankPool]
ADAPTERS = {f"blocks.{block}.{side}.lora_{matrix}" for block in (0, 1) for side in ("up", "down") for matrix in "AB"}
BASE = {f"blocks.{block}.{side}.{kind}" for block in (0, 1) for side in ("up", "down") for kind in ("weight", "bias")} | {"embed.weight"}
STATES = {f"{name}.{state}" for name in ADAPTERS for state in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_adapters_train_at_parity_beside_a_base_of_another_dtype(ranks: Ranks, single: RankPool, world_size: int) -> None:
    ((losses, adapters),) = single.run(cases.train_plain)
    results = ranks(world_size).run(cases.train_sharded, world_size != 3)
    first = results[0][1]
    for found, weights, kinds, states, gathered in results:
        np.testing.assert_allclose(found, losses, rtol=2e-6)
        assert weights.keys() == adapters.keys() == ADAPTERS
        for name, value in adapters.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        assert kinds == ["bfloat16 False", "float32 False", "float32 True"]
        assert set(states) == STATES
        assert gathered == (2 if world_size > 1 else 0)  # one buffer of adapters in each block, and nothing of the base
        assert list(weights) == list(first)  # in the same order on all ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pools: object) -> tuple[Path, list[object]]:
    path = tmp_path_factory.mktemp("lora") / "adapters"
    return path, rank_pools.pool(2).run(cases.save_adapters, str(path))  # type: ignore[attr-defined]


def test_only_what_trains_is_stored_and_the_base_is_summed_over_once(saved: tuple[Path, list[tuple[object, object, list[int]]]]) -> None:
    path, results = saved
    assert set(read_index(path).stored) == ADAPTERS | STATES | {"steps"}
    assert verify(path).is_good
    elements = sum(int(np.prod(shape)) for shape in ([11, 6], *[[6, 18], [18], [18, 6], [6]] * 2))
    first, second, third, fourth = (sum(sums[number] for _, _, sums in results) for number in range(4))
    assert first == second == elements
    assert 0 < third - second < elements  # of one rank, which gave out views, and may find them written to at any time from then on
    assert fourth - third == third - second
    manifests = [Manifest.from_json((path.parent / (path.name + end) / MANIFEST_NAME).read_text()) for end in ("", " later", " again")]
    assert manifests[0].base == manifests[1].base == manifests[2].base
    assert manifests[0].base is not None
    assert manifests[0].base.keys() == BASE
    assert manifests[0].lora == {f"blocks.{block}.{side}": 4.0 for block in (0, 1) for side in ("up", "down")}
    text = str(inspect(path))
    assert "without its base, 9 parameters of 546 elements" in text
    difference = compare(path, path.parent / (path.name + " later"))
    assert [fact.what for fact in difference.facts] == ["step"]
    other = replace(manifests[0], base={**manifests[0].base, "embed.weight": BaseParameter("float32", (11, 6), "0" * 16)})
    (path.parent / "other").mkdir()
    for file in path.iterdir():
        (path.parent / "other" / file.name).write_bytes(file.read_bytes())
    (path.parent / "other" / MANIFEST_NAME).write_text(replace(other, lora=manifests[0].lora | {"blocks.0.up": 2.0}).to_json())
    facts = compare(path, path.parent / "other").facts
    assert [(one.what, one.parameters) for one in facts] == [("base", 1), ("scaling of LoRA layers", None)]
    assert (facts[0].one, facts[0].other) == (manifests[0].base["embed.weight"].to_text(), f"float32 [11, 6] {'0' * 16}")
    assert "scaling of LoRA layers" in str(compare(path, path.parent / "other"))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_adapters_go_on_upon_the_same_base(ranks: Ranks, saved: tuple[Path, list[tuple[object, dict, list[int]]]], world_size: int) -> None:
    path, results = saved
    loaded = ranks(world_size).run(cases.load_adapters, str(path) + " later", world_size - 1)
    for report, losses, state in loaded:
        np.testing.assert_allclose(losses, results[0][0], rtol=0 if world_size == 2 else 2e-5)
        assert set(report.base) == BASE | {"head.weight"}
        assert report.is_exact
        assert report.without_state == report.missing == report.not_asked_for == []
        assert report.loaded < 60
        assert "9 parameters left to the base" not in str(report)
        assert "10 parameters left to the base, unchanged" in str(report)
        assert state.keys() >= {"steps"}
    if world_size == 2:
        assert_equal_states(assemble([state for _, _, state in loaded]), assemble([state for _, state, _ in results]))


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_base_is_an_error(ranks: Ranks, saved: tuple[Path, object], world_size: int, tmp_path: Path) -> None:
    full = str(tmp_path / "full")
    ranks(2).run(cases.save_full, full)
    for said in ranks(world_size).run(cases.load_wrongly, str(saved[0]), full):
        assert "10 of the base's 10 parameters have other values" in said["another base"]
        assert "'blocks.0.down.bias'" not in said["one bit"]
        assert "1 of the base's 10 parameters have other values, shapes or dtypes here: blocks.1.down.bias; " in said["one bit"]
        assert "2 of the base's 10 parameters" in said["swapped rows"]
        assert "here: embed.weight, head.weight; " in said["swapped rows"]
        assert "8 of the base's 10 parameters" in said["another dtype"]
        assert "had 4 parameters that the model lacks: blocks.1.down.bias, blocks.1.down.weight, " in said["a smaller model"]
        assert "10 of the base's 10" in said["a plain model"]
        assert "1 parameters of the optimizer have no states in it, or were in no optimizer then: blocks.0.up.bias; " in said["trains now"]
        assert "missing from the checkpoint" not in said["trains now"]


def test_what_can_not_be_saved_without_a_base_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(cases.refuse_to_save, str(tmp_path / "checkpoint")):
        assert "no parameter trains" in said["nothing trains"]
        assert "blocks.0.up; unmerge them first" in said["merged"]
        assert "frozen parameters (stop_gradient) must be the same on all ranks" in said["frozen differently"]
    assert not list(tmp_path.iterdir())


def test_what_was_frozen_after_it_trained_is_stored(ranks: Ranks, tmp_path: Path) -> None:
    for base, frozen in ranks(2).run(cases.freeze_later, str(tmp_path / "checkpoint")):
        assert sorted({*frozen, "head.weight"}) == base


def test_a_manager_saves_adapters(ranks: Ranks, tmp_path: Path) -> None:
    for base in ranks(2).run(cases.manage, str(tmp_path)):
        assert set(base) == BASE | {"head.weight"}


def test_replicas_save_adapters_for_others(ranks: Ranks, tmp_path: Path) -> None:
    """The base's checksums are of one replica."""
    saved = ranks(4).run(cases.adapters_of_replicas, str(tmp_path / "adapters"), 2, True)
    for found in ranks(2).run(cases.adapters_of_replicas, str(tmp_path / "adapters"), 2, False):
        assert_equal_states(found, saved[0])


def test_a_checksum_tells_any_bit_and_any_order_apart() -> None:
    values = np.random.RandomState(0).randint(0, 1 << 16, 70_000).astype("<u2")
    whole = sum_of_elements(values.data.cast("B"), 2, 0, 5)
    for cut in (1, 32_768, 33_000, 69_999):
        parts = [sum_of_elements(values[a:b].data.cast("B"), 2, a, 5) for a, b in ((0, cut), (cut, 70_000))]
        assert sum(parts) % (1 << 64) == whole
    seen = {whole, sum_of_elements(values.data.cast("B"), 2, 0, 6), sum_of_elements(values.data.cast("B"), 2, 1, 5)}
    for place in (0, 1, 32_767, 32_768, 69_999):
        for bit in range(16):
            changed = values.copy()
            changed[place] ^= 1 << bit
            seen.add(sum_of_elements(changed.data.cast("B"), 2, 0, 5))
        swapped = values.copy()
        swapped[[place, place - 1]] = swapped[[place - 1, place]]
        seen.add(sum_of_elements(swapped.data.cast("B"), 2, 0, 5))
    assert len(seen) == 3 + 5 * 17


def test_its_numbers_are_those_of_the_format() -> None:
    def mix(word: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = ((word ^ word >> shift) * factor) % (1 << 64)
        return word ^ word >> 31

    golden = 0x9E3779B97F4A7C15
    first, seed, values = 32_766, 123, [7, 0, 255, 1]
    right = 0
    for position, value in enumerate(values, first):
        block, place = divmod(position, 32_768)
        key = mix(place * golden % (1 << 64)) + mix((seed + block * golden) % (1 << 64))
        right += mix(key % (1 << 64) ^ value)
    assert sum_of_elements(memoryview(bytes(values)), 1, first, seed) == right % (1 << 64)


def test_a_manifest_with_a_base_is_strict(saved: tuple[Path, object]) -> None:
    text = (saved[0] / MANIFEST_NAME).read_text()
    for old, new in (("bfloat16 [18]", "bfloat17 [18]"), ("bfloat16 [18]", "bfloat16 [18"), ('"blocks.0.up": 4.0', '"blocks.0.up": NaN')):
        assert old in text
        with pytest.raises(ValueError, match=r"base parameter|lora of"):
            Manifest.from_json(text.replace(old, new), check_seal=False)
    assert "base" not in json.loads(Manifest(None, 0, "2026-01-01T00:00:00+00:00", {}, [], None, ()).to_json())
