"""The recipe of docs/data_loading.md as it stands: a run that was stopped goes on with the samples of the uninterrupted one."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from harness import run_script

from paddle_fsdp_ckpt.cli.main import main

TEXT = Path(__file__).resolve().parents[2] / "docs" / "data_loading.md"
LAST_STEP = 24  # 3 epochs of 8 global batches of 12 of 100 samples

Seen = list[dict[int, list[int]]]
"""For each rank the samples of each step."""


def run_recipe(directory: Path, ranks: int, stopped_at: int | None = None) -> Seen:
    """Run it; where it is to be stopped, with a signal on rank 0 in that step."""
    marked = re.search(r"<!-- tests/manager runs this -->\n```python\n(.*?)```", TEXT.read_text(), re.DOTALL)
    assert marked is not None
    stop = (
        f"step += 1\n            if step == {stopped_at} and dist.get_rank() == 0:\n                signal.raise_signal(signal.SIGTERM)\n"
    )
    assert marked[1].count("step += 1\n") == 1
    (directory / "train.py").write_text(marked[1] if stopped_at is None else marked[1].replace("step += 1\n", stop))
    shutil.rmtree(directory / "log", ignore_errors=True)
    run_script(directory, ["-m", "paddle.distributed.launch", "--nproc_per_node", str(ranks), "train.py"])
    logs = [(directory / "log" / f"workerlog.{rank}").read_text() for rank in range(ranks)]
    return [{int(step): [*map(int, seen.split())] for step, seen in re.findall(r"step (\d+) samples ([\d ]+)", log)} for log in logs]


def together(seen: Seen) -> dict[int, list[int]]:
    """The samples of each step, of all ranks."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for one in seen:
        for step, samples in one.items():
            found[step] += samples
    return {step: sorted(samples) for step, samples in found.items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    return directory, run_recipe(directory, 2)


def test_each_epoch_is_shuffled_anew_and_has_a_sample_once(uninterrupted: tuple[Path, Seen]) -> None:
    _, seen = uninterrupted
    assert [[len(samples) for samples in one.values()] for one in seen] == [[6] * LAST_STEP] * 2
    steps = together(seen)
    assert [*steps] == [*range(1, LAST_STEP + 1)]
    epochs = [[steps[step] for step in range(first, first + 8)] for first in (1, 9, 17)]
    for batches in epochs:
        samples = [sample for batch in batches for sample in batch]
        assert len({*samples}) == len(samples) == 96
    assert len({str(batches) for batches in epochs}) == 3


@pytest.mark.parametrize(("step", "worlds"), [(8, [1]), (13, [2, 3])])  # an epoch's last one, and in the middle
def test_a_run_that_was_stopped_sees_the_samples_of_the_uninterrupted_one(
    step: int, worlds: list[int], uninterrupted: tuple[Path, Seen], tmp_path: Path
) -> None:
    first, right = uninterrupted
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    assert run_recipe(stopped, 2, stopped_at=step) == [{number: one[number] for number in range(1, step + 1)} for one in right]
    for ranks in worlds:
        resumed = tmp_path / f"on {ranks}"
        resumed.mkdir()
        shutil.copytree(stopped / "checkpoints", resumed / "checkpoints")
        seen = run_recipe(resumed, ranks)
        assert together(seen) == {number: samples for number, samples in together(right).items() if number > step}
        if ranks == 2:
            assert seen == [{number: one[number] for number in range(step + 1, LAST_STEP + 1)} for one in right]
            last = f"checkpoints/step_{LAST_STEP:08}"
            assert main(["diff", str(first / last), str(resumed / last)]) == 0
