"""The demo's batches: the same at every world size, and decided by the step alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddle_fsdp_ckpt.demo.text import BATCH_SIZE, LENGTH, Batches, open_batches, read_corpus


@pytest.fixture
def batches() -> Batches:
    return Batches(np.arange(251, dtype=np.uint8), batch_size=6, length=16, seed=3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_the_ranks_share_the_whole_batch(batches: Batches, world_size: int) -> None:
    parts = [batches.part(5, rank, world_size) for rank in range(world_size)]
    assert {inputs.shape for inputs, _ in parts} == {(6 // world_size, 16)}
    np.testing.assert_array_equal(np.concatenate([inputs for inputs, _ in parts]), batches.whole(5)[:, :-1])
    np.testing.assert_array_equal(np.concatenate([labels for _, labels in parts]), batches.whole(5)[:, 1:])


def test_every_label_is_the_byte_that_follows(batches: Batches) -> None:
    inputs, labels = batches.part(1, 0, 1)
    np.testing.assert_array_equal(labels, inputs + 1)


def test_a_step_is_always_the_same_and_unlike_others(batches: Batches) -> None:
    again = Batches(batches.corpus, batch_size=6, length=16, seed=3)
    np.testing.assert_array_equal(batches.whole(7), again.whole(7))
    assert not np.array_equal(batches.whole(7), batches.whole(8))
    assert not np.array_equal(batches.whole(7), Batches(batches.corpus, batch_size=6, length=16, seed=4).whole(7))


def test_every_place_of_the_corpus_can_be_drawn_and_none_beyond() -> None:
    shortest = Batches(np.arange(17, dtype=np.uint8), batch_size=2, length=16, seed=0)
    np.testing.assert_array_equal(shortest.whole(1), np.tile(np.arange(17), (2, 1)))
    two_places = Batches(np.arange(18, dtype=np.uint8), batch_size=64, length=16, seed=0)
    assert set(two_places.whole(1)[:, 0]) == {0, 1}


def test_what_cannot_be_shared_or_cut_is_refused(batches: Batches) -> None:
    with pytest.raises(ValueError, match="6 sequences a step can't be shared equally by 4 ranks"):
        batches.part(1, 0, 4)
    with pytest.raises(ValueError, match="16 bytes"):
        Batches(np.zeros(16, dtype=np.uint8), batch_size=2, length=16, seed=0)


def test_the_corpus_is_a_file_or_the_help_of_python(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)))
    np.testing.assert_array_equal(read_corpus(file), np.arange(256))
    assert b"`for`" in read_corpus().tobytes() or b'"for"' in read_corpus().tobytes()
    assert open_batches(file).whole(1).shape == (BATCH_SIZE, LENGTH + 1)
