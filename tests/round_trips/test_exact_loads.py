"""A load of just what was saved is planned without a judgement of each key, and is in all ways the load that judges each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import train_and_save
from exact_cases import load_both_ways, plans_of_others, saves_to_judge
from harness import RankPool
from hypothesis import given
from hypothesis import strategies as st

from paddle_fsdp_ckpt.loading.exact import find_ranges
from paddle_fsdp_ckpt.shardings import LivePlaces, SuffixedNames
from paddle_fsdp_ckpt.storage.columns import columns_of
from paddle_fsdp_ckpt.storage.entries import Box, Stored
from paddle_fsdp_ckpt.storage.table import table_of

Ranks = Callable[[int], RankPool]
AT_ONCE, SINGLY = "RangeReading", "TargetReading"


@pytest.mark.parametrize(
    ("model", "optimizer", "source", "target", "first"),
    [
        ("tied", "adamw groups", 2, 3, AT_ONCE),
        ("convolutions", "adam amsgrad named", 3, 2, AT_ONCE),
        ("partly", "adamw", 2, 1, AT_ONCE),
        ("tiny", "momentum", 1, 4, AT_ONCE),
        ("fading", "sgd", 2, 2, AT_ONCE),
        ("tied", "asgd", 2, 2, SINGLY),  # several values an element don't lie together
    ],
)
def test_both_ways_load_the_same(model: str, optimizer: str, source: int, target: int, first: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    ranks(source).run(train_and_save, model, optimizer, path, 3, 0)
    for kinds, same_report, same_values in ranks(target).run(load_both_ways, model, optimizer, path):
        assert kinds == [first, SINGLY]
        assert same_report and same_values


def test_what_needs_a_judgement_gets_one(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(saves_to_judge, str(tmp_path))
    for ended in ranks(2).run(plans_of_others, str(tmp_path)):
        for name in ("usual", "cast, and nothing to cast", "without digests"):
            assert ended[name] == ([AT_ONCE], "None"), name
        for name in ("verified first", "patterns"):
            assert ended[name] == ([SINGLY], "None"), name
        assert ended["another shape"][0] == ended["another dtype"][0] == [SINGLY]
        assert "checkpoint has shape [4, 7], the model wants [4, 6]" in ended["another shape"][1]
        assert "checkpoint has float32, the model wants float16" in ended["another dtype"][1]


@given(
    numel=st.integers(1, 12),
    pieces=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 2)), max_size=5),
    wanted=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_ranges_are_found_only_where_each_element_is_stored_just_once(
    numel: int, pieces: list[tuple[int, int, int]], wanted: tuple[int, int]
) -> None:
    box = Box((numel,), (0,), (numel,), numel)
    stored: list[Stored] = []
    files = [bytearray(), bytearray(), bytearray()]
    times = np.zeros(numel, int)
    for begin, end, file in pieces:
        start, stop = min(begin, end), min(max(begin, end), numel)
        if start < stop:
            stored.append((file, box, start, stop, len(files[file])))
            files[file] += bytes(range(start, stop))
            times[start:stop] += 1
    start, stop = min(min(wanted), numel), min(max(wanted), numel)
    if start == stop or not stored:
        return
    columns = [columns_of(("key", "uint8", *place) for file, *place in stored if file == number) for number in range(len(files))]
    table = table_of(columns)
    assert table is not None
    places = np.array([[start], [stop], [1000]], np.int64)
    column = LivePlaces(SuffixedNames((["key"], "")), ["uint8"], [(numel,)], *places, np.array([True]), [])
    ranges = find_ranges(table, column, np.array([0]), np.array([True]))
    assert (ranges is not None) == bool((times[start:stop] == 1).all())
    if ranges is not None:
        memory = bytearray(stop - start)
        for file, some in ranges.items():
            for offset, address, nbytes in some.places():
                memory[address - 1000 : address - 1000 + nbytes] = files[file][offset : offset + nbytes]
        assert memory == bytes(range(start, stop))
        assert sum(int(some.nbytes.sum()) for some in ranges.values()) == stop - start


def test_rows_of_a_box_are_not_taken_for_the_leading_ones() -> None:
    """Of [2, 3] the second row is stored, whose elements count from 0 in its own box."""
    table = table_of([columns_of([("key", "uint8", Box((2, 3), (1, 0), (1, 3), 3), 0, 3, 100)])])
    assert table is not None
    places = np.array([[0], [3], [1000]], np.int64)
    wanted = LivePlaces(SuffixedNames((["key"], "")), ["uint8"], [(2, 3)], *places, np.array([True]), [])
    assert find_ranges(table, wanted, np.array([0]), np.array([True])) is None
