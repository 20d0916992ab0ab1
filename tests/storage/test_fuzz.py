"""Promise 9: whatever a file holds, reading it raises a CheckpointError or returns what can be used; in bounded time and memory."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cut, edit_manifest, make_manifest, reseal, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddle_fsdp_ckpt import errors
from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.errors import CheckpointError
from paddle_fsdp_ckpt.storage.digests import Digester
from paddle_fsdp_ckpt.storage.format import DTYPE_NBYTES, MANIFEST_NAME
from paddle_fsdp_ckpt.storage.header import LENGTH_NBYTES, decode_header, encode_header
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.manifest import FileRecord, Manifest
from paddle_fsdp_ckpt.storage.plan import plan_read
from paddle_fsdp_ckpt.storage.reader import check_duplicates, execute_read, verify_first
from paddle_fsdp_ckpt.storage.salvage import salvage
from paddle_fsdp_ckpt.storage.verify import verify

NASTY = sorted((Path(__file__).parent / "nasty").iterdir())
"""Named after what is wrong with them, and the error that says so."""

SECONDS = 5.0
MORE_MEMORY_NBYTES = 256 << 20
WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(autouse=True)
def bounded() -> Any:
    """Each test's memory may grow by so much."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MORE_MEMORY_NBYTES


def fit_manifest(path: Path) -> None:
    """Write a manifest whose digests are those of the files as they are, as someone would who means to deceive."""
    records = []
    for file in sorted(path.glob("*_0.safetensors")):
        data = file.read_bytes()
        header = min(len(data), LENGTH_NBYTES + int.from_bytes(data[:LENGTH_NBYTES], "little"))
        digester = Digester(header)
        digester.update(memoryview(data))
        records.append(FileRecord(file.name, len(data), 1, digester.finish() if data else "", header))
    (path / MANIFEST_NAME).write_text(make_manifest(records).to_json())


def read_everything(path: Path) -> None:
    index = read_index(path)
    plan = plan_read(index, [index.whole_piece(key) for key in index.stored], index.stored)
    plan.problems.raise_if_any()
    check_duplicates(plan)
    verify_first(plan)
    execute_read(plan, [np.zeros(target.numel * DTYPE_NBYTES[target.dtype], np.uint8).data for target in plan.targets])


@pytest.mark.parametrize("file", NASTY, ids=lambda file: file.name)
def test_a_nasty_file_is_refused_with_a_clear_error(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step"
    path.mkdir()
    if file.suffix == ".json":
        (path / "0_0.safetensors").write_bytes(b"\0" * 16)
        shutil.copyfile(file, path / MANIFEST_NAME)
    else:
        shutil.copyfile(file, path / "0_0.safetensors")
        fit_manifest(path)
    start = time.monotonic()
    expected = getattr(errors, file.name.split(".")[1])
    with pytest.raises(CheckpointError) as caught:
        read_everything(path)
    assert type(caught.value) is expected
    assert str(path) in str(caught.value) or MANIFEST_NAME in str(caught.value) or "names a file" in str(caught.value)
    assert len(str(caught.value)) < 5000
    if file.name != "version_2.NewerFormatError.json":
        assert verify(path).findings
    assert main(["verify", str(path)]) in (1, 2)
    assert time.monotonic() - start < SECONDS
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("header", [1 << 34, 99 << 20])
def test_a_header_as_large_as_its_sparse_file(tmp_path: Path, header: int) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut("w", WHOLE)]])
    os.truncate(path / "0_0.safetensors", header)
    edit_manifest(path, lambda fields: fields["files"][0].update(size=header, header_nbytes=header, digests="0" * 16))
    start = time.monotonic()
    with pytest.raises(CheckpointError):
        read_everything(path)
    assert verify(path).findings
    assert time.monotonic() - start < SECONDS


ODD = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 1 << 31, 1 << 62, 1 << 63, 10**400, 1.0, 1e308, float("nan"), "", "\0", "..", "/", "\ud800", [], {}]
    ),
    st.integers(-3, 30),
    st.text(max_size=5),
    st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """Draw a JSON value that differs from ``value`` in one to three places."""
    root = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        parent: Any = root
        while True:
            keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            child = parent[key]
            if isinstance(child, (dict, list)) and child and draw(st.integers(0, 3)):
                parent = child
                continue
            action = draw(st.sampled_from(["replace", "remove", "rename"]))
            if action == "replace" or parent is root:
                parent[key] = draw(ODD)
            elif action == "remove":
                del parent[key]
            elif isinstance(parent, dict):
                parent[draw(st.text(max_size=5))] = parent.pop(key)
            else:
                parent.append(child)
            break
    return root[0]


FIELDS = json.loads(
    make_manifest([FileRecord("0_0.safetensors", 1000, 3, "0123456789abcdef" * 2, 104), FileRecord("1_0.safetensors", 0, 0)]).to_json()
)


@settings(max_examples=300, deadline=SECONDS * 1000)
@given(mutated(FIELDS))
def test_a_manifest_of_odd_fields(fields: Any) -> None:
    text = reseal(fields) if isinstance(fields, dict) else json.dumps(fields)
    try:
        manifest = Manifest.from_json(text)
    except (CheckpointError, ValueError):
        return
    assert Manifest.from_json(manifest.to_json()).files == manifest.files


PIECES = [cut("w", WHOLE, flat=(3, 13))[0], cut("v", WHOLE, offset=(1, 2), local=(2, 3))[0], cut("n", np.array([5]))[0]]
HEADER = json.loads(encode_header(PIECES)[LENGTH_NBYTES:])
DATA_NBYTES = 10 * 4 + 6 * 4 + 8


def check_header(encoded: bytes) -> None:
    size = LENGTH_NBYTES + len(encoded) + DATA_NBYTES
    try:
        entries = list(decode_header(encoded, size, "the file"))
    except CheckpointError:
        return
    position = LENGTH_NBYTES + len(encoded)
    for _, dtype, box, start, stop, byte_offset in entries:
        assert byte_offset == position
        assert 0 <= start < stop <= box.numel
        position += (stop - start) * DTYPE_NBYTES[dtype]
    assert position == size


@settings(max_examples=300, deadline=SECONDS * 1000)
@given(mutated({**HEADER, "__metadata__": {**HEADER["__metadata__"]}}))
def test_a_header_of_odd_fields(header: Any) -> None:
    check_header(json.dumps(header).encode())


@settings(max_examples=300, deadline=SECONDS * 1000)
@given(mutated(json.loads(HEADER["__metadata__"]["paddle_fsdp_ckpt.pieces"])))
def test_a_header_of_odd_descriptions(pieces: Any) -> None:
    metadata = {**HEADER["__metadata__"], "paddle_fsdp_ckpt.pieces": json.dumps(pieces)}
    check_header(json.dumps({**HEADER, "__metadata__": metadata}).encode())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = [[cut("w", WHOLE, flat=(0, 13)), cut("b", WHOLE)], [cut("w", WHOLE, flat=(13, 24)), cut("b", WHOLE)]]
    return write_checkpoint(tmp_path_factory.mktemp("fuzz") / "step", files)


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Draw changes of bytes: some overwritten, a part removed, doubled or put elsewhere."""
    edits = draw(st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=4))
    moved = draw(st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.booleans()))

    def apply(content: bytes) -> bytes:
        data = bytearray(content)
        for where, new in edits:
            position = int(where * len(data))
            data[position : position + len(new)] = new
        if moved is not None:
            start, stop = sorted((int(moved[0] * len(data)), int(moved[1] * len(data))))
            part = data[start:stop]
            if moved[3]:
                del data[start:stop]
            place = int(moved[2] * len(data))
            data[place:place] = part
        return bytes(data)

    return apply


@pytest.mark.parametrize("fits", [False, True], ids=["as it is", "with digests that fit"])
@settings(max_examples=120, deadline=SECONDS * 1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["0_0.safetensors", "1_0.safetensors", MANIFEST_NAME]), damage=damages())
def test_a_directory_with_damaged_bytes(checkpoint: Path, name: str, damage: Callable[[bytes], bytes], fits: bool) -> None:
    content = {file: file.read_bytes() for file in checkpoint.iterdir()}
    try:
        (checkpoint / name).write_bytes(damage(content[checkpoint / name]))
        is_changed = (checkpoint / name).read_bytes() != content[checkpoint / name]
        if fits and name != MANIFEST_NAME:
            fit_manifest(checkpoint)
        for read in (read_everything, salvage, verify):
            try:
                found = read(checkpoint)
            except CheckpointError:
                continue
            assert not (is_changed and not fits and read is read_everything)
            if read is verify and is_changed and not fits:
                assert found.findings
    finally:
        for file, data in content.items():
            file.write_bytes(data)
