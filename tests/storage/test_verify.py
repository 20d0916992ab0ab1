from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import cut, edit_manifest, make_manifest, run_ranks, write_checkpoint

from paddle_fsdp_ckpt.errors import IncompleteCheckpointError, NewerFormatError
from paddle_fsdp_ckpt.storage import system_errors
from paddle_fsdp_ckpt.storage.commit import commit_checkpoint
from paddle_fsdp_ckpt.storage.format import PADDLE_METADATA_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.salvage import salvage
from paddle_fsdp_ckpt.storage.verify import VerifyReport, verify
from paddle_fsdp_ckpt.storage.writer import write_rank_file

BIG = np.arange(1 << 20, dtype=np.float32)
"""4 MiB, so that each half of it has more than one chunk."""
SMALL = np.arange(24, dtype=np.float32).reshape(4, 6)
BETA = np.array(0.9, np.float64)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two ranks: two weights cut in two, a scalar on both, an int64 on the second only, and a file for stock Paddle."""
    files = [
        [cut("big", BIG, flat=(0, 1 << 19)), cut("small", SMALL, flat=(0, 13)), cut("beta", BETA)],
        [cut("big", BIG, flat=(1 << 19, 1 << 20)), cut("small", SMALL, flat=(13, 24)), cut("beta", BETA), cut("n", np.array([5]))],
    ]
    run_ranks(
        2,
        lambda ranks: commit_checkpoint(
            tmp_path / "step",
            ranks,
            write_files=lambda staging: write_rank_file(staging / rank_file_name(ranks.rank), files[ranks.rank]),
            build_manifest=make_manifest,
            before_manifest=lambda staging, records: (staging / PADDLE_METADATA_NAME).write_bytes(b"metadata of stock Paddle") and None,
            nbytes=0,
            token="save",
            timeout_seconds=30.0,
        ),
    )
    return tmp_path / "step"


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ 1]))


def found(report: VerifyReport) -> list[str]:
    return sorted(str(finding) for finding in report.findings)


def position_of(path: Path, key: str, file: str) -> int:
    from paddle_fsdp_ckpt.storage.index import read_index

    return next(stored.byte_offset for stored in read_index(path).pieces(key) if stored.file_name == file)


def test_a_good_checkpoint_is_good(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    for workers in (1, 3, None):
        report = verify(checkpoint, workers=workers, progress=lambda done, total: seen.append((done, total)))
        assert report.is_good
        assert (report.step, report.world_size, report.keys, report.not_checked) == (7, 2, 4, ())
        assert report.nbytes == sum(path.stat().st_size for path in checkpoint.iterdir() if path.name != "manifest.json")
        assert seen[-1] == (report.nbytes, report.nbytes)
        assert str(report).splitlines()[-1] == "nothing is wrong"
    assert salvage(checkpoint).is_whole


def test_all_that_is_wrong_is_named_and_not_only_the_first(checkpoint: Path) -> None:
    flip(checkpoint / "0_0.safetensors", position_of(checkpoint, "big", "0_0.safetensors") + (3 << 19))
    flip(checkpoint / "1_0.safetensors", position_of(checkpoint, "small", "1_0.safetensors"))
    flip(checkpoint / PADDLE_METADATA_NAME, 3)
    (checkpoint / "5_0.safetensors").write_bytes(b"")
    report = verify(str(checkpoint))
    texts = found(report)
    assert [text.split(":")[0] for text in texts] == ["0.metadata", "0_0.safetensors", "1_0.safetensors", "5_0.safetensors"]
    assert "Only stock Paddle reads" in texts[0]
    assert "1 of its 4 chunks" in texts[1] and "They hold 'big'" in texts[1] and "'small'" not in texts[1]
    assert "'small'" in texts[2]
    assert "does not belong" in texts[3]
    assert str(report).endswith("4 things are wrong")
    assert json.loads(json.dumps(report.to_json()))["is_good"] is False


@pytest.mark.parametrize("size", [0, 7, 50, 2000, -1, 1])
def test_a_file_of_another_size_is_named(checkpoint: Path, size: int) -> None:
    path = checkpoint / "1_0.safetensors"
    full = path.stat().st_size
    os.truncate(path, size if size not in (-1, 1) else full + size)
    texts = found(verify(checkpoint))
    assert f"1_0.safetensors' has {path.stat().st_size} bytes, and {full} were written" in " ".join(texts)
    assert all(text.startswith("1_0.safetensors:") for text in texts)


@pytest.mark.parametrize("name", ["0_0.safetensors", PADDLE_METADATA_NAME])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (text,) = found(verify(checkpoint))
    assert f"lacks the file {name}" in text
    assert ("Only stock Paddle reads this file" in text) == (name == PADDLE_METADATA_NAME)


def test_swapped_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "0_0.safetensors").rename(checkpoint / "x")
    (checkpoint / "1_0.safetensors").rename(checkpoint / "0_0.safetensors")
    (checkpoint / "x").rename(checkpoint / "1_0.safetensors")
    assert {text.split(":")[0] for text in found(verify(checkpoint))} == {"0_0.safetensors", "1_0.safetensors"}


@pytest.mark.parametrize("change", [lambda text: text.replace('"epoch": 3', '"epoch": 4'), lambda text: text[:-30], lambda text: "{}"])
def test_an_edited_manifest_is_named(checkpoint: Path, change: Callable[[str], str]) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    (text,) = found(verify(checkpoint))
    assert text.startswith("manifest.json: ")


def test_an_edited_manifest_whose_digest_was_made_to_fit_does_not_hide_what_it_says_of_files(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda fields: fields["files"][0].update(pieces=7))
    edit_manifest(checkpoint, lambda fields: fields.update(tied=[["big", "other"]]))
    assert [text.split(":")[0] for text in found(verify(checkpoint))] == ["0_0.safetensors", "manifest.json"]


def test_a_missing_manifest_is_named(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    report = verify(checkpoint)  # with its 0.metadata it looks like a checkpoint of stock Paddle
    (text,) = found(report)
    assert text.startswith(
        "manifest.json: the rest of the directory was written by paddle_fsdp_ckpt, and the directory has no manifest.json"
    )
    assert str(report).splitlines()[0] == f"'{checkpoint}': a checkpoint without its manifest.json"
    assert "stock Paddle" not in str(report)
    with pytest.raises(IncompleteCheckpointError, match="was written by paddle_fsdp_ckpt, and the directory has no"):
        salvage(checkpoint)
    (checkpoint / PADDLE_METADATA_NAME).unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"was written by paddle_fsdp_ckpt, and the directory has no manifest\.json"):
        verify(checkpoint)


def test_a_newer_checkpoint_and_one_that_is_not_there_are_errors(checkpoint: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match="there is no checkpoint"):
        verify(checkpoint / "nowhere")
    edit_manifest(checkpoint, lambda fields: fields.update(format_version=2))
    with pytest.raises(NewerFormatError):
        verify(checkpoint)


def test_keys_that_are_not_whole_or_not_equal_are_named(tmp_path: Path) -> None:
    other = SMALL + 1
    path = write_checkpoint(
        tmp_path / "step",
        [[cut("half", SMALL, flat=(0, 13)), cut("twice", SMALL)], [cut("twice", other)], [cut("half", SMALL, flat=(15, 24))]],
    )
    half, twice = found(verify(path))
    assert half == "key 'half': 2 of its 24 elements are in no file, the first is the one at [2, 1] of [4, 6]"
    assert twice == "key 'twice': 0_0.safetensors and 1_0.safetensors hold different values for the same elements"
    report = salvage(path)
    assert report.intact == ()
    assert report.damaged.keys() == {"half", "twice"}


def test_files_that_disagree_about_tensors_are_named_for_each(tmp_path: Path) -> None:
    files = [[cut("a", SMALL, flat=(0, 9)), cut("b", SMALL)], [cut("a", SMALL.T, flat=(9, 24)), cut("b", SMALL.view(np.int32))]]
    texts = found(verify(write_checkpoint(tmp_path / "step", files)))
    assert sum("the files are not of one save" in text for text in texts) == 2


def test_of_many_keys_in_a_damaged_chunk_a_few_are_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step", [[cut(f"key{number}", SMALL) for number in range(9)]])
    flip(path / "0_0.safetensors", position_of(path, "key3", "0_0.safetensors"))
    (text,) = found(verify(path))
    assert text.endswith("They hold 9 keys: 'key0', 'key1', 'key2', 'key3', 'key4', ... (4 more)")


def test_what_the_system_can_not_read_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 1 << 20:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(system_errors, "PAUSES_SECONDS", (0.0,))
    texts = found(verify(checkpoint))
    assert any("chunk 2 can't be read: OSError: [Errno 5] Input/output error; the disk" in text for text in texts)
