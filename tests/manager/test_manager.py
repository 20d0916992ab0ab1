"""A run under a manager: resumed in one line, at any number of ranks, and never from what is half there."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import history_cases
import manager_runs
import numpy as np
import pytest
import step_cases
import trainer_state_cases
from harness import RankError, RankPool
from manager_runs import call

import paddle_fsdp_ckpt

Ranks = Callable[[int], RankPool]


def on(pool: RankPool, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Run a function on all ranks, with arguments by name too."""
    return pool.run(call, function, arguments, options)


def errors_on(pool: RankPool, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[RankError]:
    """Run a function that raises on all ranks."""
    return pool.errors(call, function, arguments, options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    whole = on(ranks(world_size), manager_runs.run, str(tmp_path / "whole"), 0, 6)
    first = on(ranks(world_size), manager_runs.run, str(tmp_path / "cut"), 0, 3)
    second = on(ranks(world_size), manager_runs.run, str(tmp_path / "cut"), 3, 6)
    for (uninterrupted, _), (before, _), (after, _) in zip(whole, first, second, strict=True):
        assert before + after == uninterrupted


def test_replicas_resume_under_a_manager(tmp_path: Path, ranks: Ranks) -> None:
    """With every rank's own random numbers, and tensors of the user's own, which two replicas hold."""
    whole = on(ranks(4), manager_runs.run, str(tmp_path / "whole"), 0, 4, shards=2)
    first = on(ranks(4), manager_runs.run, str(tmp_path / "cut"), 0, 2, shards=2)
    second = on(ranks(4), manager_runs.run, str(tmp_path / "cut"), 2, 4, shards=2, async_save=True)
    for (uninterrupted, _), (before, _), (after, _) in zip(whole, first, second, strict=True):
        assert before + after == uninterrupted
    owns = on(ranks(4), trainer_state_cases.save_everything, str(tmp_path / "all"), async_save=True, shards=2)
    right = {key: np.concatenate([own[key].reshape(-1) for own in owns[:2] if key in own]) for own in owns[:2] for key in own}
    for *_, rank_states, pieces, differences in on(ranks(2), trainer_state_cases.restore_everything, str(tmp_path / "all")):
        assert {rank: state["sample"] for rank, state in rank_states.items()} == {rank: 100 * rank for rank in range(4)}
        for key, (flat, values) in pieces.items():
            np.testing.assert_array_equal(values, right[key][flat])
        assert not differences


def test_the_manager_works_without_a_job(tmp_path: Path, single: RankPool) -> None:
    assert [steps for _, steps in on(single, manager_runs.run, str(tmp_path / "root"), 0, 3, 1)] == [[1, 2, 3]]


def test_an_empty_root_restores_nothing(tmp_path: Path, ranks: Ranks) -> None:
    assert on(ranks(2), manager_runs.restore_only, str(tmp_path / "root")) == [(None, None)] * 2
    assert not (tmp_path / "root").exists()


def flip(path: Path) -> None:
    """Flip a bit near the end of a file, among the values."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_restore_skips_what_is_no_step_and_says_so(world_size: int, root: Path, ranks: Ranks) -> None:
    (root / ".step_00000009.staging-0123456789abcdef").mkdir()
    (root / "step_00000007").mkdir()
    (root / "step_8").mkdir()
    (root / "notes.txt").write_text("mine")
    for step, report in on(ranks(world_size), manager_runs.restore_only, str(root)):
        assert step == 3
        assert report[0] == {
            ".step_00000009.staging-0123456789abcdef": "what a save that was killed, or is not finished, wrote",
            "step_00000007": "it has no manifest.json, as what was copied or removed in part, or what this package did not save",
            "step_8": "not made by this manager",
            "notes.txt": "not made by this manager",
        }
    assert sorted(path.name for path in root.iterdir() if not path.name.endswith("jsonl")) == sorted(
        [".step_00000009.staging-0123456789abcdef", "step_00000007", "step_8", "notes.txt"] + [f"step_0000000{n}" for n in (1, 2, 3)]
    )


def test_the_next_save_clears_left_overs_and_nothing_foreign(root: Path, ranks: Ranks) -> None:
    for name in (".step_00000009.staging-0123456789abcdef", ".step_00000002.removed-0123456789abcdef", ".other.staging-0123456789abcdef"):
        (root / name).mkdir()
        (root / name / "file").write_text("x")
    (root / "notes.txt").write_text("mine")
    assert on(ranks(2), step_cases.save_in_used_root, str(root), resume=True, step=4, max_to_keep=2) == [[3, 4]] * 2
    names = sorted(path.name for path in root.iterdir())
    assert names == [".other.staging-0123456789abcdef", "history.jsonl", "notes.txt", "step_00000003", "step_00000004"]


def test_a_killed_replacement_is_healed(root: Path, ranks: Ranks) -> None:
    (root / "step_00000003").rename(root / ".step_00000003.replaced-0123456789abcdef")
    assert [step for step, _ in on(ranks(2), manager_runs.restore_only, str(root))] == [3, 3]


@pytest.mark.parametrize("damage", ["flip", "missing", "manifest", "own state", "renamed"])
def test_a_damaged_newest_step_is_an_error_that_names_the_one_before(damage: str, root: Path, ranks: Ranks) -> None:
    newest = root / "step_00000003"
    if damage == "flip":
        flip(newest / "1_0.safetensors")
    elif damage == "missing":
        (newest / "1_0.safetensors").unlink()
    elif damage == "manifest":
        (newest / "manifest.json").write_text("{}")
    elif damage == "own state":
        data = (newest / "1_0.safetensors").read_bytes()
        assert data.count(b"mt19937") + data.count(b"MT19937") == 1
        (newest / "1_0.safetensors").write_bytes(data.replace(b"MT19937", b"MT19938"))
    else:
        newest.rename(root / "step_00000005")
    name = "step_00000005" if damage == "renamed" else "step_00000003"
    for kind, text, unchanged in on(ranks(2), manager_runs.refuse, str(root), "restore"):
        assert f"{name} is damaged, and the step before it is step_00000002: restore(fall_back=True) takes that." in text
        assert kind in ("CorruptCheckpointError", "IncompleteCheckpointError", "RankFailedError")
        assert unchanged
    for step, later in on(ranks(2), step_cases.fall_back_and_go_on, str(root), 3):
        assert (step, later) == (2, [1, 2, 3])
    assert not (root / "step_00000005").exists()
    assert [step for step, _ in on(ranks(2), manager_runs.restore_only, str(root))] == [3, 3]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_is_no_step_is_in_the_way_of_none(kind: str, root: Path, ranks: Ranks) -> None:
    """It gets another name, with all that is in it, and a run hears of it before it trains."""
    path = root / "step_00000004"
    if kind == "directory":
        shutil.copytree(root / "step_00000003", path)
        (path / "manifest.json").unlink()
    elif kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to("step_00000003")
    (root / "step_00000005").mkdir()
    before = contents(path)
    for async_save in (False, True):
        first, second = on(ranks(2), step_cases.restore_and_save, str(root), 4 + async_save, async_save=async_save)
        assert (first[:2], second) == ((3 + async_save, [1, 2, 3, 4, 5][: 4 + async_save]), (*first[:2], []))
        if not async_save:
            told, empty, renamed = first[2]
            (aside,) = root.glob("step_00000004.aside-*")
            assert f"has a step_00000004, later than the restored step_00000003, that was skipped: {told.split('skipped: ')[1]}" in told
            assert f"mv '{path}' ELSEWHERE" in told and "step_00000005" in empty
            assert renamed.startswith(f"'{path}' was in the way of the save of step 4, and was renamed to '{aside.name}': ")
            assert contents(aside) == before and aside.is_symlink() == (kind == "link")
    assert sorted(path.name for path in root.glob("step_*")) == sorted([aside.name, *(f"step_0000000{n}" for n in range(1, 6))])


def contents(path: Path) -> dict[str, bytes]:
    """Return what the files of a directory hold, or a file."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def test_a_root_of_other_checkpoints_says_so(root: Path, ranks: Ranks) -> None:
    for step in (1, 2, 3):
        (root / f"step_0000000{step}").rename(root / f"step_{step}")
    (root / "step_1" / "manifest.json").unlink()  # stock Paddle's are checkpoints too
    (root / "logs").mkdir()
    (root / ".other").mkdir()
    (root / ".other" / "manifest.json").touch()
    first, second = on(ranks(2), step_cases.restore_and_save, str(root), 4)
    (text,) = first[2]
    assert (first[:2], second) == ((None, [4]), (None, [4], []))
    assert "holds 3 checkpoints that no CheckpointManager made: step_1, step_2, step_3. To go on from one, load(" in text
    assert f"load('{root / 'step_3'}', model=..., optimizer=...)" in text


@pytest.mark.parametrize("later", [3, 4])
def test_a_saved_step_of_which_nothing_can_be_read_is_a_damaged_one(later: int, root: Path, ranks: Ranks) -> None:
    """Its history says that it was saved; half a line of that disturbs nobody, and what was removed may be missing."""
    (root / "step_00000003" / "manifest.json").unlink()
    shutil.rmtree(root / "step_00000002")
    (root / "step_00000002").mkdir()
    with open(root / "history.jsonl", "a") as file:
        file.write('{"kind": "save", "step": 9, "removed": [7]}\n{"kind": "save", "st')
    for kind, text, unchanged in on(ranks(2), manager_runs.refuse, str(root), "restore"):
        assert (kind, unchanged) == ("IncompleteCheckpointError", True)
        assert "step_00000003 is damaged, and the step before it is step_00000001: restore(fall_back=True) takes that." in text
        assert f"{root / 'step_00000003'}' was saved, as history.jsonl says, and is no step now: it has no manifest.json" in text
    right = (1, [1, later])
    assert on(ranks(2), step_cases.fall_back_and_go_on, str(root), later) == [right] * 2
    assert sorted(path.name for path in root.iterdir()) == ["history.jsonl", *(f"step_0000000{n}" for n in right[1])]
    assert [step for step, _ in on(ranks(2), manager_runs.restore_only, str(root))] == [later] * 2
    told = (root / "history.jsonl").read_text().splitlines()
    assert [line for line in told if not line.endswith("}")] == ['{"kind": "save", "st']  # which swallowed no other


@pytest.mark.parametrize("anew", [False, True])
def test_a_run_is_not_resumed_from_a_step_that_was_given_up_and_is_still_there(anew: bool, root: Path, ranks: Ranks) -> None:
    before = [] if anew else [1]
    right = ([*before, 2, 3], 2, [*before, 2], [*before, 2, 3])
    assert on(ranks(2), step_cases.give_up_what_is_read, str(root), anew=anew) == [right] * 2


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.ENOMEM])
def test_what_the_disk_does_not_give_is_damage_and_what_the_process_lacks_is_not(code: int, root: Path, ranks: Ranks) -> None:
    first, second = on(ranks(2), step_cases.restore_from_a_bad_disk, str(root), code)
    assert "/step_00000003/" in first[1] and os.strerror(code) in first[1]
    is_damage = code != errno.ENOMEM
    assert (first[0], second[0]) == ("RankFailedError", "CorruptCheckpointError" if is_damage else "RankFailedError")
    for _, text, fell_back in (first, second):
        assert ("step_00000003 is damaged, and the step before it is step_00000002: restore(fall_back=True)" in text) == is_damage
        assert fell_back == ((2, [1, 2, 3]) if is_damage else None)
    if is_damage:
        told = json.loads((root / "history.jsonl").read_text().splitlines()[-2])
        assert (told["kind"], told["step"]) == ("restore", 2)
        assert os.strerror(code) in told["fell_back_from"]["3"]
        assert ("it was tried 4 times" in told["fell_back_from"]["3"]) == (code == errno.EIO)


def test_what_the_disk_gives_when_it_is_asked_again_costs_no_step(root: Path, ranks: Ranks) -> None:
    assert on(ranks(2), step_cases.restore_from_a_disk_that_stumbles, str(root), errno.EIO) == [(3, [1, 2, 3, 4])] * 2


def test_a_step_that_does_not_fit_is_no_damage(root: Path, ranks: Ranks) -> None:
    for kind, text, unchanged in on(
        ranks(2), manager_runs.refuse, str(root), "restore", fall_back=True, lr_scheduler=[], parts=["nonsense"]
    ):
        assert kind == "CheckpointError"
        assert "nonsense" in text
        assert unchanged


def test_one_step_can_be_chosen(root: Path, ranks: Ranks) -> None:
    assert [step for step, _ in on(ranks(2), manager_runs.restore_only, str(root), step=2)] == [2, 2]
    for kind, text, _ in on(ranks(2), manager_runs.refuse, str(root), "restore", step=7):
        assert kind == "IncompleteCheckpointError"
        assert "has no step_00000007; it has step_00000001, step_00000002, step_00000003" in text


def test_a_used_root_needs_a_choice(root: Path, ranks: Ranks) -> None:
    for kind, text, _ in on(ranks(2), manager_runs.refuse, str(root), "save", step=4):
        assert kind == "TargetExistsError"
        assert "of an earlier run; nothing was saved. Go on with restore()" in text
    assert on(ranks(2), step_cases.save_in_used_root, str(root), resume=True, step=4) == [[1, 2, 3, 4]] * 2


def test_a_new_run_can_overwrite_a_root(root: Path, ranks: Ranks) -> None:
    (root / "notes.txt").write_text("mine")
    for step, _ in on(ranks(2), manager_runs.restore_only, str(root), {"overwrite": True}):
        assert step is None
    assert (root / "step_00000003").exists()
    assert on(ranks(2), step_cases.save_in_used_root, str(root), resume=True, step=2, overwrite=True) == [[2]] * 2
    assert sorted(path.name for path in root.iterdir()) == ["history.jsonl", "notes.txt", "step_00000002"]


def test_steps_ascend(root: Path, ranks: Ranks) -> None:
    for kind, text, _ in on(ranks(2), manager_runs.refuse, str(root), "save", {"overwrite": True}, step=-1):
        assert (kind, "step is -1, and must be at least 0" in text) == ("CheckpointError", True)
    for error in errors_on(ranks(2), step_cases.save_in_used_root, str(root), resume=True, step=3):
        assert "step 3 is not later than step_00000003" in error.message
    assert on(ranks(2), step_cases.go_back, str(root), np.int64(1), np.int64(2), discard_later=True) == [([1], [1, 2])] * 2
    assert sorted(path.name for path in root.iterdir()) == ["history.jsonl", "step_00000001", "step_00000002"]


def test_going_back_discards_nothing_unasked(root: Path, ranks: Ranks) -> None:
    for next_step in (2, 9):
        for error in errors_on(ranks(2), step_cases.go_back, str(root), 1, next_step, discard_later=False):
            assert "went back to step_00000001" in error.message and "holds step_00000002, step_00000003 of the one before" in error.message
            assert "a run that goes back says restore(step=..., discard_later=True)" in error.message
    assert sorted(path.name for path in root.glob("step_*")) == ["step_00000001", "step_00000002", "step_00000003"]
    told, quiet = on(ranks(2), step_cases.warned_of_going_back, str(root))
    assert quiet == [[], [], []]
    assert told[1:] == [[], []]
    (text,) = told[0]
    assert "step_00000002, step_00000003" in text and "discard_later=True" in text and "another root" in text
    assert [step for step, _ in on(ranks(2), manager_runs.restore_only, str(root))] == [3, 3]


def test_the_best_and_the_newest_stay(tmp_path: Path, ranks: Ranks) -> None:
    from paddle_fsdp_ckpt import KeepBest, KeepEvery

    results = on(
        ranks(2), manager_runs.run, str(tmp_path / "root"), 0, 7, 1, max_to_keep=1, keep=[KeepBest("loss", mode="min"), KeepEvery(3)]
    )
    for losses, steps in results:
        assert steps == sorted({3, 6, 7, 1 + int(np.argmin(losses))})
    assert sorted(path.name for path in (tmp_path / "root").glob("step_*")) == [f"step_{step:08d}" for step in results[0][1]]
    # A later run knows the metrics of the steps that are there.
    losses, kept = results[0]
    later, steps = on(ranks(2), manager_runs.run, str(tmp_path / "root"), 7, 8, 1, keep=[KeepBest("loss", mode="max")])[0]
    worst = max([(losses[step - 1], step) for step in kept] + [(later[0], 8)])[1]
    assert steps == sorted({worst, 8})


def test_the_best_can_not_be_kept_without_its_metric(tmp_path: Path, ranks: Ranks) -> None:
    for text, steps in on(ranks(2), step_cases.keep_best, str(tmp_path / "root")):
        assert text.startswith("KeepBest compares steps by loss, and this save has no such metric; nothing was saved")
        assert steps == [3, 5]


def test_the_best_step_is_found_and_what_cannot_be_read_may_be_it(tmp_path: Path, ranks: Ranks) -> None:
    losses = [0.75, 0.5, float("nan"), 0.5, 2.0]
    for found, metrics, report, (missing, no_name, unreadable) in on(ranks(2), step_cases.find_the_best, str(tmp_path / "root"), losses):
        assert found == [None, 4, 1 + int(np.nanargmax(losses)), 4]
        assert metrics == {"loss": 0.5} and "- metrics: loss 0.5" in report
        assert "no step was saved with metrics={'accuracy': ...}; they were with loss" in missing
        assert "best_step: metric is ['loss']; give the name of a metric" in no_name
        assert "the metrics of step_00000002 can't be read, and one of them may be the best" in unreadable


def test_settings_that_changed_on_resume_are_warned_of(tmp_path: Path, ranks: Ranks) -> None:
    first, *others = on(ranks(2), trainer_state_cases.resume_otherwise, str(tmp_path / "root"))
    assert others == [[]]
    assert len(first) == 2
    assert "step_size was saved as 3 and is 4 now" in first[0]
    assert "base_lr was saved as 0.5 and is 0.25 now" in first[1]


def test_a_failed_removal_stops_nobody_and_is_tried_again(tmp_path: Path, ranks: Ranks) -> None:
    assert on(ranks(2), step_cases.fail_to_remove, str(tmp_path / "root")) == [([1, 2], [3])] * 2


def test_a_policy_that_fails_removes_nothing_and_stops_nobody(tmp_path: Path, ranks: Ranks) -> None:
    told, other = on(ranks(2), step_cases.save_with_a_policy_that_fails, str(tmp_path / "root"))
    kept = [[1], [1, 2], [3]]
    assert told == (kept, ["a policy of keep= failed, and nothing was removed; training goes on"])
    assert other == (kept, [])


def test_a_step_that_is_being_read_stays_until_after_the_next_save(tmp_path: Path, ranks: Ranks) -> None:
    for free, kept, later in on(ranks(2), step_cases.remove_while_read, str(tmp_path / "root")):
        assert free and not any(free)
        assert (kept, later) == ([1, 2], [3])


@pytest.mark.parametrize("async_save", [False, True])
def test_everything_is_restored(async_save: bool, tmp_path: Path, ranks: Ranks) -> None:
    saved = on(ranks(2), trainer_state_cases.save_everything, str(tmp_path / "root"), async_save=async_save)
    for world_size in (2, 3, 1):
        results = on(ranks(world_size), trainer_state_cases.restore_everything, str(tmp_path / "root"))
        for rank, (epoch, scale, extra, tensor, rank_states, _, differences) in enumerate(results):
            assert (epoch, scale, differences) == (3, 8.0, [])
            order, big = extra.pop("order"), extra.pop("big")
            assert (order.dtype, order.tolist()) == (np.uint32, [0, 1, 2, 3, 4])
            assert (type(big), big) == (np.float64, 2.5)
            assert extra == {"epoch": 3, "nested": [1.5, None, "x"], "@array": True}
            assert tensor == ("paddle.bfloat16", [1.0, 2.0])
            assert set(rank_states) == ({rank} if world_size == 2 else {0, 1})
            for saver, state in rank_states.items():
                assert (state["sample"], state["seen"].tolist()) == (100 * saver, [saver])
        for key in results[0][5]:
            flat = np.concatenate([pieces[key][1].reshape(-1) for *_, pieces, _ in results if key in pieces])
            right = np.concatenate([one[key].reshape(-1) for one in saved if key in one])
            np.testing.assert_array_equal(flat, right)


def test_a_step_of_the_first_manager_is_restored(tmp_path: Path, ranks: Ranks) -> None:
    """``v1_root`` is what ``save_everything`` of the cases saved on 2 ranks before anything could be given by name. It never changes."""
    root = shutil.copytree(Path(__file__).parent / "v1_root", tmp_path / "root")
    for rank, (epoch, scale, extra, tensor, rank_states, _, differences) in enumerate(
        on(ranks(2), trainer_state_cases.restore_everything, str(root))
    ):
        assert (epoch, scale, differences) == (3, 8.0, [])
        assert (extra["epoch"], extra["order"].tolist(), tensor) == (3, [0, 1, 2, 3, 4], ("paddle.bfloat16", [1.0, 2.0]))
        assert rank_states[rank]["sample"] == 100 * rank


def test_ranks_that_give_one_key_different_values_are_heard_of_at_the_save(tmp_path: Path, ranks: Ranks) -> None:
    for whole, overlap, alike in on(ranks(2), trainer_state_cases.save_conflicts, str(tmp_path / "root")):
        assert whole.startswith("sharded: ranks gave different values, or some none, under keys of which each has all: @paddle_fsdp_ckpt/")
        text = "different values for the same elements of 1 keys: '@paddle_fsdp_ckpt/sharded/expert' in 0_0.safetensors and 1_0.safetensors"
        assert text in overlap
        assert alike == "saved"
    assert [path.name for path in sorted((tmp_path / "root").iterdir())] == ["history.jsonl", "step_00000003"]


def test_parts_of_a_step_are_restored(tmp_path: Path, ranks: Ranks) -> None:
    right = [(2, True, False, ["model"]), (2, True, False, ["model"]), (2, False, True, ["optimizer"])]
    assert ranks(2).run(trainer_state_cases.restore_parts, str(tmp_path / "root")) == [right] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_are_digested_only_where_there_is_another_rank_to_compare_with(world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(world_size).run(trainer_state_cases.save_with_an_average, str(tmp_path / "root")) == [world_size > 1] * world_size


def test_random_numbers_go_on(tmp_path: Path, ranks: Ranks) -> None:
    for alike in (False, True):
        root = str(tmp_path / f"root {alike}")
        drawn = on(ranks(2), trainer_state_cases.save_and_draw, root, alike=alike)
        assert on(ranks(2), trainer_state_cases.restore_and_draw, root) == drawn
        three = on(ranks(3), trainer_state_cases.restore_and_draw, root)
        assert three[:2] == drawn
        assert on(ranks(3), trainer_state_cases.restore_and_draw, root) == three
        for numbers in zip(*three, strict=True):
            assert len(set(numbers)) == (1 if alike else 3)
        assert on(ranks(1), trainer_state_cases.restore_and_draw, root) == drawn[:1]


def test_the_visualdl_example(tmp_path: Path, ranks: Ranks) -> None:
    script = Path(paddle_fsdp_ckpt.__file__).parents[1] / "examples" / "visualdl_checkpoints.py"
    ranks(2).run(history_cases.run_example, str(script), str(tmp_path / "root"), str(tmp_path / "board"))
    # VisualDL takes no other names, and shows one file of a directory.
    (log,) = (tmp_path / "board").glob("*vdlrecords*")
    scalars = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step for tag, step, _ in scalars if tag == "checkpoints/save/seconds"] == [10, 20, 30]
    assert [step for tag, step, _ in scalars if tag == "checkpoints/restore/seconds"] == [20]
    losses = [value for tag, _, value in scalars if tag == "checkpoints/loss"]
    assert losses[0] > losses[-1] > 0


def test_history_and_hook(tmp_path: Path, ranks: Ranks) -> None:
    seen = on(ranks(2), history_cases.events_of, str(tmp_path / "root"))
    (first, logged), second = seen
    assert first == ["save 1", "save 2", "restore 2"]
    assert second == ([], []), "only rank 0 tells"
    one, two, failed, restored = logged
    took = r"0\.0 MB in \d+\.\d\d s \(\d+ MB/s\), training blocked for \d+\.\d\d s"
    assert re.fullmatch(f"saved step 1: {took}; kept 1 step", one)
    assert re.fullmatch(f"saved step 2: {took}; kept 1 step, removed step_00000001", two)
    assert failed == "on_event failed, and training goes on"
    assert re.fullmatch(r"restored step 2 in \d+\.\d\d s", restored)
    lines = [json.loads(line) for line in (tmp_path / "root" / "history.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"], line["removed"], line["steps"]) for line in lines] == [
        ("save", 1, [], [1]),
        ("save", 2, [1], [2]),
        ("restore", 2, [], [2]),
    ]
    assert lines[1]["nbytes"] == sum(path.stat().st_size for path in (tmp_path / "root" / "step_00000002").glob("*.safetensors"))
    assert lines[1]["metrics"] == {"loss": 0.5}
