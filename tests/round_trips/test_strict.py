"""Promises 3 and 4: what doesn't fit is refused on every rank, with a list of the differences, and nothing changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import RankPool, RankPools
from strict_cases import Refusal, forward_then_refused_load_then_backward, refused_load, save_base

from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.writer import write_rank_file

Ranks = Callable[[int], RankPool]
Held = tuple[Piece, memoryview]


def rewrite(source: Path, target: Path, edit: Callable[[Held], list[Held]]) -> str:
    """Write a checkpoint again with each of its pieces replaced by those that ``edit`` returns."""
    index = read_index(source)
    target.mkdir()
    files: dict[str, list[Held]] = {record.name: [] for record in index.files}
    for key in index.stored:
        for piece, file, offset in index.pieces(key):
            nbytes = piece.numel * np.dtype(piece.dtype).itemsize
            data = memoryview((source / file).read_bytes())[offset : offset + nbytes]
            files[file] += edit((piece, data))
    records = [write_rank_file(target / name, pieces) for name, pieces in files.items()]
    (target / MANIFEST_NAME).write_text(dataclasses.replace(index.manifest, files=tuple(records)).to_json())
    return str(target)


def cut_key(path: Path) -> str:
    """A parameter of which both ranks keep a piece."""
    index = read_index(path)
    return next(key for key in index.stored if key.endswith(".weight") and len(index.stored[key]) == 2)


def part(held: Held, start: int, stop: int) -> Held:
    """The part of a flat piece from its element ``start`` to ``stop``."""
    piece, data = held
    first = piece.box_range.start
    return dataclasses.replace(piece, flat_range=Range(first + start, first + stop)), data[4 * start : 4 * stop]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pools: RankPools) -> Path:
    """Checkpoints by name, of 2 ranks."""
    root = tmp_path_factory.mktemp("strict")
    for name, model, optimizer in [
        ("base", "base", "adamw"),
        ("amsgrad", "base", "adamw amsgrad"),
        ("sgd", "base", "sgd"),
        ("weights", "base", None),
        ("untied", "untied", "adamw"),
        ("wrapped", "wrapped", "adamw"),
    ]:
        rank_pools.pool(2).run(save_base, str(root / name), model, optimizer)
    return root


def check(results: list[Refusal], words: list[str], kind: str = "MismatchError", everywhere: bool = True) -> None:
    assert kind in {name for name, _, _ in results}
    for name, message, changed in results:
        assert name in (kind, "RankFailedError") and (not everywhere or name == kind), (name, message)
        assert not changed
        for word in words:
            assert word in message
        assert "nothing was changed" in message or kind != "MismatchError"


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("path", "model", "optimizer", "words"),
    [
        ("base", "more", "adamw", ["2 missing from the checkpoint: 'extra.bias', 'extra.weight'"]),
        ("base", "short", "adamw", ["in the checkpoint, and not in the objects", "blocks.1.down.bias'"]),
        ("base", "wide", "adamw", ["of another shape", "[13, 10]", "[13, 11]"]),
        ("base", "double", "adamw", ["of another dtype", "checkpoint has float32, the model wants float64"]),
        ("base", "wrapped", "adamw", ["_layers.embed.weight", "without their prefix '_layers.'"]),
        ("base", "other", "adamw", ["table.weight"]),
        ("base", "base", "adam", ["AdamW", "Adam"]),
        ("base", "base", "momentum", ["AdamW", "Momentum"]),
        ("base", "base", "adamw amsgrad", ["moment2_max_0"]),
        ("amsgrad", "base", "adamw", ["moment2_max_0", "not in the objects"]),
        ("sgd", "base", "adamw", ["SGD", "AdamW"]),
        ("base", "base", "sgd", ["SGD", "AdamW"]),
        ("base", "untied", "adamw", ["embed.weight = out.weight", "one tied parameter in the checkpoint"]),
        ("untied", "base", "adamw", ["embed.weight = out.weight", "one tied parameter in the model"]),
    ],
)
def test_what_does_not_fit_is_refused(
    path: str, model: str, optimizer: str, words: list[str], fresh: bool, saved: Path, ranks: Ranks
) -> None:
    check(ranks(2).run(refused_load, [str(saved / path)], model, optimizer, fresh), words)


@pytest.mark.parametrize(
    ("path", "model", "words"),
    [
        ("base", "more", ["2 missing from the checkpoint: 'extra.bias', 'extra.weight'"]),
        ("base", "short", ["in the checkpoint, and not in the objects", "'blocks.1.up.weight'"]),
        ("base", "wrapped", ["not one key matches", "without their prefix '_layers.'"]),
        ("wrapped", "base", ["not one key matches", "with the prefix '_layers.' in front"]),
        ("base", "other", ["not one key matches", "'table.weight'", "not in the objects"]),
        ("base", "double", ["of another dtype"]),
        ("base", "untied", ["embed.weight = out.weight"]),
        ("untied", "base", ["embed.weight = out.weight"]),
    ],
)
def test_weights_that_do_not_fit_are_refused(path: str, model: str, words: list[str], saved: Path, ranks: Ranks) -> None:
    check(ranks(2).run(refused_load, [str(saved / path)], model, "adamw", False, False), words)


def test_a_checkpoint_without_optimizer_is_refused_with_one(saved: Path, ranks: Ranks) -> None:
    check(
        ranks(2).run(refused_load, [str(saved / "weights")], "base", "adamw", True), ["without an optimizer"], "IncompleteCheckpointError"
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("state", ["", ".moment1_0"])
def test_a_range_that_is_missing_on_one_rank_is_refused_on_all(state: str, rank: int, saved: Path, tmp_path: Path, ranks: Ranks) -> None:
    key = cut_key(saved / "base") + state
    pieces = list(read_index(saved / "base").pieces(key))

    def edit(held: Held) -> list[Held]:
        return [part(held, 0, held[0].numel - 1)] if held[0] == pieces[rank].piece else [held]

    results = ranks(2).run(refused_load, [rewrite(saved / "base", tmp_path / "half", edit)], "base", "adamw", True)
    whole = pieces[rank].piece
    last = [int(place) for place in np.unravel_index(whole.box_range.stop - 1, whole.global_shape)]
    check(results, [f"rank {rank}: '{key}': 1 of the", f"the first is the one at {last} of"])


@pytest.mark.parametrize("differs", [True, False])
def test_a_range_that_is_stored_twice_must_hold_the_same(differs: bool, saved: Path, tmp_path: Path, ranks: Ranks) -> None:
    key = cut_key(saved / "base")
    pieces = [stored.piece for stored in read_index(saved / "base").pieces(key)]
    kept: dict[Piece, memoryview] = {}

    def edit(held: Held) -> list[Held]:
        piece, data = held
        if piece.key != key:
            return [held]
        kept[piece] = data
        if piece != pieces[1]:
            return [held]
        # The second rank's file repeats the last two elements of the first rank's.
        repeated = bytearray(kept[pieces[0]][-8:])
        repeated[5] ^= differs
        first, last = pieces[0].box_range.stop - 2, pieces[1].box_range.stop
        return [(dataclasses.replace(piece, flat_range=Range(first, last)), memoryview(bytes(repeated) + bytes(data)))]

    path = rewrite(saved / "base", tmp_path / "twice", edit)
    if differs:
        results = ranks(2).run(refused_load, [path], "base", "adamw", True)
        check(results, [key, "different values for the same elements", "nothing was changed"], "CorruptCheckpointError")
    else:
        errors = ranks(2).errors(refused_load, [path], "base", "adamw", True)
        assert [error.message for error in errors] == ["nothing was raised"] * 2


def test_one_state_of_one_parameter_missing_is_refused(saved: Path, tmp_path: Path, ranks: Ranks) -> None:
    gone = "blocks.0.norm.weight.moment2_0"
    path = rewrite(saved / "base", tmp_path / "gone", lambda held: [] if held[0].key == gone else [held])
    check(ranks(2).run(refused_load, [path], "base", "adamw", True), [f"'{gone}'"], everywhere=False)


def test_a_state_too_many_is_refused(saved: Path, tmp_path: Path, ranks: Ranks) -> None:
    def edit(held: Held) -> list[Held]:
        piece, data = held
        extra = dataclasses.replace(piece, key="blocks.0.norm.weight.w_0")
        return [held, (extra, data)] if piece.key == "blocks.0.norm.weight.moment2_0" else [held]

    path = rewrite(saved / "base", tmp_path / "more", edit)
    check(ranks(2).run(refused_load, [path], "base", "adamw", True), ["'blocks.0.norm.weight.w_0'"], everywhere=False)


def test_a_failure_of_one_rank_stops_all(saved: Path, tmp_path: Path, ranks: Ranks) -> None:
    nowhere = str(tmp_path / "nowhere")
    results = ranks(2).run(refused_load, [str(saved / "base"), nowhere], "base", "adamw", True)
    assert [name for name, _, _ in results] == ["RankFailedError", "IncompleteCheckpointError"]
    check(results, [nowhere], "IncompleteCheckpointError", everywhere=False)


def test_ranks_that_load_different_checkpoints_are_refused(saved: Path, ranks: Ranks) -> None:
    results = ranks(2).run(refused_load, [str(saved / "base"), str(saved / "amsgrad")], "base", None, True)
    check(results, ["path must be the same on all ranks", "nothing was changed"], "RankFailedError")


def test_a_refused_load_between_forward_and_backward_leaves_both(saved: Path, ranks: Ranks) -> None:
    assert ranks(2).run(forward_then_refused_load_then_backward, str(saved / "base")) == [True, True]


def test_files_are_swapped(saved: Path, tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "swapped"
    rewrite(saved / "base", path, lambda held: [held])
    one, other = path / rank_file_name(0), path / rank_file_name(1)
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)
    check(ranks(2).run(refused_load, [str(path)], "base", "adamw", True), ["bytes, and the manifest says"], "CorruptCheckpointError")
