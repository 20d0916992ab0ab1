from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoints import cut
from safetensors import safe_open
from safetensors.numpy import load_file
from xxhash import xxh3_64_hexdigest

from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.buffers import CACHED_NBYTES
from paddle_fsdp_ckpt.storage.format import DTYPE_CODES, DTYPE_NBYTES
from paddle_fsdp_ckpt.storage.header import LENGTH_NBYTES
from paddle_fsdp_ckpt.storage.manifest import FileRecord
from paddle_fsdp_ckpt.storage.writer import plan_file, write_rank_file


def one(key: str, values: np.ndarray) -> tuple[Piece, memoryview]:
    return Piece(key, str(values.dtype), values.shape, (0,) * values.ndim, values.shape), memoryview(values.tobytes())


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    pieces = [
        one("flag", np.array([True, False, True])),
        one("empty", np.zeros((0, 4), np.float32)),
        one("scalar", np.array(3.5, np.float32)),
        one("[1]", np.array([9], np.int64)),
        cut("flat", whole, flat=(5, 17)),
        cut("box", whole, offset=(1, 2), local=(2, 3)),
        cut("flat of a box", whole, flat=(1, 4), offset=(1, 2), local=(2, 3)),
        one("größe.гамма", np.array([1, 2], np.int16)),
    ]
    record = write_rank_file(tmp_path / "0_0.safetensors", pieces)
    raw = (tmp_path / "0_0.safetensors").read_bytes()
    header = LENGTH_NBYTES + int.from_bytes(raw[:LENGTH_NBYTES], "little")
    assert record == FileRecord("0_0.safetensors", len(raw), 7, xxh3_64_hexdigest(raw[:header]) + xxh3_64_hexdigest(raw[header:]), header)
    read = load_file(tmp_path / "0_0.safetensors")
    expected = {
        "flag": np.array([True, False, True]),
        "scalar": np.array(3.5, np.float32),
        "[1]": np.array([9], np.int64),
        "flat": np.arange(5, 17, dtype=np.float32),
        "box": whole[1:3, 2:5],
        "flat of a box": whole[1:3, 2:5].reshape(-1)[1:4],
        "größe.гамма": np.array([1, 2], np.int16),
    }
    assert read.keys() == expected.keys()
    for key, values in expected.items():
        assert read[key].dtype == values.dtype
        assert read[key].shape == values.shape
        np.testing.assert_array_equal(read[key], values)


def test_every_dtype_is_written_under_its_code(tmp_path: Path) -> None:
    pieces = [
        (Piece(dtype, dtype, (3,), (0,), (3,)), memoryview(os.urandom(3 * nbytes).replace(b"\xff", b"\0")))
        for dtype, nbytes in DTYPE_NBYTES.items()
    ]
    write_rank_file(tmp_path / "0_0.safetensors", pieces)
    data = (tmp_path / "0_0.safetensors").read_bytes()
    with safe_open(tmp_path / "0_0.safetensors", framework="np") as file:
        assert set(file.keys()) == DTYPE_CODES.keys()
        for dtype, code in DTYPE_CODES.items():
            assert file.get_slice(dtype).get_dtype() == code
    for _, values in pieces:
        assert bytes(values) in data


def test_stock_paddle_reads_what_was_written(tmp_path: Path) -> None:
    import paddle

    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    as_bfloat16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    write_rank_file(
        tmp_path / "0_0.safetensors",
        [
            one("w", values),
            one("beta", np.array(0.5, np.float32)),
            (Piece("half", "bfloat16", (2, 3), (0, 0), (2, 3), Range(1, 5)), memoryview(as_bfloat16.reshape(-1)[1:5].tobytes())),
        ],
    )
    read = paddle.load(str(tmp_path / "0_0.safetensors"), safetensors=True)
    assert read.keys() == {"w", "beta", "half"}
    np.testing.assert_array_equal(read["w"].numpy(), values)
    assert read["beta"].shape == [] and read["beta"].item() == 0.5
    assert read["half"].dtype == paddle.bfloat16
    assert read["half"].astype("float32").tolist() == [1, 2, 3, 4]


def test_every_tensor_is_aligned_to_its_element_size(tmp_path: Path) -> None:
    pieces = [
        (Piece(f"{dtype}.{n}", dtype, (n,), (0,), (n,)), memoryview(bytes(n * size)))
        for n in (1, 3)
        for dtype, size in DTYPE_NBYTES.items()
    ]
    pieces.reverse()
    write_rank_file(tmp_path / "0_0.safetensors", pieces)
    raw = (tmp_path / "0_0.safetensors").read_bytes()
    length = int.from_bytes(raw[:LENGTH_NBYTES], "little")
    assert (LENGTH_NBYTES + length) % 8 == 0
    for key, entry in json.loads(raw[LENGTH_NBYTES : LENGTH_NBYTES + length]).items():
        if key != "__metadata__":
            assert entry["data_offsets"][0] % DTYPE_NBYTES[key.split(".")[0]] == 0


def test_a_rank_without_pieces_writes_a_valid_file(tmp_path: Path) -> None:
    assert write_rank_file(tmp_path / "3_0.safetensors", []).pieces == 0
    assert load_file(tmp_path / "3_0.safetensors") == {}


def test_any_contiguous_buffer_is_taken_as_it_is(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    piece = Piece("k", "float32", (2, 2), (0, 0), (2, 2))
    for i, buffer in enumerate([values, values.reshape(2, 2), (ctypes.c_float * 4)(*values), bytearray(values.tobytes()), values.data]):
        write_rank_file(tmp_path / f"{i}_0.safetensors", [(piece, buffer)])  # type: ignore[list-item]
        np.testing.assert_array_equal(load_file(tmp_path / f"{i}_0.safetensors")["k"], values.reshape(2, 2))
    with pytest.raises(ValueError, match="'k'.*not contiguous"):
        write_rank_file(tmp_path / "9_0.safetensors", [(piece, np.arange(8, dtype=np.float32)[::2].data)])
    with pytest.raises(ValueError, match="'k'.*not a buffer"):
        write_rank_file(tmp_path / "9_0.safetensors", [(piece, [1.0] * 4)])  # type: ignore[list-item]


def test_one_large_and_4000_tiny_pieces_cost_their_bytes_and_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    real = os.writev

    def count(descriptor: int, buffers: Sequence[memoryview]) -> int:
        groups.append(len(buffers))
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "writev", count)
    flat = np.arange(1 << 20, dtype=np.float32)
    pieces = [(Piece("large", "float32", flat.shape, (0,), flat.shape), flat.data.cast("B"))]
    pieces += [(Piece(f"layers.{i}.norm.weight", "float32", (4,), (0,), (4,)), flat[4 * i : 4 * i + 4].data.cast("B")) for i in range(4000)]
    record = write_rank_file(tmp_path / "0_0.safetensors", pieces)
    assert record.size < flat.nbytes + 4000 * (16 + 200)
    # Each takes as many bytes as a processor core keeps at hand to digest them, whatever the number of pieces.
    assert len(groups) == -(-record.size // CACHED_NBYTES)
    assert load_file(tmp_path / "0_0.safetensors")["layers.3999.norm.weight"].tolist() == [15996, 15997, 15998, 15999]


@pytest.mark.parametrize("planned", [0, 3, 5, 6])
@pytest.mark.parametrize("last", [np.zeros(3, np.uint8), np.zeros(2, np.float64)])
def test_a_plan_of_the_first_pieces_changes_nothing(tmp_path: Path, planned: int, last: np.ndarray) -> None:
    """Whether what comes behind them may lie behind them or, having larger elements, may not."""
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    pieces = [
        one("small", np.array([1, 2, 3], np.int8)),
        cut("flat", whole, flat=(5, 17)),
        one("nothing", np.zeros((0, 4), np.float32)),
        cut("flat of a box", whole, flat=(1, 4), offset=(1, 2), local=(2, 3)),
        one("half", np.ones(5, np.float16)),
        one("last \u00fc", last),
    ]
    right = write_rank_file(tmp_path / "0_0.safetensors", pieces)
    plan = plan_file([piece for piece, _ in pieces[:planned]])
    for number in (1, 2):
        record = write_rank_file(tmp_path / f"{number}_0.safetensors", pieces, plan)
        assert (record.size, record.pieces, record.header_nbytes) == (right.size, right.pieces, right.header_nbytes)
        # The order among elements of one size may be another.
        files = [load_file(tmp_path / f"{rank}_0.safetensors") for rank in (0, number)]
        assert files[0].keys() == files[1].keys()
        assert all(np.array_equal(files[0][key], files[1][key]) for key in files[0])


def test_a_key_of_the_plan_is_not_stored_again(tmp_path: Path) -> None:
    pieces = [one("a", np.zeros(2)), one("a", np.ones(2))]
    with pytest.raises(ValueError, match="'a' can't be stored twice"):
        write_rank_file(tmp_path / "0_0.safetensors", pieces, plan_file([pieces[0][0]]))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def short(descriptor: int, buffers: Sequence[memoryview]) -> int:
        first = next(i for i, buffer in enumerate(buffers) if len(buffer))
        return real(descriptor, [*buffers[:first], buffers[first][:7]])

    monkeypatch.setattr(os, "writev", short)
    values = {f"k{i}": np.arange(i, dtype=np.int64) for i in range(1, 20)}
    write_rank_file(tmp_path / "0_0.safetensors", [one(key, value) for key, value in values.items()])
    for key, value in load_file(tmp_path / "0_0.safetensors").items():
        np.testing.assert_array_equal(value, values[key])


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_rank_file(tmp_path / "0_0.safetensors", [])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "0_0.safetensors").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([one("a", np.zeros(2)), one("b", np.zeros(2)), one("a", np.ones(2))], "'a' can't be stored twice"),
        ([one("__metadata__", np.zeros(2))], "'__metadata__' can't be stored"),
        ([(Piece("a", "float32", (2,), (0,), (2,)), memoryview(bytes(7)))], "'a' has 7 bytes.* are 8"),
        ([(Piece("a", "complex64", (2,), (0,), (2,)), memoryview(bytes(16)))], "'a' has dtype 'complex64'"),
        ([(Piece("a", "float32", (2,), (1,), (2,)), memoryview(bytes(8)))], "'a'.*inside of the tensor"),
        ([one("a\udcff", np.zeros(2))], "not valid Unicode"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_before_there_is_a_file(
    tmp_path: Path, pieces: list[tuple[Piece, memoryview]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_rank_file(tmp_path / "0_0.safetensors", pieces)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "0_0.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write_rank_file(tmp_path / "0_0.safetensors", [])
    assert (tmp_path / "0_0.safetensors").read_text() == "mine"


@pytest.mark.parametrize("call", ["writev", "fsync"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_no_file_and_no_open_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def fail(*_: object) -> int:
        raise error

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        write_rank_file(tmp_path / "0_0.safetensors", [one("a", np.zeros(2))])
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_failed_first_is_said_where_the_file_can_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> Callable[..., None]:
        def call(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(os, "fsync", fail(errno.ENOSPC))
    monkeypatch.setattr(os, "unlink", fail(errno.EROFS))
    with pytest.raises(OSError, match="No space left on device"):
        write_rank_file(tmp_path / "0_0.safetensors", [one("a", np.zeros(2))])
