"""The long run of the fault injection: many more faults than the tests inject, and those for which file systems must be mounted.

``bash ci/faults.sh`` runs it; by hand ``PYTHONPATH=.:tests python tests/faults/long_run.py``.
Exit status: 0 where every fault was met rightly, 1 where one was not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import damage
from harness import RankPool
from processes import Ranks, step_at
from test_crashes import kill_at_random_moments

TMPFS_NBYTES = 2 << 20


def damage_a_checkpoint(folder: Path, counts: argparse.Namespace) -> str:
    # Each forked rank imports this file, and so would import Paddle.
    from training_cases import save_trained

    path = folder / "step"
    with RankPool(2) as pool:
        pool.run(save_trained, str(path))
    seed = int(time.time()) if counts.seed is None else counts.seed
    kinds = [damage.flip_bits(path, counts.flips, seed), damage.truncate(path, counts.truncations, seed)]
    kinds += [kind(path) for kind in (damage.append, damage.swap_files, damage.remove, damage.edit_manifest)]
    return f"{sum(damage.check_everybody_notices(path, kind) for kind in kinds)} damages were found and named (seed {seed})"


def kill_ranks(folder: Path, counts: argparse.Namespace) -> str:
    ended = kill_at_random_moments(folder, counts.kills)
    return f"{counts.kills} saves: {', '.join(f'{number} {how}' for how, number in sorted(ended.items()))}"


def fill_the_disk(folder: Path, counts: argparse.Namespace) -> str:
    elements = TMPFS_NBYTES // 4
    with mounted(folder / "small") as root:
        target = root / "step"
        assert Ranks(folder / "first", target, 2, step=1).results() == ["saved"] * 2
        refused = Ranks(folder / "refused", target, 2, step=2, elements=elements, overwrite=True, nbytes=2 * elements).results()
        assert all("not enough room" in result for result in refused), refused
        full = Ranks(folder / "full", target, 2, step=2, elements=elements, overwrite=True).results()
        assert all("RankFailedError" in result and "No space left on device" in result for result in full), full
        assert step_at(target) == 1
        assert [path.name for path in root.iterdir()] == ["step"]
        assert Ranks(folder / "again", target, 2, step=3, overwrite=True).results() == ["saved"] * 2
    return "a full tmpfs: refused beforehand where the size was told, the same error on all ranks where it was not"


def write_to_a_read_only_disk(folder: Path, counts: argparse.Namespace) -> str:
    with mounted(folder / "small") as root:
        target = root / "step"
        assert Ranks(folder / "first", target, 2, step=1).results() == ["saved"] * 2
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        results = Ranks(folder / "refused", target, 2, step=2, overwrite=True).results()
        assert all("Read-only file system" in result and "mount it for writing" in result for result in results), results
        assert step_at(target) == 1
    return "a read-only file system: the same error on all ranks"


@contextmanager
def mounted(root: Path) -> Iterator[Path]:
    """Mount a small file system at ``root``; only root can."""
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS_NBYTES}", "tmpfs", str(root)], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", str(root)], check=True)


RUNS: list[Callable[[Path, argparse.Namespace], str]] = [damage_a_checkpoint, kill_ranks]
RUNS_AS_ROOT: list[Callable[[Path, argparse.Namespace], str]] = [fill_the_disk, write_to_a_read_only_disk]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--truncations", type=int, default=100)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int)
    counts = parser.parse_args()
    is_root = os.geteuid() == 0
    failed = 0
    for run in [*RUNS, *(RUNS_AS_ROOT if is_root else [])]:
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        start = time.monotonic()
        try:
            print(f"{run.__name__}: {run(folder, counts)}, in {time.monotonic() - start:.0f} s", flush=True)
        except Exception:  # noqa: BLE001 - the other runs go on
            failed += 1
            print(f"{run.__name__}: FAILED\n{traceback.format_exc()}", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if not is_root:
        print(f"not run, since only root can mount file systems: {', '.join(run.__name__ for run in RUNS_AS_ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
