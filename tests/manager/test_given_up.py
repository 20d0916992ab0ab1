"""A restore of a step that was given up says what gave it up, and what it says can be done can be."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import given_up_cases
import manager_runs
import pytest
import step_cases
from harness import RankPool

from paddle_fsdp_ckpt.errors import IncompleteCheckpointError
from paddle_fsdp_ckpt.export.roots import entries_of
from paddle_fsdp_ckpt.manager.run_steps import RunSteps
from paddle_fsdp_ckpt.manager.steps import Root, SavedStep

Ranks = Callable[[int], RankPool]

WHERE = Path("root")
BY_2 = "step_00000002 was saved by a run that went back, or began anew, without it"
BY_4 = BY_2.replace("2 was", "4 was")


def test_one_that_is_still_there(root: Path, ranks: Ranks) -> None:
    results = ranks(2).run(given_up_cases.go_back_to_1_and_save_2, str(root), True)
    assert results[0] == results[1]
    before, after, later = results[0]
    assert before == (
        f"step_00000003 in '{root}' was given up: this run went back to step_00000001 with discard_later=True, and its next save "
        f"removes it. Until then a new CheckpointManager restores it; '{root}' has step_00000001"
    )
    assert after == later
    assert later == (
        f"step_00000003 in '{root}' was given up: {BY_2}, and the next save here removes it. To go on from it after all, move it to a root "
        "of its own, and restore it there: "
        f"mv '{root / 'step_00000003'}' NEW_ROOT/; '{root}' has step_00000001, step_00000002"
    )
    assert entries_of(root).given_up() == {"step_00000003": "step_00000002"}
    command = re.search("mv '.*?' NEW_ROOT/", later)
    assert command is not None
    (root.parent / "new").mkdir()
    shutil.move(shlex.split(command[0])[1], root.parent / "new")
    assert [step for step, _ in ranks(2).run(manager_runs.call, manager_runs.restore_only, (str(root.parent / "new"),), {"step": 3})] == [
        3,
        3,
    ]


def test_one_in_a_copy_without_the_times_of_files(root: Path, ranks: Ranks) -> None:
    """It is known there too; one that was saved anew since is another, in a copy as well."""
    ranks(2).run(given_up_cases.go_back_to_1_and_save_2, str(root), True)
    copies = [root.parent / name for name in ("copy", "second")]
    shutil.copytree(root, copies[0], copy_function=shutil.copyfile)
    (step, steps_then, warned), _ = ranks(2).run(manager_runs.call, step_cases.restore_and_save, (str(copies[0]), 3), {})
    assert (step, steps_then) == (2, [1, 2, 3])
    assert len(warned) == 1 and f"'{copies[0]}' holds step_00000003 of a history that was given up" in warned[0]
    shutil.copytree(copies[0], copies[1], copy_function=shutil.copyfile)
    restored = ranks(2).run(manager_runs.call, manager_runs.restore_only, (str(copies[1]),), {})
    assert [step for step, _ in restored] == [3, 3]


def test_one_that_is_gone(root: Path, ranks: Ranks) -> None:
    results = ranks(2).run(given_up_cases.go_back_to_1_and_save_2, str(root), False)
    assert results[0] == results[1]
    _, after, later = results[0]
    assert after == later
    assert later == f"'{root}' has no step_00000003 any more, which was given up: {BY_2}; it has step_00000001, step_00000002"


def test_one_of_the_run_before(root: Path, ranks: Ranks) -> None:
    right = (
        f"step_00000003 in '{root}' was given up: this manager was made with overwrite=True, so that its run begins anew, and its first "
        f"save removes it. Until then a CheckpointManager without overwrite restores it; '{root}' has no steps"
    )
    assert ranks(2).run(given_up_cases.begin_anew, str(root)) == [right] * 2
    assert [step for step, _ in ranks(2).run(manager_runs.call, manager_runs.restore_only, (str(root),), {"step": 3})] == [3, 3]


def test_a_damaged_one(root: Path, ranks: Ranks) -> None:
    (root / "step_00000003" / "0_0.safetensors").unlink()
    for text in ranks(2).run(given_up_cases.fall_back, str(root)):
        assert text == (
            f"step_00000003 in '{root}' was given up: it is damaged, this run fell back from it to step_00000002, and its next save "
            f"removes it. What is wrong with it says: paddle-fsdp-ckpt verify '{root / 'step_00000003'}'; "
            f"'{root}' has step_00000001, step_00000002"
        )


def steps(*there: SavedStep, lost: tuple[int, ...] = (), skipped: tuple[str, ...] = ()) -> RunSteps:
    return RunSteps(WHERE, Root(there, dict.fromkeys(skipped, "it has no manifest.json")), lost, overwrite=False)


@pytest.mark.parametrize(
    ("run", "wanted", "text"),
    [
        # Never given up.
        (steps(), 3, "'root' has no step_00000003; it has no steps"),
        (steps(SavedStep(1, written=1)), 3, "'root' has no step_00000003; it has step_00000001"),
        # Given up, then saved anew, as the run came that far again, and removed.
        (
            steps(SavedStep(2, written=5, discarded={3: 3}), SavedStep(4, written=6)),
            3,
            "'root' has no step_00000003; it has step_00000002, step_00000004",
        ),
        # It goes on from there with another distance between its saves: it can't have come to 3 again.
        (
            steps(SavedStep(4, written=5, discarded={2: 2, 3: 3}), SavedStep(6, written=6)),
            3,
            f"'root' has no step_00000003 any more, which was given up: {BY_4}; it has step_00000004, step_00000006",
        ),
        # Of several, the last.
        (
            steps(SavedStep(1, written=5, discarded={3: 3}), SavedStep(2, written=6, discarded={3: 4})),
            3,
            f"'root' has no step_00000003 any more, which was given up: {BY_2}; it has step_00000001, step_00000002",
        ),
        # What is damaged so that it is no checkpoint can't be moved elsewhere to be restored.
        (
            steps(SavedStep(2, written=5, discarded={3: 0}), lost=(3,), skipped=("step_00000003",)),
            3,
            f"step_00000003 in 'root' was given up: {BY_2}, and the next save here removes it; 'root' has step_00000002",
        ),
    ],
)
def test_what_is_said(run: RunSteps, wanted: int, text: str) -> None:
    with pytest.raises(IncompleteCheckpointError) as caught:
        run.check_can_be_restored(wanted)
    assert str(caught.value) == text


def test_steps_that_were_saved_anew_or_not_given_up_can_be_restored() -> None:
    run = steps(SavedStep(2, written=5, discarded={3: 3}), SavedStep(3, written=6), lost=(4,), skipped=("step_00000004",))
    for step in (2, 3, 4):
        run.check_can_be_restored(step)
