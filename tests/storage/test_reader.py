from __future__ import annotations

import errno
import itertools
import math
import os
import tempfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Held, cut, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fsdp_ckpt.errors import CorruptCheckpointError, IncompleteCheckpointError
from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.digests import CHUNK_NBYTES
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.plan import ReadPlan, plan_read
from paddle_fsdp_ckpt.storage.reader import check_duplicates, execute_read, verify_first

WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)
W = Piece("w", "float32", (4, 6), (0, 0), (4, 6))
UNTOUCHED = {"float32": -1, "float64": -1, "int16": -1, "uint8": 255}
"""What a destination holds before; never a value of an array here, where an array of uint8 has fewer than 200 elements."""


def destinations_for(plan: ReadPlan) -> list[np.ndarray]:
    return [np.full(target.numel, UNTOUCHED[target.dtype], target.dtype) for target in plan.targets]


def load(path: Path, targets: Sequence[Piece]) -> list[np.ndarray]:
    index = read_index(path)
    plan = plan_read(index, targets, index.keys())
    plan.problems.raise_if_any()
    check_duplicates(plan)
    destinations = destinations_for(plan)
    execute_read(plan, [values.data for values in destinations])
    return destinations


def test_what_was_saved_comes_back_cut_another_way(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut("w", WHOLE, flat=(0, 7))], [cut("w", WHOLE, flat=(7, 24))]])
    whole, part, column = load(
        path, [W, Piece("w", "float32", (4, 6), (0, 0), (4, 6), Range(5, 12)), Piece("w", "float32", (4, 6), (0, 4), (4, 1))]
    )
    assert whole.tolist() == list(range(24))
    assert part.tolist() == list(range(5, 12))
    assert column.tolist() == [4, 10, 16, 22]


@st.composite
def cuts(draw: st.DrawFn, whole: np.ndarray) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int] | None]]:
    """Draw pieces that together are the whole array: a grid of boxes along one axis, each cut into flat ranges."""
    axis = draw(st.integers(0, whole.ndim - 1)) if whole.ndim else 0
    size = whole.shape[axis] if whole.ndim else 1
    edges = [0, *sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=2))), size] if size > 1 else [0, size]
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int] | None]] = []
    for start, stop in itertools.pairwise(edges):
        offset = tuple(start if i == axis else 0 for i in range(whole.ndim))
        local = tuple(stop - start if i == axis else n for i, n in enumerate(whole.shape))
        numel = math.prod(local)
        flat_edges = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=3))), numel]
        if len(flat_edges) == 2 and draw(st.booleans()):
            pieces.append((offset, local, None))
        else:
            pieces += [(offset, local, flat) for flat in itertools.pairwise(flat_edges)]
    return pieces


@st.composite
def saves(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], list[list[Held]], list[Piece]]:
    """Draw arrays, how two to four ranks save them (some pieces twice), and how one rank wants to have them."""
    arrays: dict[str, np.ndarray] = {}
    files: list[list[Held]] = [[] for _ in range(draw(st.integers(2, 4)))]
    targets: list[Piece] = []
    for number in range(draw(st.integers(1, 4))):
        key = f"k{number}"
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        dtype = draw(st.sampled_from(["float32", "float64", "int16", "uint8"]))
        arrays[key] = whole = (np.arange(math.prod(shape)) + 7 * number).astype(dtype).reshape(shape)
        homes: dict[Piece, set[int]] = {}
        for offset, local, flat in draw(cuts(whole)):
            piece = cut(key, whole, flat, offset, local)
            for _ in range(draw(st.integers(1, 2))):
                used = homes.setdefault(piece[0], set())
                # One piece of a key a file: what finds no file of its own joins none.
                possible = [i for i, file in enumerate(files) if i not in used and all(held.key != key for held, _ in file)]
                if possible:
                    chosen = draw(st.sampled_from(possible))
                    used.add(chosen)
                    files[chosen].append(piece)
        targets += [cut(key, whole, flat, offset, local)[0] for offset, local, flat in draw(cuts(whole))]
    return arrays, files, targets


@settings(max_examples=250, deadline=None)
@given(saves())
def test_every_element_is_read_right_or_said_to_be_missing(save: tuple[dict[str, np.ndarray], list[list[Held]], list[Piece]]) -> None:
    arrays, files, targets = save
    with tempfile.TemporaryDirectory() as folder:
        index = read_index(write_checkpoint(Path(folder) / "step", files))
        plan = plan_read(index, targets, arrays.keys())
        check_duplicates(plan)
        destinations = destinations_for(plan)
        execute_read(plan, [values.data for values in destinations])
    short = {problem.key for problem in plan.problems.uncovered}
    stored_whole = set()
    for key, whole in arrays.items():
        held = [np.frombuffer(data, piece.dtype) for file in files for piece, data in file if piece.key == key]
        stored = set(np.concatenate(held).tolist()) if held else set()
        wanted = set(whole.reshape(-1).tolist())
        if stored == wanted:
            stored_whole.add(key)
    assert not short & stored_whole
    for target, values in zip(targets, destinations, strict=True):
        expected = np.frombuffer(
            cut(target.key, arrays[target.key], (target.box_range.start, target.box_range.stop), target.global_offset, target.local_shape)[
                1
            ],
            target.dtype,
        )
        untouched = UNTOUCHED[target.dtype]
        if target.key in stored_whole:
            np.testing.assert_array_equal(values, expected)
        else:
            assert ((values == expected) | (values == untouched)).all()


def test_copies_that_differ_are_an_error_before_anything_is_read(tmp_path: Path) -> None:
    other = WHOLE.copy()
    other[3, 5] += 1
    path = write_checkpoint(tmp_path / "step", [[cut("w", WHOLE)], [cut("w", WHOLE)], [cut("w", other)]])
    with pytest.raises(CorruptCheckpointError, match="key 'w': 0_0.safetensors and 2_0.safetensors hold different values"):
        load(path, [W])
    assert len(load(path, [Piece("w", "float32", (4, 6), (0, 0), (4, 6), Range(0, 23))])) == 1, "a rank compares what it reads"


def test_partly_overlapping_pieces_are_compared_where_they_overlap(tmp_path: Path) -> None:
    agreeing = [[cut("w", WHOLE, flat=(0, 15))], [cut("w", WHOLE, offset=(1, 0), local=(3, 6))], [cut("w", WHOLE, flat=(10, 20))]]
    assert load(write_checkpoint(tmp_path / "good", agreeing), [W])[0].tolist() == list(range(24))
    for element in (10, 12, 17, 19):
        other = WHOLE.copy()
        other.reshape(-1)[element] += 1
        path = write_checkpoint(tmp_path / f"bad{element}", [*agreeing[:2], [cut("w", other, flat=(10, 20))]])
        with pytest.raises(CorruptCheckpointError, match="key 'w'.*2_0.safetensors"):
            load(path, [W])


def test_large_copies_are_compared_in_chunks_to_the_last_byte(tmp_path: Path) -> None:
    large = np.arange(5 << 20, dtype=np.float32)
    other = large.copy()
    other[-1] = 0
    target = Piece("w", "float32", large.shape, (0,), large.shape)
    np.testing.assert_array_equal(load(write_checkpoint(tmp_path / "good", [[cut("w", large)]] * 2), [target])[0], large)
    with pytest.raises(CorruptCheckpointError, match="different values"):
        load(write_checkpoint(tmp_path / "bad", [[cut("w", large)], [cut("w", other)]]), [target])


def test_4000_tiny_targets_cost_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = np.arange(16_000, dtype=np.float32)
    pieces = [(Piece(f"k{i}", "float32", (4,), (0,), (4,)), flat[4 * i : 4 * i + 4].data.cast("B")) for i in range(4000)]
    path = write_checkpoint(tmp_path / "step", [pieces])
    calls: list[int] = []
    real = os.preadv

    def count(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", count)
    # Every second one, in another order: the gaps are read over.
    read = load(path, [piece for piece, _ in pieces[::-2]])
    np.testing.assert_array_equal(np.concatenate(read[::-1]), flat.reshape(-1, 2, 4)[:, 1].reshape(-1))
    assert len(calls) <= 4000 // 1024 + 1


def test_without_digests_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what lies in small gaps; with digests whole chunks are, and the values are the same."""
    whole = np.arange(400_000, dtype=np.float32)
    index = read_index(write_checkpoint(tmp_path / "step", [[cut("w", whole)]]))
    bare = replace(index, files=tuple(replace(one, digests="") for one in index.files))
    targets = [
        Piece("w", "float32", (400_000,), (0,), (400_000,), Range(start, start + 100)) for start in (10, 500, 100_000, 300_000, 399_900)
    ]
    real, read = os.preadv, [0]

    def count(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = real(descriptor, buffers, offset)
        read[0] += done
        return done

    monkeypatch.setattr(os, "preadv", count)
    for one, nbytes in ((bare, 4 * (590 + 100 + 100 + 100)), (index, 4 * 400_000)):
        read[0] = 0
        plan = plan_read(one, targets, ["w"])
        destinations = destinations_for(plan)
        execute_read(plan, [values.data for values in destinations])
        assert [values[0] for values in destinations] == [10, 500, 100_000, 300_000, 399_900]
        assert all((np.diff(values) == 1).all() for values in destinations)
        assert read[0] == nbytes


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut("w", WHOLE), cut("v", WHOLE + 50)]])
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:5]], offset))
    read = load(path, [W, Piece("v", "float32", (4, 6), (0, 0), (4, 6))])
    assert np.concatenate(read).tolist() == [*range(24), *range(50, 74)]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_file_cut_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut("v", WHOLE), cut("w", WHOLE)]])
    index = read_index(path)
    plan = plan_read(index, [W], index.keys())
    real = os.preadv

    def truncate_first(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        os.truncate(path / "0_0.safetensors", index.files[0].size - 96 + 17 * shift)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncate_first)
    with pytest.raises(CorruptCheckpointError, match="0_0.safetensors' ends at byte .*key 'w'.*must be loaded again"):
        execute_read(plan, [values.data for values in destinations_for(plan)])


def test_a_file_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut("w", WHOLE)], [cut("w", WHOLE)]])
    index = read_index(path)
    plan = plan_read(index, [W], index.keys())
    os.truncate(path / "1_0.safetensors", 200)
    with pytest.raises(CorruptCheckpointError, match="1_0.safetensors' has 200 bytes"):
        check_duplicates(plan)
    os.unlink(path / "1_0.safetensors")
    with pytest.raises(IncompleteCheckpointError, match="1_0.safetensors"):
        check_duplicates(plan)


def test_destinations_that_do_not_fit_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    index = read_index(write_checkpoint(tmp_path / "step", [[cut("v", WHOLE), cut("w", WHOLE)]]))
    plan = plan_read(index, [Piece("v", "float32", (4, 6), (0, 0), (4, 6)), W], index.keys())
    good = bytearray(96)
    for bad, message in [
        ([good], "2 targets and 1 destinations"),
        ([good, bytearray(95)], "'w' has 95 bytes, and its target 96"),
        ([good, bytes(96)], "'w' is read-only"),
        ([good, np.zeros(48, np.float32)[::2]], "'w': its memory is not contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            execute_read(plan, bad)  # type: ignore[arg-type]
        assert good == bytearray(96)


def test_no_descriptor_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut("w", WHOLE)], [cut("w", WHOLE)]])
    descriptors = len(os.listdir("/proc/self/fd"))
    load(path, [W])

    def fail(*_: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=r"Cannot allocate memory: '.*/0_0\.safetensors'"):
        load(path, [W])
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Return a checkpoint of 38 chunks, more than the threads take at a time, in which nothing lies at the beginning of one."""
    sizes = {"a": 1, "b": 3 * CHUNK_NBYTES + 1, "c": 19 * CHUNK_NBYTES + 7, "d": 15 * CHUNK_NBYTES - 3, "e": 5}
    values = np.random.default_rng(1)
    arrays = {key: values.integers(0, 256, size, np.uint8) for key, size in sizes.items()}
    return write_checkpoint(tmp_path_factory.mktemp("large") / "step", [[cut(key, array) for key, array in arrays.items()]]), arrays


def read_parts(path: Path, arrays: dict[str, np.ndarray], told: list[int]) -> bool:
    """Read some of each array, not in their order in the file, and tell whether it is right."""
    parts = {
        "d": (5, len(arrays["d"]) - 4),
        "c": (3, len(arrays["c"])),
        "e": (1, 4),
        "a": (0, 1),
        "b": (CHUNK_NBYTES - 2, CHUNK_NBYTES + 1),
    }
    index = read_index(path)
    plan = plan_read(index, [cut(key, arrays[key], part)[0] for key, part in parts.items()], index.keys())
    destinations = destinations_for(plan)
    tracemalloc.start()
    try:
        execute_read(plan, [values.data for values in destinations], on_read=told.append)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * CHUNK_NBYTES, "the memory that is needed doesn't grow with what is read"
    return all(np.array_equal(read, arrays[key][slice(*part)]) for read, (key, part) in zip(destinations, parts.items(), strict=True))


@pytest.mark.parametrize("makes_threads", [True, False])
def test_many_chunks_at_odd_places(large: tuple[Path, dict[str, np.ndarray]], makes_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    if not makes_threads:  # as Python 3.12, once the process ends
        monkeypatch.setattr("threading.Thread.start", refuse)
    path, arrays = large
    told: list[int] = []
    assert read_parts(path, arrays, told)
    # All chunks but one, which nobody wants: the third of "b".
    data_nbytes = sum(map(len, arrays.values()))
    assert sum(told) == data_nbytes - CHUNK_NBYTES
    assert len(told) > 1, "the progress is told on the way"


def test_a_flipped_bit_is_found_in_any_chunk_that_is_read(large: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, arrays = large
    (record,) = read_index(path).files
    begin, size = record.header_nbytes, record.size
    unread = begin + 2 * CHUNK_NBYTES + 5
    for position in [begin, begin + CHUNK_NBYTES, unread, *range(begin + 3 * CHUNK_NBYTES, size, 5 * CHUNK_NBYTES + 1), size - 1]:
        flip(path / record.name, position)
        if position == unread:
            assert read_parts(path, arrays, [])
        else:
            number = (position - begin) // CHUNK_NBYTES
            with pytest.raises(CorruptCheckpointError, match=f"is damaged between bytes {begin + number * CHUNK_NBYTES} and"):
                read_parts(path, arrays, [])
        flip(path / record.name, position)


def test_a_damaged_chunk_says_how_many_keys_it_holds(tmp_path: Path) -> None:
    small = [cut(f"small.{number:02}", np.full(8, number, np.float32)) for number in range(18)]
    path = write_checkpoint(tmp_path / "step", [[*small, cut("large", np.zeros(CHUNK_NBYTES // 2, np.float32))]])
    index = read_index(path)
    plan = plan_read(index, [index.whole_piece(key) for key in ("small.07", "large")], index.stored)
    destinations = [memoryview(bytearray(target.numel * 4)) for target in plan.targets]
    (record,) = index.files
    for position, said in (
        (record.header_nbytes, "key 'small.07' and 18 more keys whose bytes lie in the same chunk: "),
        (record.size - 1, "key 'large': "),
    ):
        flip(path / record.name, position)
        for call in (partial(verify_first, plan), partial(execute_read, plan, destinations)):
            with pytest.raises(CorruptCheckpointError, match=f"at or near {said}"):
                call()
        flip(path / record.name, position)
    execute_read(plan, destinations)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 16]))
