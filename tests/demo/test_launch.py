"""Ranks as processes: followed while they run, shown when they fail, and never left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_fsdp_ckpt.demo import launch
from paddle_fsdp_ckpt.demo.job import Event, EventReader, Job

# Stands in for the worker: leaves its process id and environment, then does what the job's title says.
_STAND_IN = """
import json, os, pathlib, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
directory = pathlib.Path(job["directory"])
rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
(directory / f"pid{rank}").write_text(str(os.getpid()))
(directory / f"environment{rank}").write_text(json.dumps(dict(os.environ)))
if job["title"] == "fails" and rank == 1:
    while not (directory / "environment0").exists():
        time.sleep(0.01)
    sys.exit("out of luck")
if job["title"] == "passes it on":
    if rank == 0:
        sys.exit("rank 1 failed")
    while not (directory / "environment0").exists():
        time.sleep(0.01)
    try:
        while True:
            os.kill(int((directory / "pid0").read_text()), 0)
            time.sleep(0.01)
    except ProcessLookupError:  # whoever started both has seen it end
        sys.exit("out of luck")
if job["title"] in ("fails", "hangs"):
    print("waiting for nothing", flush=True)
    time.sleep(600)
if rank == 0:
    with (directory / "events.jsonl").open("w") as events:
        for step in range(1, job["steps"] + 1):
            print(json.dumps({"kind": "step", "step": step}), file=events, flush=True)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    script = tmp_path / "stand_in.py"
    script.write_text(_STAND_IN)
    monkeypatch.setattr(launch, "_WORKER", [sys.executable, str(script)])
    return Job("works", str(tmp_path / "job"), world_size=2, steps=3, text=None, moe=False, seed=0)


def _running(job: Job) -> list[int]:
    """Return the job's ranks whose processes are still there."""
    ranks = []
    for rank in range(job.world_size):
        try:
            os.kill(int(Path(job.directory, f"pid{rank}").read_text()), 0)
        except (ProcessLookupError, FileNotFoundError):
            continue
        ranks.append(rank)
    return ranks


def _environment(job: Job, rank: int) -> dict[str, str]:
    environment: dict[str, str] = json.loads(Path(job.directory, f"environment{rank}").read_text())
    return environment


def test_events_arrive_in_order_and_all_of_them(job: Job) -> None:
    events: list[Event] = []
    launch.run(job, events.append)
    assert events == [{"kind": "step", "step": step} for step in (1, 2, 3)]
    assert _running(job) == []


def test_ranks_get_the_environment_of_a_paddle_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_MASTER", "elsewhere:1")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    launch.run(job, lambda event: None)
    first, second = (_environment(job, rank) for rank in range(2))
    assert (first["PADDLE_TRAINER_ID"], second["PADDLE_TRAINER_ID"]) == ("0", "1")
    assert first["PADDLE_MASTER"] == second["PADDLE_MASTER"] != "elsewhere:1"
    assert first["PADDLE_TRAINER_ENDPOINTS"].split(",") == [first["PADDLE_CURRENT_ENDPOINT"], second["PADDLE_CURRENT_ENDPOINT"]]
    assert "MASTER_ADDR" not in first


def test_a_single_rank_is_no_paddle_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "8")
    alone = dataclasses.replace(job, world_size=1)
    launch.run(alone, lambda event: None)
    assert not [name for name in _environment(alone, 0) if name.startswith("PADDLE_")]


def test_a_failing_rank_ends_the_others_and_its_log_is_shown(job: Job) -> None:
    failing = dataclasses.replace(job, title="fails")
    with pytest.raises(launch.JobFailedError, match=r"fails: rank 1 ended with status 1:\n  \| out of luck"):
        launch.run(failing, lambda event: None)
    assert _running(failing) == []


def test_of_several_that_fail_all_logs_are_shown(job: Job) -> None:
    failing = dataclasses.replace(job, title="passes it on")
    with pytest.raises(launch.JobFailedError, match=r"(?s)rank 0 ended with status 1:\n  \| rank 1 failed\n.*rank 1 ended.*out of luck"):
        launch.run(failing, lambda event: None)


def test_silence_is_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_SILENCE_SECONDS", 1.0)
    hanging = dataclasses.replace(job, title="hangs")
    with pytest.raises(launch.JobFailedError, match=r"(?s)hangs: nothing happened for 1 s.*waiting for nothing"):
        launch.run(hanging, lambda event: None)
    assert _running(hanging) == []


def test_whatever_ends_the_caller_ends_the_ranks(job: Job) -> None:
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.run(job, interrupt)
    assert _running(job) == []


def test_a_worker_ends_when_its_parent_is_gone() -> None:
    code = "import time; from paddle_fsdp_ckpt.demo import worker; worker.end_with_parent(); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(20) == 1


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "events"
    reader = EventReader(path)
    assert reader.new() == []
    with path.open("w") as file:
        file.write('{"kind": "started"}\n{"kind":')
        file.flush()
        assert reader.new() == [{"kind": "started"}]
        assert reader.new() == []
        file.write(' "saved"}\n')
        file.flush()
        assert reader.new() == [{"kind": "saved"}]
    reader.close()
