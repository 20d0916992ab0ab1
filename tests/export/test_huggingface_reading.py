"""Ranks that keep parts of a matrix that lies the other way round in the file read each of its bytes once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_reading_cases as cases
import numpy as np
import pytest
from harness import RankPool
from safetensors.numpy import save_file

Ranks = Callable[[int], RankPool]

RULES = [
    {"source": "turned", "targets": ["t"], "transpose": True},
    {"source": "heads", "targets": ["h.q", "h.k", "h.v"], "transpose": True, "split": "qkv"},
    {"source": "experts", "targets": ["gate.{i}", "up.{i}"], "unstack": "i", "transpose": True, "split": "equal"},
    {"source": "straight", "targets": ["s"]},
    {"source": "halves", "targets": ["a", "b"], "split": "equal"},
    {"source": "last", "targets": ["l"], "transpose": True},
]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDTH = 3


def random(*shape: int) -> np.ndarray:
    return np.random.RandomState(sum(shape)).standard_normal(shape).astype(np.float32)


def published() -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Tensors of the model, one or a few at a time, and what they are in the files, by numpy alone."""
    turned, experts, straight, halves = random(37, 53), random(5, 22, 34), random(19, 23), random(10, 31)
    q, k, v = random(4 * WIDTH, 71), random(2 * WIDTH, 71), random(2 * WIDTH, 71)
    by_group = [one.reshape(2, -1, 71) for one in (q, k, v)]
    heads = np.concatenate(by_group, axis=1).reshape(-1, 71).T
    return [
        ({"turned": turned}, {"t": turned.T}),
        ({"heads": heads}, {"h.q": q, "h.k": k, "h.v": v}),
        ({"experts": experts}, {f"{name}.{i}": experts[i, :, k : k + 17].T for i in range(5) for name, k in (("gate", 0), ("up", 17))}),
        ({"straight": straight, "halves": halves}, {"s": straight, "a": halves[:5], "b": halves[5:]}),
    ]


def write(path: Path, tensors: dict[str, np.ndarray]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(HEADS))
    save_file({name: np.ascontiguousarray(one) for name, one in tensors.items()}, path / "model.safetensors")
    return str(path)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "mine", "rules": RULES}))
    return str(tmp_path / "recipe.json")


@pytest.mark.parametrize(("kind", "world_size"), [("ours", 1), ("ours", 2), ("ours", 3), ("paddle's", 3), ("replicas", 4), ("plain", 2)])
def test_each_byte_is_read_once(kind: str, world_size: int, recipe: str, tmp_path: Path, ranks: Ranks) -> None:
    together: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
    for model, tensors in published():
        together[0].update(model)
        together[1].update(tensors)
    # Each by itself is cut over all ranks. Paddle's runtime cuts one model in a process.
    every = [together] if kind == "paddle's" else [together, *published()]
    models = {write(tmp_path / f"model {i}", tensors): model for i, (model, tensors) in enumerate(every)}
    results = ranks(world_size).run(cases.load_each, models, kind, recipe)
    for (model, _), counts in zip(every, zip(*results, strict=True), strict=True):
        nbytes = sum(one.nbytes for one in model.values())
        copies = {"replicas": 2, "plain": 2}.get(kind, 1)
        assert sum(one.read for one in counts) == copies * nbytes
        rows = sum(2 * 4 * max(one.shape) * len(one.shape) for one in model.values())
        for one in counts:
            assert one.read <= one.kept + rows
            assert len(one.sent) == len(counts[0].sent)
            assert all(length <= 2048 + 8 for length in one.sent)
        if kind in ("ours", "replicas") and world_size > 1 and len(model) == 1:
            assert len(counts[0].sent) > (0 if "experts" in model else 1)


def test_memory_is_bounded(recipe: str, tmp_path: Path, ranks: Ranks) -> None:
    path = write(tmp_path / "model", {"t": np.ones((2048, 4096), np.float32)})
    for peak, sent in ranks(2).run(cases.peak_memory, path, {"turned": (4096, 2048)}, recipe):
        # Two chunks of 1 MiB to read into, what a rank keeps of what it read, and a block of 256 KiB with the part of it that is kept.
        assert peak < 4 << 20, "of the 16 MiB that it keeps"
        assert len(sent) >= 16
        assert max(sent) <= (1 << 20) + 8


@pytest.mark.parametrize(("number", "key"), [(0, "t"), (4, "t"), (7, "s"), (8, None)])
def test_a_file_that_ends_for_one_rank(number: int, key: str | None, recipe: str, tmp_path: Path, ranks: Ranks) -> None:
    path = write(tmp_path / "model", {"t": random(53, 37), "s": random(20, 20)})
    results = ranks(2).run(cases.fail_on_one, path, {"turned": (37, 53), "straight": (20, 20)}, recipe, number)
    if key is None:  # rank 1 reads no more than that
        assert results == [("nothing", "")] * 2
        return
    assert [kind for kind, _ in results] == ["RankFailedError", "CorruptCheckpointError"]
    for _, message in results:
        assert f"near key '{key}'" in message
        assert message.count("the objects may now hold a part of the checkpoint") == 1
        assert "nothing was changed" not in message
    assert "rank 1 failed" in results[0][1]


def test_a_rank_without_memory_keeps_nobody_waiting(recipe: str, tmp_path: Path, ranks: Ranks) -> None:
    path = write(tmp_path / "model", {"t": random(53, 37)})
    for raised in ranks(2).run(cases.without_memory, path, {"turned": (37, 53)}, recipe):
        assert len(raised) == 4
        for one in raised:
            assert "rank 1 failed: MemoryError: nothing left" in one
            assert "TIMEOUT" not in one and "no verdict" not in one


def test_a_value_that_is_too_large_on_one_rank(recipe: str, tmp_path: Path, ranks: Ranks) -> None:
    turned = random(37, 53)
    turned[-1, 7], turned[-1, 20] = 1e6, np.inf
    path = write(tmp_path / "model", {"t": turned.T})
    results = ranks(2).run(cases.overflow, path, {"turned": turned.shape}, recipe)
    assert [kind for kind, _ in results] == ["RankFailedError", "CheckpointError"]
    assert all("'turned': 1 values are too large for float16; the objects may now hold" in message for _, message in results)


def test_names_of_one_tensor_with_other_values(tmp_path: Path, ranks: Ranks) -> None:
    path = write(tmp_path / "model", {"a": random(3, 2), "b": random(3, 2) + 1})
    results = ranks(2).run(cases.load_tied, path)
    assert [kind for kind, _ in results] == ["MismatchError", "RankFailedError"]
    assert all("'a' and 'b' are one tensor of the model" in message for _, message in results)
    same = write(tmp_path / "same", {"a": random(3, 2), "b": random(3, 2)})
    assert ranks(2).run(cases.load_tied, same) == [("nothing", "")] * 2
