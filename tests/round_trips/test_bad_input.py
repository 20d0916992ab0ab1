"""Mistakes of the caller and failures of one rank: a clear error on every rank, no hang, and everything is as it was."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_input_cases import (
    EXTRA_STATES,
    SUBJECTS,
    one_rank_fails_to_read,
    one_rank_fails_to_save,
    one_rank_lost_its_states,
    one_without_optimizer,
    refused_buffer,
    refused_extra_state,
    refused_path,
    refused_step,
    refused_subjects,
    refused_tensors,
    refused_timeout,
    save_and_load_here,
    values,
)
from harness import RankPool, RankPools
from strict_cases import Refusal, save_base

from paddle_fsdp_ckpt.storage.format import staging_name

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory, rank_pools: RankPools) -> Path:
    """A checkpoint."""
    path = tmp_path_factory.mktemp("good") / "good"
    rank_pools.pool(2).run(save_base, str(path))
    return path


def listing(path: Path) -> dict[str, Any]:
    return {str(one.relative_to(path)): one.read_bytes() if one.is_file() else None for one in sorted(path.rglob("*"))}


def check(results: list[Refusal], words: str, kinds: str) -> None:
    for name, message, changed in results:
        assert words in message
        assert name in (kinds, "RankFailedError")
        assert not changed
    assert kinds in {name for name, _, _ in results}


def prepare(case: str, root: Path) -> Path:
    path = root / "target"
    if case == "file":
        path.write_text("x")
    elif case in ("empty", "foreign", "stock"):
        path.mkdir()
        for name in {"empty": [], "foreign": ["notes.txt"], "stock": ["0_0.distcp", "0.metadata"]}[case]:
            (path / name).write_text("x")
    elif case == "dangling link":
        path.symlink_to(root / "nowhere")
    return path


@pytest.mark.parametrize(
    ("case", "words", "kind"),
    [
        ("missing", "there is no checkpoint", "IncompleteCheckpointError"),
        ("empty", "is an empty directory", "IncompleteCheckpointError"),
        ("file", "is a file, not a checkpoint", "IncompleteCheckpointError"),
        ("foreign", "notes.txt", "IncompleteCheckpointError"),
        ("stock", "0.metadata", "UnsafeCheckpointError"),
        ("dangling link", "there is no checkpoint", "IncompleteCheckpointError"),
    ],
)
def test_load_of_what_is_no_checkpoint(case: str, words: str, kind: str, tmp_path: Path, ranks: Ranks) -> None:
    path = prepare(case, tmp_path)
    before = listing(tmp_path)
    check(ranks(2).run(refused_path, "load", [str(path)]), words, kind)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(
    ("case", "words"), [("file", "is no directory"), ("foreign", "is not empty"), ("stock", "is not empty"), ("dangling link", "")]
)
def test_save_to_what_may_not_be_replaced(case: str, words: str, overwrite: bool, tmp_path: Path, ranks: Ranks) -> None:
    path = prepare(case, tmp_path)
    before = listing(tmp_path)
    if case == "dangling link":
        # The directory appears where the link points to.
        with pytest.raises(AssertionError, match="nothing was raised"):
            ranks(2).run(refused_path, "save", [str(path)], overwrite)
        assert (tmp_path / "nowhere" / "manifest.json").exists()
        assert path.is_symlink()
        return
    check(ranks(2).run(refused_path, "save", [str(path)], overwrite), words, "TargetExistsError")
    assert listing(tmp_path) == before


def test_save_over_a_checkpoint_needs_overwrite(tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "old"
    ranks(3).run(save_base, str(path))
    before = listing(tmp_path)
    check(ranks(2).run(refused_path, "save", [str(path)]), "overwrite=True", "TargetExistsError")
    assert listing(tmp_path) == before


@pytest.mark.parametrize(("call", "kind"), [("save", "RankFailedError"), ("load", "RankFailedError")])
def test_ranks_with_different_paths(call: str, kind: str, good: Path, tmp_path: Path, ranks: Ranks) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")] if call == "save" else [str(good), str(good.parent / "link")]
    if call == "load" and not os.path.lexists(paths[1]):
        os.symlink(good, paths[1])
    check(ranks(2).run(refused_path, call, paths), "path must be the same on all ranks", kind)
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("path", [None, 3, "", b"bytes", "nul\0"])
@pytest.mark.parametrize("call", ["save", "load"])
def test_what_is_no_path(call: str, path: Any, ranks: Ranks) -> None:
    check(ranks(2).run(refused_path, call, [path]), "path is", "CheckpointError")
    if call == "save":
        check(ranks(2).run(refused_path, call, ["x", path]), "path is", "CheckpointError")


WORDS = {
    "nothing": "give",
    "no layer": "is not a paddle.nn.Layer",
    "no optimizer": "is not an optimizer",
    "not bound": "bind_optimizer",
    "of another model": "of another model",
    "of a plain model": "is not bound",
    "bound, model plain": "is bound to a sharded model",
    "plain, of another plain model": "are not of the model given",
    "given twice": "held twice",
    "of two models": "of another model",
    "a part of the model": "part of a sharded model",
    "the model in another": "part of a sharded model",
    "lazy": "LazyGuard",
}


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize("case", SUBJECTS)
def test_wrong_models_and_optimizers(case: str, call: str, good: Path, tmp_path: Path, ranks: Ranks) -> None:
    path = good if call == "load" else tmp_path / "new"
    # In a job every rank makes the same models, so only what needs no collective can go wrong on one rank alone.
    for only_rank in (None, 1) if case in ("nothing", "no layer", "no optimizer", "given twice") else (None,):
        for name, message, changed in ranks(2).run(refused_subjects, call, case, str(path), only_rank):
            assert name in ("CheckpointError", "ShardingError", "UnsupportedOptimizerError", "RankFailedError")
            assert WORDS[case] in message
            assert not changed
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("case", [*EXTRA_STATES, "endless"])
def test_extra_state_that_json_can_not_hold(case: str, tmp_path: Path, ranks: Ranks) -> None:
    for only_rank in (None, 1):
        if case == "huge" and only_rank == 1:
            continue  # The first rank's is what is saved.
        results = ranks(2).run(refused_extra_state, case, str(tmp_path / "new"), only_rank)
        assert all(name in ("CheckpointError", "RankFailedError") and not changed for name, _, changed in results)
    assert listing(tmp_path) == {}


def test_extra_state_that_differs_is_named(tmp_path: Path, ranks: Ranks) -> None:
    for name, message, changed in ranks(2).run(refused_extra_state, "by rank", str(tmp_path / "new"), None):
        assert (name, changed) == ("RankFailedError", [])
        assert "extra_state must be the same on all ranks, and extra_state['loss'] is 0.5 on rank 0 and 1.5 on rank 1;" in message
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("timeout", [None, 0, -1.0, float("nan"), "60", True])
def test_times_that_are_none(timeout: Any, good: Path, tmp_path: Path, ranks: Ranks) -> None:
    for results in zip(*ranks(2).run(refused_timeout, timeout, str(tmp_path / "new"), str(good)), strict=True):
        check(list(results), "timeout_seconds is", "CheckpointError")
    assert listing(tmp_path) == {}


def test_buffers_that_a_checkpoint_can_not_hold(tmp_path: Path, ranks: Ranks) -> None:
    for message in ranks(2).run(refused_buffer, str(tmp_path / "new")):
        assert "angles (complex64)" in message and "persistable=False" in message
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("world_size", [1, 2])
def test_tensors_without_values_are_named(world_size: int, good: Path, tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks(world_size).run(refused_tensors, str(tmp_path / "new"), str(good)):
        assert len(said) == 14
        for words, message in said:
            assert re.search(words, message), message


@pytest.mark.parametrize("step", ["3", -1, 1.5, 2**63, [3, 4], [3, None]])
def test_steps_that_are_none(step: Any, tmp_path: Path, ranks: Ranks) -> None:
    kind = "RankFailedError" if isinstance(step, list) else "CheckpointError"
    check(ranks(2).run(refused_step, step, str(tmp_path / "new")), "step", kind)
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("call", ["save", "load"])
def test_one_rank_forgets_the_optimizer(call: str, good: Path, tmp_path: Path, ranks: Ranks) -> None:
    path = good if call == "load" else tmp_path / "new"
    check(ranks(2).run(one_without_optimizer, call, str(path)), "model and optimizers must be the same on all ranks", "RankFailedError")
    assert listing(tmp_path) == {}


def test_kinds_of_paths(tmp_path: Path, ranks: Ranks) -> None:
    for steps, changed in ranks(2).run(save_and_load_here, [str(tmp_path)]):
        assert steps == [0, 1, 2, 3, 4]
        assert not changed
    assert sorted(one.name for one in tmp_path.iterdir()) == ["deep", "dotted", "path", "relative"]


def test_left_overs_of_a_dead_save_of_another_world_size(tmp_path: Path, ranks: Ranks, good: Path) -> None:
    dead = tmp_path / staging_name("target", "0123456789abcdef")
    other = tmp_path / staging_name("target2", "0123456789abcdef")
    for path in (dead, other):
        path.mkdir()
        for rank in range(4):
            (path / f"{rank}_0.safetensors").write_bytes(b"half")
    ranks(2).run(save_base, str(tmp_path / "target"))
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([other.name, "target"])
    assert sorted(one.name for one in (tmp_path / "target").iterdir()) == [
        "0.metadata",
        "0_0.safetensors",
        "1_0.safetensors",
        "manifest.json",
    ]
    assert ranks(2).run(values, str(tmp_path / "target")) == ranks(2).run(values, str(good))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("rank", "where"), [(0, "write"), (1, "write"), (1, "sync"), (0, "sync"), (0, "rename")])
def test_one_rank_fails_to_save(rank: int, where: str, overwrite: bool, tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "target"
    if overwrite:
        ranks(3).run(save_base, str(path))
    results = ranks(2).run(one_rank_fails_to_save, str(path), rank, where, overwrite)
    assert [old for _, old in results] == [2 if overwrite else None] * 2
    check([result for result, _ in results], f"rank {rank} failed: OSError: [Errno 28] No space left", "RankFailedError")
    assert [one.name for one in tmp_path.iterdir()] == ["target"]


def test_states_that_only_some_ranks_have_are_not_saved(tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(2).run(one_rank_lost_its_states, str(tmp_path / "new"))
    check(results, "keys are not whole", "MismatchError")
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_fails_to_read(rank: int, good: Path, ranks: Ranks) -> None:
    for name, message in ranks(2).run(one_rank_fails_to_read, str(good), rank):
        assert name == "RankFailedError"
        assert f"rank {rank} failed: OSError: [Errno 28]" in message
        assert "must be loaded again" in message


@pytest.mark.parametrize("what", ["missing", "truncated", "longer", "directory"])
def test_a_damaged_file(what: str, tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "target"
    ranks(2).run(save_base, str(path))
    file = path / "1_0.safetensors"
    data = file.read_bytes()
    file.unlink()
    if what == "directory":
        file.mkdir()
    elif what != "missing":
        file.write_bytes(data[:-1] if what == "truncated" else data + b"x")
    for name, message, changed in ranks(2).run(refused_path, "load", [str(path)]):
        assert name == {"missing": "IncompleteCheckpointError", "directory": "UnsafeCheckpointError"}.get(what, "CorruptCheckpointError")
        assert "1_0.safetensors" in message
        assert not changed
