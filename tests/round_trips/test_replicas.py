"""Checkpoints of hybrid sharding: each replica writes its part, every element is there once, and any other shape loads them."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import Outcome, load_and_train, train_and_save, whole
from harness import RankPool, assert_equal_states

Ranks = Callable[[int], RankPool]
STEPS, MORE = 2, 2


def first_replica(outcomes: list[Outcome], shards: int) -> dict[str, np.ndarray]:
    """Put one replica's pieces together, and check that the others hold the same bits."""
    for number, outcome in enumerate(outcomes):
        right = outcomes[number % shards].state
        assert outcome.state.keys() == right.keys()
        for key, piece in outcome.state.items():
            np.testing.assert_array_equal(piece.values, right[key].values, err_msg=key)
    return whole(outcomes[:shards])


def stored_elements(path: Path) -> tuple[dict[str, int], list[int]]:
    """Return, from the files' headers, how many elements of each key are stored, and how many each file holds."""
    by_key: Counter[str] = Counter()
    by_file = []
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        numels = {key: prod(one["shape"]) for key, one in header.items() if key != "__metadata__"}
        by_key.update(numels)
        by_file.append(sum(numels.values()))
    return dict(by_key), by_file


@pytest.mark.parametrize(
    ("model", "optimizer", "others"),
    [("convolutions", "adamw", (1, 3)), ("tied", "asgd", (2,)), ("tiny", "adamw groups", (4,))],
)
def test_a_checkpoint_of_replicas(model: str, optimizer: str, others: tuple[int, ...], tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "checkpoint"
    results = ranks(4).run(train_and_save, model, optimizer, str(path), STEPS, MORE, 2)
    saved = first_replica([one for one, _ in results], 2)
    uninterrupted = [after for _, after in results]
    first_replica(uninterrupted, 2)

    by_key, by_file = stored_elements(path)
    assert by_key == {key: array.size for key, array in saved.items()}
    if model != "tiny":
        assert max(by_file) < 0.4 * sum(by_file)

    resumed = ranks(4).run(load_and_train, model, optimizer, str(path), STEPS, MORE, 1, 2)
    assert_equal_states(first_replica([loaded for loaded, _ in resumed], 2), saved)
    for (_, after), right in zip(resumed, uninterrupted, strict=True):
        assert after.losses == right.losses
        for key, piece in right.state.items():
            np.testing.assert_array_equal(after.state[key].values, piece.values, err_msg=key)

    for world_size in others:
        loaded = ranks(world_size).run(load_and_train, model, optimizer, str(path), STEPS, 1)
        assert_equal_states(whole([one for one, _ in loaded]), saved)


def test_replicas_load_what_others_saved(tmp_path: Path, ranks: Ranks) -> None:
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    results = ranks(3).run(train_and_save, "convolutions", "adamw", str(alone), STEPS, 1)
    saved = whole([one for one, _ in results])
    # Two replicas of one rank each, which divide whole parameters.
    loaded = ranks(2).run(load_and_train, "convolutions", "adamw", str(alone), STEPS, 1, 0, 1)
    assert_equal_states(first_replica([one for one, _ in loaded], 1), saved)
    results = ranks(2).run(train_and_save, "convolutions", "adamw", str(pair), STEPS, 1, 1)
    saved = first_replica([one for one, _ in results], 1)
    by_key, by_file = stored_elements(pair)
    assert by_key == {key: array.size for key, array in saved.items()}
    assert max(by_file) < 0.6 * sum(by_file)
    loaded = ranks(4).run(load_and_train, "convolutions", "adamw", str(pair), STEPS, 1, 0, 2)
    assert_equal_states(first_replica([one for one, _ in loaded], 2), saved)
