"""A file that lies in memory as a whole, written past the system's cache: the same file and record as written in the ordinary way."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.direct import BLOCK_NBYTES
from paddle_fsdp_ckpt.storage.writer import FileImage, lay_out, plan_file, write_file, write_image, write_rank_file

MIB = 1 << 20


def aligned(nbytes: int, offset: int = 0) -> memoryview:
    """Random bytes that begin ``offset`` behind a page's begin."""
    memory = memoryview(mmap.mmap(-1, nbytes + offset + 1))[offset : offset + nbytes]
    memory[:] = np.random.RandomState(0).bytes(nbytes)
    return memory


def check(path: Path, data: memoryview, header_nbytes: int = 1000) -> None:
    record = write_image(path / "0_0.safetensors", FileImage(data, 5, header_nbytes))
    assert (path / "0_0.safetensors").read_bytes() == data
    (path / "1").mkdir()
    parts = [data[:header_nbytes], data[header_nbytes:]]
    assert record == write_file(path / "1" / "0_0.safetensors", parts, 5, header_nbytes)


@pytest.mark.parametrize("nbytes", [1000, BLOCK_NBYTES, MIB - 1, MIB, MIB + BLOCK_NBYTES + 1, 17 * MIB + 5])
@pytest.mark.parametrize("offset", [0, 1, 512])
def test_the_file_is_the_same_as_written_in_the_ordinary_way(tmp_path: Path, nbytes: int, offset: int) -> None:
    check(tmp_path, aligned(nbytes, offset))


def test_a_file_system_that_writes_only_through_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    check(tmp_path, aligned(2 * MIB))


@pytest.mark.parametrize("kept", [7, BLOCK_NBYTES, 3 * BLOCK_NBYTES + 512])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """Whether the next one may go past the cache too, or not."""
    real = os.writev
    calls = iter(range(1000))

    def short(descriptor: int, buffers: Sequence[memoryview]) -> int:
        if next(calls) > 0:
            return real(descriptor, buffers)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # so that any number of bytes will do
        written = real(descriptor, [buffers[0][:kept]])
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return written

    monkeypatch.setattr(os, "writev", short)
    check(tmp_path, aligned(2 * MIB))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_full_disk_is_said_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    real = os.writev
    calls = iter(range(1000))

    def write(descriptor: int, buffers: Sequence[memoryview]) -> int:
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "writev", write)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left on device: .*0_0.safetensors"):
        write_image(tmp_path / "0_0.safetensors", FileImage(aligned(9 * MIB + 1), 1, 8))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("planned", [0, 2, 4])
def test_an_image_made_by_the_layout_is_the_file_of_the_pieces(tmp_path: Path, planned: int) -> None:
    values = {
        "b": np.arange(3, dtype=np.int8),
        "a": np.arange(300_000.0),
        "none": np.zeros((0, 2), np.float32),
        "c": np.ones(5, np.float16),
    }
    pieces = [(Piece(key, str(one.dtype), one.shape, (0,) * one.ndim, one.shape), one.data) for key, one in values.items()]
    plan = plan_file([piece for piece, _ in pieces[:planned]]) if planned else None
    layout = lay_out([piece for piece, _ in pieces], plan)
    data = aligned(layout.nbytes)
    data[:] = b"".join([*layout.header, *(values[pieces[number][0].key].tobytes() for number in layout.order)])
    (tmp_path / "1").mkdir()
    record = write_image(tmp_path / "0_0.safetensors", FileImage(data, len(layout.order), layout.header_nbytes))
    assert record == write_rank_file(tmp_path / "1" / "0_0.safetensors", pieces, plan)
    loaded = load_file(tmp_path / "0_0.safetensors")
    assert {key: one.tolist() for key, one in loaded.items()} == {key: one.tolist() for key, one in values.items() if one.size}
