from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoints import cut, write_checkpoint

from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.index import CheckpointIndex, read_index
from paddle_fsdp_ckpt.storage.plan import plan_read

WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)
W = Piece("layers.0.w", "float32", (4, 6), (0, 0), (4, 6))


@pytest.fixture
def index(tmp_path: Path) -> CheckpointIndex:
    """A weight in two halves, and a bias on the first rank."""
    bias = np.ones(3, np.float32)
    return read_index(
        write_checkpoint(
            tmp_path / "step",
            [[cut("layers.0.w", WHOLE, flat=(0, 12)), cut("layers.0.b", bias)], [cut("layers.0.w", WHOLE, flat=(12, 24))]],
        )
    )


def message(index: CheckpointIndex, targets: Sequence[Piece], expected: Collection[str]) -> str:
    problems = plan_read(index, targets, expected).problems
    assert problems
    return str(problems)


def test_a_checkpoint_that_fits_has_no_problems(index: CheckpointIndex) -> None:
    plan = plan_read(index, [W], ["layers.0.w", "layers.0.b"])
    assert not plan.problems
    assert plan.nbytes == 96 and plan.duplicates == []
    assert [(number, read.target_offset, read.nbytes) for number, reads in plan.reads.items() for read in reads] == [
        (0, 0, 48),
        (1, 48, 48),
    ]


def test_a_rank_plans_only_the_files_that_it_needs(index: CheckpointIndex) -> None:
    plan = plan_read(index, [dataclasses.replace(W, flat_range=Range(13, 20))], index.keys())
    assert plan.reads.keys() == {1}
    assert plan_read(index, [], index.keys()).reads == {}


def test_missing_and_unexpected_keys_are_listed(index: CheckpointIndex) -> None:
    problems = plan_read(index, [W], ["layers.0.w", "layers.0.scale"]).problems
    assert (problems.missing, problems.unexpected, problems.nothing_matched) == (("layers.0.scale",), ("layers.0.b",), False)
    text = message(index, [W], ["layers.0.w", "layers.0.scale"])
    assert "1 missing from the checkpoint: 'layers.0.scale'" in text
    assert "1 in the checkpoint, and not in the objects: 'layers.0.b'" in text
    assert str(index.path) in text and "nothing was changed" in text and "Way out" in text


def test_an_opt_out_removes_one_kind_of_problem(index: CheckpointIndex) -> None:
    problems = plan_read(index, [W], ["layers.0.w"]).problems
    assert problems and not dataclasses.replace(problems, unexpected=())


def test_a_target_counts_as_expected(index: CheckpointIndex) -> None:
    scale = Piece("layers.0.scale", "float32", (4,), (0,), (4,))
    problems = plan_read(index, [W, scale], ["layers.0.b"]).problems
    assert (problems.missing, problems.unexpected) == (("layers.0.scale",), ())


def test_no_key_at_all_matching_is_said(index: CheckpointIndex) -> None:
    assert plan_read(index, [], ["v"]).problems.nothing_matched
    assert "not one key matches" in message(index, [], ["v"])
    assert "not one key matches" in message(index, [], [])


def test_20_keys_are_listed_and_the_others_counted(index: CheckpointIndex) -> None:
    text = message(index, [], ["layers.0.w", "layers.0.b", *(f"head.{i:04}" for i in range(500))])
    assert "500 missing" in text and "'head.0019', ... (480 more)" in text and "head.0020" not in text


def test_a_prefix_that_wraps_one_side_is_named(index: CheckpointIndex) -> None:
    text = message(index, [], ["_layers.layers.0.w", "_layers.layers.0.b", "extra"])
    assert "2 of these are in it without their prefix '_layers.'" in text


def test_another_shape_is_named_with_both(index: CheckpointIndex) -> None:
    target = Piece("layers.0.w", "float32", (4, 8), (0, 0), (4, 8))
    text = message(index, [target, target], index.keys())
    assert "1 of another shape: 'layers.0.w': checkpoint has shape [4, 6], the model wants [4, 8]" in text
    assert plan_read(index, [target], index.keys()).reads == {}


def test_another_dtype_is_named_with_both(index: CheckpointIndex) -> None:
    text = message(index, [dataclasses.replace(W, dtype="bfloat16")], index.keys())
    assert "1 of another dtype: 'layers.0.w': checkpoint has float32, the model wants bfloat16 (cast=True converts it)" in text
    text = message(index, [dataclasses.replace(W, dtype="int64")], index.keys())
    assert "checkpoint has float32, the model wants int64\n" in text


@pytest.mark.parametrize(
    ("stored", "target", "count", "first"),
    [
        ([(0, 12), (13, 24)], None, 1, 12),
        ([(0, 12)], None, 12, 12),
        ([(3, 24)], None, 3, 0),
        ([(0, 5), (3, 7), (9, 24)], Range(2, 20), 2, 7),
        ([(0, 5)], Range(10, 20), 10, 10),
    ],
)
def test_elements_that_no_file_has_are_counted_and_placed(
    tmp_path: Path, stored: list[tuple[int, int]], target: Range | None, count: int, first: int
) -> None:
    index = read_index(write_checkpoint(tmp_path / "step", [[cut("layers.0.w", WHOLE, flat=flat)] for flat in stored]))
    wanted = dataclasses.replace(W, flat_range=target)
    text = message(index, [wanted], ["layers.0.w"])
    which = "its 24 elements" if target is None else f"the {wanted.numel} elements that this rank wants"
    assert f"1 not stored whole: 'layers.0.w': {count} of {which} {'is' if count == 1 else 'are'} in no file" in text
    assert f"the first is the one at {list(map(int, np.unravel_index(first, (4, 6))))} of [4, 6]" in text


def test_an_element_of_a_box_is_placed_in_the_whole_tensor(tmp_path: Path) -> None:
    index = read_index(write_checkpoint(tmp_path / "step", [[cut("layers.0.w", WHOLE, flat=(0, 16))]]))
    box = dataclasses.replace(W, global_offset=(1, 2), local_shape=(3, 3))
    text = message(index, [box], ["layers.0.w"])
    # Of rows 1 to 3 and columns 2 to 4, element 16 of all, in row 2 and column 4, is the first that no file has.
    assert "4 of the 9 elements that this rank wants are in no file, the first is the one at [2, 4] of [4, 6]" in text


def test_a_target_without_elements_needs_none(index: CheckpointIndex) -> None:
    plan = plan_read(index, [dataclasses.replace(W, flat_range=Range(0, 0))], index.keys())
    assert not plan.problems and plan.reads == {}


def test_copies_are_read_once_and_compared(tmp_path: Path) -> None:
    index = read_index(write_checkpoint(tmp_path / "step", [[cut("layers.0.w", WHOLE)]] * 3))
    plan = plan_read(index, [W], index.keys())
    assert plan.reads.keys() == {0} and plan.nbytes == 96
    assert [(two.file, two.other_file, two.nbytes) for two in plan.duplicates] == [(0, 1, 96), (0, 2, 96)]


def test_what_reaches_beyond_the_tensor_is_not_wanted(index: CheckpointIndex, tmp_path: Path) -> None:
    """Of two more rows, and of two more columns; what is missing inside of the tensor is said of that alone."""
    rows, columns = dataclasses.replace(W, local_shape=(6, 6)), dataclasses.replace(W, local_shape=(4, 8))
    for target in (
        rows,
        columns,
        dataclasses.replace(columns, flat_range=Range(5, 30)),
        dataclasses.replace(rows, flat_range=Range(24, 36)),
    ):
        assert not plan_read(index, [target], index.keys()).problems
    plan = plan_read(index, [columns], index.keys())
    assert [read.target_offset for reads in plan.reads.values() for read in reads] == [0, 32, 64, 96]
    half = read_index(write_checkpoint(tmp_path / "half", [[cut("layers.0.w", WHOLE, flat=(0, 12))]]))
    for target, first in ((rows, 12), (columns, 16)):
        (problem,) = plan_read(half, [target], half.keys()).problems.uncovered
        assert f"12 of the 24 elements that this rank wants are in no file, the first is {first} of the flattened box" in problem.text
