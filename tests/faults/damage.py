"""Damages a good checkpoint in every way that a disk, a network or a person could, and looks who notices."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from paddle_fsdp_ckpt.errors import CheckpointError
from paddle_fsdp_ckpt.storage.format import DTYPE_NBYTES, MANIFEST_NAME, PADDLE_METADATA_NAME
from paddle_fsdp_ckpt.storage.plan import plan_read
from paddle_fsdp_ckpt.storage.reader import check_duplicates, execute_read, verify_first
from paddle_fsdp_ckpt.storage.stock import open_index
from paddle_fsdp_ckpt.storage.verify import verify

Damage = Iterator[tuple[str, Path]]
"""Yields, after doing it, what was done and to which file; and undoes it when asked for the next one."""


def load_all(path: Path) -> None:
    """Load every value of a checkpoint, after checking all that is read; raise where something is wrong, before anything is loaded."""
    index = open_index(path)
    plan = plan_read(index, [index.whole_piece(key) for key in index.stored], index.stored)
    plan.problems.raise_if_any()
    check_duplicates(plan)
    verify_first(plan)
    destinations = [np.zeros(target.numel * DTYPE_NBYTES[target.dtype], np.uint8) for target in plan.targets]
    execute_read(plan, [values.data for values in destinations])


def error_of_load(path: Path) -> str | None:
    try:
        load_all(path)
    except CheckpointError as error:
        return str(error)
    return None


def check_everybody_notices(path: Path, damage: Damage) -> int:
    """Let ``verify`` and a load look at each damage; both must name the file. Return how many there were."""
    count = 0
    for what, file in damage:
        count += 1
        findings = verify(path, workers=1).findings
        assert findings, f"verify missed: {what}"
        assert any(file.name in str(finding) for finding in findings), f"verify doesn't name {file.name}: {what}: {findings}"
        said = error_of_load(path)
        if said is None:
            # Nothing of ours reads what is there for stock Paddle.
            assert file.name == PADDLE_METADATA_NAME, f"load missed: {what}"
        else:
            assert file.name in said or MANIFEST_NAME in said, f"load doesn't name {file.name}: {what}: {said}"
    assert verify(path).is_good
    load_all(path)
    return count


def flip_bits(path: Path, count: int, seed: int) -> Damage:
    """Flip one bit at a random position of all files together; every file gets its share, and at least one in ten."""
    choose = random.Random(seed)
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    for number in range(count):
        file = files[number // 10 % len(files)] if number % 10 == 0 else choose.choices(files, sizes)[0]
        position, bit = choose.randrange(file.stat().st_size), choose.randrange(8)
        with _restored(file) as content:
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            file.write_bytes(changed)
            yield f"bit {bit} of byte {position} of {file.name} flipped", file


def truncate(path: Path, count: int, seed: int) -> Damage:
    """Cut a random file to a random length, the shortest and longest lengths among them."""
    choose = random.Random(seed)
    for number in range(count):
        file = choose.choice(sorted(path.iterdir()))
        size = file.stat().st_size
        length = [0, 1, 8, size - 1][number] if number < 4 else choose.randrange(size)
        with _restored(file):
            os.truncate(file, length)
            yield f"{file.name} cut to {length} of {size} bytes", file


def append(path: Path) -> Damage:
    """Add a byte to each file."""
    for file in sorted(path.iterdir()):
        with _restored(file) as content:
            file.write_bytes(content + b"\0")
            yield f"a byte added to {file.name}", file


def swap_files(path: Path) -> Damage:
    """Let each two ranks' files change places."""
    files = sorted(path.glob("*_0.safetensors"))
    for i, one in enumerate(files):
        for other in files[i + 1 :]:
            with _restored(one) as content, _restored(other) as other_content:
                one.write_bytes(other_content)
                other.write_bytes(content)
                yield f"{one.name} and {other.name} swapped", one


def remove(path: Path) -> Damage:
    """Remove each file."""
    for file in sorted(path.iterdir()):
        with _restored(file):
            file.unlink()
            yield f"{file.name} missing", file


def edit_manifest(path: Path) -> Damage:
    """Change each field of the manifest, as an editor would, without its digest."""
    file = path / MANIFEST_NAME
    fields = json.loads(file.read_text())
    edits = {"step": 8, "world_size": 1, "created": "2020-01-01T00:00:00+00:00", "versions": {}, "optimizers": [], "extra_state": 5}
    edits |= {"tied": [["a", "b"]], "files": fields["files"][::-1], "format_version": 2, "digest": "0" * 16, "paddle_metadata": None}
    assert edits.keys() == fields.keys()
    for name, value in edits.items():
        with _restored(file):
            file.write_text(json.dumps(fields | {name: value}, indent=1) + "\n")
            yield f"{name} edited", file


@contextmanager
def _restored(file: Path) -> Iterator[bytes]:
    content = file.read_bytes()
    try:
        yield content
    finally:
        file.write_bytes(content)
