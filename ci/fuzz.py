"""Feeds the readers of checkpoints with files that a fuzzer makes, guided by what their code does with them (atheris, libFuzzer).

``python ci/fuzz.py header --seconds 60`` for one kind of file, or ``bash ci/fuzz.sh`` for all. Whatever a file holds, a reader returns or
raises a CheckpointError, within seconds and some hundred MB: anything else ends the run with status 1 and leaves the file in ``crash-...``.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["paddle_fsdp_ckpt"]):
    from paddle_fsdp_ckpt.errors import CheckpointError
    from paddle_fsdp_ckpt.pieces import Piece
    from paddle_fsdp_ckpt.storage.digests import Digester
    from paddle_fsdp_ckpt.storage.format import DTYPE_NBYTES, MANIFEST_NAME, PADDLE_METADATA_NAME, rank_file_name
    from paddle_fsdp_ckpt.storage.header import LENGTH_NBYTES
    from paddle_fsdp_ckpt.storage.index import read_manifest
    from paddle_fsdp_ckpt.storage.manifest import seal
    from paddle_fsdp_ckpt.storage.pickles import read_arrays
    from paddle_fsdp_ckpt.storage.plan import plan_read
    from paddle_fsdp_ckpt.storage.reader import check_duplicates, execute_read
    from paddle_fsdp_ckpt.storage.salvage import salvage
    from paddle_fsdp_ckpt.storage.stock import open_index
    from paddle_fsdp_ckpt.storage.verify import verify

TESTS = Path(__file__).resolve().parents[1] / "tests"
GOOD = TESTS / "golden" / "v1_ours"
LONGEST_SECONDS = 10
MOST_MEMORY_MIB = 1024
LONGEST_NBYTES = 8192


def read_everything(path: Path) -> None:
    """Read all values that a directory says it has, once they are not more than a few MiB."""
    index = open_index(path)
    shapes = {key: index.global_shape(key) for key in index.stored}
    pieces = [Piece(key, index.dtypes[key], shape, (0,) * len(shape), shape) for key, shape in shapes.items()]
    plan = plan_read(index, pieces, shapes)
    plan.problems.raise_if_any()
    check_duplicates(plan)
    sizes = [target.numel * DTYPE_NBYTES[target.dtype] for target in plan.targets]
    if sum(sizes) < 16 << 20:
        execute_read(plan, [memoryview(bytearray(size)) for size in sizes])


def read_in_all_ways(path: Path, data: bytes) -> None:
    """Let the readers look at a directory, whatever the others said; verify and salvage, which start threads, at one of eight."""
    readers: list[Callable[[Path], object]] = [read_everything]
    if zlib.crc32(data) % 8 == 0:
        readers += [lambda one: verify(one, workers=1), salvage]
    for read in readers:
        with suppress(CheckpointError):
            read(path)


def read_header(data: bytes, path: Path) -> None:
    """Take the data for a rank's file whose manifest has fitting digests, as someone would make it who means to deceive."""
    name = rank_file_name(0)
    (path / name).write_bytes(data)
    header = min(len(data), LENGTH_NBYTES + int.from_bytes(data[:LENGTH_NBYTES], "little"))
    digester = Digester(header)
    digester.update(memoryview(data))
    manifest = read_manifest(GOOD)
    changed = replace(manifest.files[0], size=len(data), digests=digester.finish() if data else "", header_nbytes=header)
    with suppress(CheckpointError, ValueError):  # a manifest that can't be written
        (path / MANIFEST_NAME).write_text(replace(manifest, files=(changed, *manifest.files[1:])).to_json())
        read_in_all_ways(path, data)


def read_manifest_of(data: bytes, path: Path) -> None:
    """Take the data for a manifest, whose own digest is made to fit where it is that of an object."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(data)
        if isinstance(fields, dict):
            data = seal({key: value for key, value in fields.items() if key != "digest"}).encode()
    (path / MANIFEST_NAME).write_bytes(data)
    read_in_all_ways(path, data)


def read_metadata_of(data: bytes, path: Path) -> None:
    """Take the data for the pickled metadata of a directory that stock Paddle saved."""
    (path / MANIFEST_NAME).unlink(missing_ok=True)
    (path / PADDLE_METADATA_NAME).write_bytes(data)
    read_in_all_ways(path, data)


def read_pickle(data: bytes, _: Path) -> None:
    """Take the data for pickled arrays, as stock Paddle saves them."""
    with suppress(CheckpointError):
        read_arrays(io.BytesIO(data), len(data), "it")


def nasty(suffix: str) -> list[bytes]:
    """Return the files that the tests keep."""
    return [one.read_bytes() for one in sorted((TESTS / "storage" / "nasty").glob(f"*{suffix}"))]


KINDS: dict[str, tuple[Callable[[bytes, Path], None], Callable[[], list[bytes]]]] = {
    "header": (read_header, lambda: [(GOOD / rank_file_name(0)).read_bytes(), *nasty(".safetensors")]),
    "manifest": (read_manifest_of, lambda: [(GOOD / MANIFEST_NAME).read_bytes(), *nasty(".json")]),
    "metadata": (read_metadata_of, lambda: [(GOOD / PADDLE_METADATA_NAME).read_bytes()]),
    "pickle": (read_pickle, lambda: [pickle.dumps({"w": np.arange(6, dtype="f4"), "x": {"y": (1, 2)}}, protocol=4)]),
}
"""What is read, and what the fuzzer begins with."""


def main() -> None:
    """Fuzz one kind of file; the process ends with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    read, seeds = KINDS[arguments.kind]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    shutil.copytree(GOOD, folder / "step")
    (folder / "seeds").mkdir()
    for number, seed in enumerate(seeds()):
        if len(seed) <= LONGEST_NBYTES:
            (folder / "seeds" / str(number)).write_bytes(seed)
    limits = [f"-max_total_time={arguments.seconds}", f"-timeout={LONGEST_SECONDS}", f"-rss_limit_mb={MOST_MEMORY_MIB}"]
    limits += [f"-max_len={LONGEST_NBYTES}", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, str(folder / "seeds")], lambda data: read(data, folder / "step"))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
