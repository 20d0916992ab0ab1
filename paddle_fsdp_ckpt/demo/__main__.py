"""Run the demo: start its jobs one after the other, print what they gave, and judge it.

Exit status: 0 where every resume kept its promise, 1 where one did not, 2 where a job failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from . import launch
from .job import Event, Job
from .progress import Progress
from .report import Outcome, compare, table
from .text import open_batches

_RANKS = 2
_RESUME_RANKS = (2, 1, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    options = _parse(arguments)
    with ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paddle_fsdp_ckpt_demo_")))
        try:
            return _run(options, directory)
        except launch.JobFailedError as error:
            print(f"\n{error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
            return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m paddle_fsdp_ckpt.demo",
        description="Train a small decoder on 2 ranks, save in the middle, resume in fresh processes on 2, 1 and 3 ranks, and compare.",
    )
    parser.add_argument("--steps", type=int, default=24, help="steps to train (default: %(default)s)")
    parser.add_argument("--save-at", type=int, help="step after which to save (default: half of the steps)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this file (default: the help topics of Python)")
    parser.add_argument("--moe", action="store_true", help="a mixture of experts instead of a dense model")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the checkpoint and all logs in this new directory")
    options = parser.parse_args(arguments)
    options.save_at = options.steps // 2 if options.save_at is None else options.save_at
    if not 1 <= options.save_at < options.steps:
        parser.error(f"can't save after step {options.save_at} of {options.steps}: at least one step must come before and one after")
    if options.keep is not None and options.keep.exists():
        parser.error(f"{options.keep} is there already")
    if importlib.util.find_spec("paddle") is None:
        parser.error("the demo trains, and so needs Paddle: pip install 'paddle_fsdp_ckpt[cpu]'")
    try:
        open_batches(options.text)
    except (OSError, ValueError) as error:
        parser.error(f"can't train on this text: {error}")
    return options


def _run(options: argparse.Namespace, directory: Path) -> int:
    began = time.monotonic()
    kind = "mixture of experts" if options.moe else "dense decoder"
    print(f"Training a small {kind} on {options.text or 'the help topics of Python'}, in fresh processes for each line:")
    reference, *resumed = [_run_job(job) for job in _jobs(options, directory)]
    comparisons = [compare(reference, outcome) for outcome in resumed]

    print()
    for line in table([reference, *resumed]):
        print(line)
    print()
    size = sum(path.stat().st_size for path in Path(reference.job.save_to or "").iterdir())
    print(
        f"{reference.job.ranks} trained {options.steps} steps ({reference.parameter_count / 1e6:.2f} million parameters, AdamW) and saved "
        f"after step {options.save_at}: {size / 1e6:.1f} MB in {reference.seconds['saved']:.2f} s."
    )
    print("Fresh processes with other initial weights loaded that and trained on from there:")
    for outcome, comparison in zip(resumed, comparisons, strict=True):
        print(f"- {comparison} Loading took {outcome.seconds['loaded']:.2f} s.")
    good = all(comparison.good for comparison in comparisons)
    print(f"{'All as promised' if good else 'NOT as promised'}, in {time.monotonic() - began:.0f} s.")
    if options.keep is not None:
        print(f"The checkpoint is in {reference.job.save_to}; logs and final states lie beside it.")
    return 0 if good else 1


def _jobs(options: argparse.Namespace, directory: Path) -> Iterator[Job]:
    common = {"steps": options.steps, "text": str(options.text) if options.text else None, "moe": options.moe}
    checkpoint = str(directory / "checkpoint")
    yield Job("uninterrupted", str(directory / "uninterrupted"), _RANKS, seed=1, save_to=checkpoint, save_at=options.save_at, **common)
    for number, ranks in enumerate(_RESUME_RANKS):
        # Other initial weights: what the checkpoint doesn't bring back can't be right by chance.
        yield Job(f"resumed on {ranks}", str(directory / f"resumed_on_{ranks}"), ranks, seed=2 + number, load_from=checkpoint, **common)


def _run_job(job: Job) -> Outcome:
    outcome, progress = Outcome(job), Progress(job)

    def on_event(event: Event) -> None:
        outcome.add(event)
        progress.add(event)

    launch.run(job, on_event)
    outcome.read_state()
    progress.end(f"{len(outcome.losses)} steps on {job.ranks}, last loss {outcome.losses[job.steps]:.4f}")
    return outcome


if __name__ == "__main__":
    # Ending by SIGTERM unwinds like any other exit, so that the ranks are stopped and the temporary directory goes.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
