from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cut, edit_manifest, write_checkpoint

from paddle_fsdp_ckpt.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError
from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.storage.digests import Digester
from paddle_fsdp_ckpt.storage.format import replaced_name, staging_name
from paddle_fsdp_ckpt.storage.header import LENGTH_NBYTES
from paddle_fsdp_ckpt.storage.index import read_index, read_manifest

WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)
NONCE = "0123456789abcdef"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two ranks: a weight cut in two, a scalar on both, an int64 on the second only."""
    beta = np.array(0.9, np.float64)
    return write_checkpoint(
        tmp_path / "step",
        [
            [cut("w", WHOLE, flat=(0, 13)), cut("beta", beta)],
            [cut("w", WHOLE, flat=(13, 24)), cut("beta", beta), cut("count", np.array([5], np.int64))],
        ],
    )


def test_an_index_says_where_each_piece_lies(checkpoint: Path) -> None:
    index = read_index(checkpoint)
    assert index.keys() == {"w", "beta", "count"}
    assert len(index) == 3 and "w" in index and "v" not in index
    assert (index.dtypes["w"], index.global_shape("w"), index.global_shape("beta")) == ("float32", (4, 6), ())
    assert [stored.piece.flat_range for stored in index.pieces("w")] == [Range(0, 13), Range(13, 24)]
    assert [stored.piece.flat_range for stored in index.pieces("beta")] == [None, None]
    for stored in index.pieces("w"):
        raw = (checkpoint / stored.file_name).read_bytes()[stored.byte_offset :][: stored.piece.numel * 4]
        expected = WHOLE.reshape(-1)[stored.piece.box_range.start : stored.piece.box_range.stop]
        np.testing.assert_array_equal(np.frombuffer(raw, np.float32), expected)
    assert read_manifest(checkpoint) == index.manifest


def test_collecting_garbage_goes_on_after_an_error(tmp_path: Path, checkpoint: Path) -> None:
    os.unlink(checkpoint / "1_0.safetensors")
    with pytest.raises(IncompleteCheckpointError):
        read_index(checkpoint)
    assert gc.isenabled()


def test_garbage_that_nobody_collects_stays_so(checkpoint: Path) -> None:
    gc.disable()
    try:
        read_index(checkpoint)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_digest_tells_checkpoints_apart_wherever_they_lie(tmp_path: Path, checkpoint: Path) -> None:
    other = write_checkpoint(tmp_path / "other", [[cut("w", WHOLE)]])
    same_keys = write_checkpoint(tmp_path / "same_keys", [[cut("w", WHOLE + 1)]])
    digests = [read_index(path).digest() for path in (checkpoint, other, same_keys)]
    assert len(set(digests)) == 3
    assert read_index(Path(shutil.copytree(checkpoint, tmp_path / "copy"))).digest() == digests[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no checkpoint"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: path.mkdir(), "empty directory"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("{}")), "is not a checkpoint.*It holds config.json"),
        (
            lambda path: ((path / "step").mkdir(parents=True), (path / "step" / "manifest.json").touch()),
            "is not a checkpoint, and holds 1 checkpoint: step; name one of them",
        ),
        (lambda path: (path.mkdir(), (path / "0.metadata").write_bytes(b"")), "stock Paddle.*load_state_dict"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "c")
    for read in (read_manifest, read_index):
        with pytest.raises(IncompleteCheckpointError, match=f"{re.escape(str(tmp_path / 'c'))}.*{message}|{message}.*c'"):
            read(tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "way_out"), [("x.pdparams", r"load_full_state_dict\(model"), ("x.pdopt", "an optimizer that is not bound")]
)
def test_files_of_paddle_save_have_a_way_out(tmp_path: Path, name: str, way_out: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(IncompleteCheckpointError, match=f"{name}' is a file, not a checkpoint directory; paddle.load reads it.*{way_out}"):
        read_manifest(tmp_path / name)


def test_what_lies_beside_a_wrong_path_is_named(checkpoint: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match=f"/s'; check the path. '.*' holds 1 checkpoint: {checkpoint.name}$"):
        read_index(checkpoint.with_name("s"))


def test_a_staging_directory_is_never_taken_for_a_checkpoint(checkpoint: Path) -> None:
    staging = checkpoint.rename(checkpoint.with_name(staging_name("step", NONCE)))
    with pytest.raises(IncompleteCheckpointError, match="unfinished save to 'step'"):
        read_manifest(staging)
    with pytest.raises(IncompleteCheckpointError, match="there is no checkpoint.*unfinished save to 'step'"):
        read_manifest(checkpoint)


def test_a_checkpoint_renamed_aside_is_found_and_said_how_to_get_back(checkpoint: Path) -> None:
    aside = checkpoint.rename(checkpoint.with_name(replaced_name("step", NONCE)))
    for path in (checkpoint, aside):
        with pytest.raises(IncompleteCheckpointError, match=re.escape(f"mv '{aside}' '{checkpoint}'")):
            read_manifest(path)


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"format_version": 1}'])
def test_a_malformed_manifest_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json' is malformed"):
        read_index(checkpoint)


def test_a_manifest_that_is_no_text_is_named(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(b"\xff\x00")
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json' is malformed"):
        read_index(checkpoint)


@pytest.mark.parametrize("name", ["../1_0.safetensors", "/etc/hostname", "..", "1_0.safetensors/"])
def test_a_path_as_file_name_is_never_opened(checkpoint: Path, name: str) -> None:
    edit_manifest(checkpoint, lambda fields: fields["files"][1].update(name=name))
    with pytest.raises(UnsafeCheckpointError, match=re.escape(name)):
        read_index(checkpoint)


@pytest.mark.parametrize("name", ["1_0.safetensors", "manifest.json"])
def test_a_link_out_of_the_directory_is_never_opened(checkpoint: Path, name: str) -> None:
    moved = (checkpoint / name).rename(checkpoint.parent / "elsewhere")
    (checkpoint / name).symlink_to(moved)
    with pytest.raises(UnsafeCheckpointError, match=f"{name}' leads out of its directory"):
        read_index(checkpoint)
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to("../elsewhere")
    with pytest.raises(UnsafeCheckpointError, match=f"{name}' leads out of its directory"):
        read_index(checkpoint)


def test_the_directory_itself_may_be_a_link(checkpoint: Path) -> None:
    link = checkpoint.with_name("latest")
    link.symlink_to(checkpoint)
    assert len(read_index(link)) == 3


def test_a_pipe_in_place_of_a_file_does_not_hang(checkpoint: Path) -> None:
    (checkpoint / "0_0.safetensors").unlink()
    os.mkfifo(checkpoint / "0_0.safetensors")
    with pytest.raises(UnsafeCheckpointError, match="0_0.safetensors' is not a regular file"):
        read_index(checkpoint)


@pytest.mark.parametrize("name", ["none", "loop", "null\0", "file/below"])
def test_where_nothing_can_be_there_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(IncompleteCheckpointError, match="there is no checkpoint"):
        read_manifest(tmp_path / name)


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "1_0.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError, match="lacks the file 1_0.safetensors"):
        read_index(checkpoint)


def fields_of(path: Path) -> dict[str, Any]:
    """Return what a record of the file, as it is, would say."""
    data = path.read_bytes()
    header = min(len(data), LENGTH_NBYTES + int.from_bytes(data[:LENGTH_NBYTES], "little"))
    digester = Digester(header)
    digester.update(memoryview(data))
    return {"size": len(data), "header_nbytes": header, "digests": digester.finish() if data else ""}


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_named(checkpoint: Path, size: int) -> None:
    path = checkpoint / "1_0.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(CorruptCheckpointError, match="1_0.safetensors' has .* bytes, and the manifest says"):
        read_index(checkpoint)
    record = fields_of(path)
    edit_manifest(checkpoint, lambda fields: fields["files"][1].update(record))
    with pytest.raises(CorruptCheckpointError, match="1_0.safetensors'"):
        read_index(checkpoint)


def test_a_giant_header_length_is_refused(checkpoint: Path) -> None:
    with open(checkpoint / "0_0.safetensors", "r+b") as file:
        file.write((1 << 60).to_bytes(LENGTH_NBYTES, "little"))
    with pytest.raises(UnsafeCheckpointError, match="0_0.safetensors' asks for a header"):
        read_index(checkpoint)


@pytest.mark.parametrize("position", [0, 9, 60, -1])
def test_a_damaged_header_is_named(checkpoint: Path, position: int) -> None:
    """Also where it can still be read, and says something else."""
    record = read_manifest(checkpoint).files[1]
    with open(checkpoint / "1_0.safetensors", "r+b") as file:
        file.seek(position % record.header_nbytes)
        (value,) = file.read(1)
        file.seek(position % record.header_nbytes)
        file.write(bytes([value ^ 1]))
    with pytest.raises(CorruptCheckpointError, match="1_0.safetensors'"):
        read_index(checkpoint)


def test_another_number_of_pieces_than_the_manifest_says_is_refused(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda fields: fields["files"][1].update(pieces=2))
    with pytest.raises(CorruptCheckpointError, match="1_0.safetensors' holds 3 pieces, and the manifest says 2"):
        read_index(checkpoint)


@pytest.mark.parametrize("other", [WHOLE.T, WHOLE.view(np.int32)])
def test_files_that_disagree_about_a_tensor_are_refused(tmp_path: Path, other: np.ndarray) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut("w", WHOLE, flat=(0, 13))], [cut("w", other, flat=(13, 24))]])
    with pytest.raises(CorruptCheckpointError, match=r"key 'w': 0_0.safetensors has float32 \[4, 6\], and 1_0.safetensors has"):
        read_index(path)
