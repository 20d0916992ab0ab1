"""What is a step and what is not, by name and by what is in it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fsdp_ckpt.errors import CheckpointError
from paddle_fsdp_ckpt.manager.retention import KeepBest, KeepLast, steps_to_remove
from paddle_fsdp_ckpt.manager.steps import (
    MAX_STEP,
    Root,
    SavedStep,
    clear_left_overs,
    hide_replaced,
    hide_step,
    parse_step,
    read_root,
    step_name,
    steps_aside,
)
from paddle_fsdp_ckpt.storage.discarded import discarded_steps, identity_of, is_another
from paddle_fsdp_ckpt.storage.format import replaced_name, staging_name
from paddle_fsdp_ckpt.storage.manifest import Manifest, utc_now
from paddle_fsdp_ckpt.storage.reserved_keys import METRICS_KEY, bytes_piece
from paddle_fsdp_ckpt.storage.writer import write_rank_file

NONCE = "0123456789abcdef"


@settings(deadline=None)
@given(st.integers(0, 10**18 - 1))
def test_a_name_gives_its_number(step: int) -> None:
    assert parse_step(step_name(step)) == step
    for name in (staging_name(step_name(step), NONCE), f"x{step_name(step)}", f"{step_name(step)}.old", step_name(step).upper()):
        assert parse_step(name) is None


def test_the_largest_step_has_a_name_and_the_next_has_none() -> None:
    assert parse_step(step_name(MAX_STEP)) == MAX_STEP
    assert parse_step(step_name(MAX_STEP + 1)) is None


def test_names_sort_as_numbers_do() -> None:
    assert [step_name(step) for step in (0, 7, 99_999_999, 100_000_000)] == [
        "step_00000000",
        "step_00000007",
        "step_99999999",
        "step_100000000",
    ]
    assert parse_step("step_000000007") is None, "one number has one name"
    assert parse_step("step_٠٠٠٠٠٠٠٧") is None, "other scripts' digits"


def make(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text("{}")


def test_what_is_there_is_sorted_and_the_rest_explained(tmp_path: Path) -> None:
    for name in ("step_100000000", "step_00000007", replaced_name("step_00000003", NONCE), staging_name("other", NONCE)):
        make(tmp_path / name)
    os.symlink(tmp_path / "step_00000007", tmp_path / "step_00000008")
    (tmp_path / "step_00000009").write_text("a file")
    (tmp_path / "history.jsonl").write_text("")
    root = read_root(tmp_path)
    # Their manifests can't be read: they are committed all the same, and who loads them hears of it.
    assert root.numbers == [7, 100_000_000]
    assert root.skipped == {
        replaced_name("step_00000003", NONCE): "what a save replaced",
        staging_name("other", NONCE): "not made by this manager",
        "step_00000008": "not made by this manager: it is no directory of its own",
        "step_00000009": "not made by this manager: it is no directory of its own",
    }
    assert Root.from_json(root.to_json()) == root


@pytest.mark.parametrize(
    ("encoded", "metrics"),
    [(b'{"loss": 1.5, "f1": NaN}', ["loss", "f1"]), (b"[1.5]", []), (b'{"loss": "low"}', []), (b'{"loss": 1}', []), (b"[" * 100_000, [])],
)
def test_metrics_that_nobody_could_have_given_are_none(tmp_path: Path, encoded: bytes, metrics: list[str]) -> None:
    path = tmp_path / "step_00000007"
    path.mkdir()
    record = write_rank_file(path / "0_0.safetensors", [(bytes_piece(METRICS_KEY, len(encoded)), memoryview(encoded))])
    (path / "manifest.json").write_text(Manifest(7, 1, utc_now(), {"paddle": "3.3.1"}, [], None, (record,)).to_json())
    (found,) = read_root(tmp_path, metrics=True).steps
    assert (found.step, list(found.metrics)) == (7, metrics)
    assert steps_to_remove([KeepBest("loss", mode="min")], [found, SavedStep(8)]) == ([] if metrics else [7])


def write_step(path: Path, step: int, loss: float) -> None:
    path.mkdir()
    encoded = json.dumps({"loss": loss}).encode()
    record = write_rank_file(path / "0_0.safetensors", [(bytes_piece(METRICS_KEY, len(encoded)), memoryview(encoded))])
    (path / "manifest.json").write_text(Manifest(step, 1, utc_now(), {"paddle": "3.3.1"}, [], None, (record,)).to_json())


@pytest.mark.parametrize("file", ["manifest.json", "0_0.safetensors"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EMFILE])
def test_a_step_whose_metrics_cannot_be_read_may_be_the_best(tmp_path: Path, file: str, code: int) -> None:
    """It stays, and is looked at again; one that is worse and was read goes."""
    for step, loss in ((1, 0.5), (2, 3.0), (3, 2.0), (4, 1.0)):
        write_step(tmp_path / step_name(step), step, loss)
    policies = [KeepLast(1), KeepBest("loss", mode="min")]
    real = os.open

    def open_badly(path: Any, *rest: Any, **options: Any) -> int:
        if os.fspath(path) == os.path.realpath(tmp_path / step_name(1) / file):
            raise OSError(code, os.strerror(code))
        return real(path, *rest, **options)

    with patch.object(os, "open", open_badly):
        root = read_root(tmp_path, metrics=True)
    assert Root.from_json(root.to_json()) == root
    assert [one.is_known for one in root.steps] == [False, True, True, True]
    assert steps_to_remove(policies, root.steps) == [2, 3]
    assert steps_to_remove([KeepLast(1)], root.steps) == [1, 2, 3]
    root = read_root(tmp_path, root.steps, metrics=True)
    assert root.steps[0].metrics == {"loss": 0.5} and root.steps[0].is_known
    assert steps_to_remove(policies, root.steps) == [2, 3]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES])
def test_a_root_that_cannot_be_looked_at_is_not_taken_for_none(tmp_path: Path, code: int) -> None:
    """A run would begin anew, beside the steps of the one before."""
    write_step(tmp_path / step_name(1), 1, 0.5)
    real = os.lstat

    def lstat_badly(path: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == os.fspath(tmp_path):
            raise OSError(code, os.strerror(code))
        return real(path, **options)

    with patch.object(os, "lstat", lstat_badly), pytest.raises(OSError, match=re.escape(os.strerror(code))):
        read_root(tmp_path)
    assert read_root(tmp_path).numbers == [1]


def test_a_missing_root_is_empty_and_a_file_is_none(tmp_path: Path) -> None:
    assert read_root(tmp_path / "none") == Root()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is no directory"):
        read_root(tmp_path / "file")
    clear_left_overs(tmp_path / "none")


def test_a_hidden_step_is_none_and_is_cleared(tmp_path: Path) -> None:
    make(tmp_path / "step_00000007")
    make(tmp_path / staging_name("other", NONCE))
    hidden = hide_step(tmp_path, 7)
    assert read_root(tmp_path).skipped[hidden.name] == "a step that is being removed"
    assert read_root(tmp_path).numbers == []
    clear_left_overs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [staging_name("other", NONCE)]


def test_what_a_step_replaced_goes_before_it(tmp_path: Path) -> None:
    """Else it would be given the name back. Where the step is gone, it may be all that is left of that."""
    make(tmp_path / "step_00000007")
    for number in (7, 8):
        make(tmp_path / replaced_name(f"step_0000000{number}", NONCE))
    hide_replaced(tmp_path, 7)
    assert steps_aside(tmp_path) == [8]
    make(tmp_path / replaced_name("step_00000007", NONCE))
    clear_left_overs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [replaced_name("step_00000008", NONCE), "step_00000007"]


def test_steps_of_a_history_that_was_given_up() -> None:
    """Those that the last step of the other one says are, unless they were saved anew or brought back since."""
    old = [SavedStep(number, written=number) for number in (1, 2, 3)]
    back = SavedStep(2, written=4, discarded={3: 3, 9: 0})
    assert discarded_steps([old[0], back, old[2]], [9, 8]) == {3: 2, 9: 2}
    assert discarded_steps([old[0], back, SavedStep(3, written=5)], [9]) == {}
    assert discarded_steps([old[0], back, old[2], SavedStep(4, written=6)], []) == {}
    assert discarded_steps([*old, SavedStep(4, written=6, discarded={1: 1, 2: 2, 3: 3})], []) == {1: 4, 2: 4, 3: 4}
    again = SavedStep(1, written=7, discarded={2: 4, 3: 3})
    assert discarded_steps([again, back, old[2]], []) == {2: 1, 3: 1}


def test_a_step_that_was_given_up_is_known_by_its_manifest_in_any_copy() -> None:
    old = SavedStep(3, written=3, digest="0123456789abcdef")
    by_digest, by_time = SavedStep(2, written=4, discarded={3: identity_of(old)}), SavedStep(2, written=4, discarded={3: 3})
    copied = replace(old, written=9)
    assert discarded_steps([by_digest, copied], []) == {3: 2}
    assert discarded_steps([by_time, old], []) == {3: 2}
    assert discarded_steps([by_time, copied], []) == {}
    for again in (replace(old, digest="fedcba9876543210"), replace(old, digest="")):
        assert discarded_steps([by_digest, again], []) == {}
    unread = SavedStep(3, written=3)
    assert identity_of(unread) == 3
    assert [is_another(old, one) for one in (copied, replace(old, digest=""), replace(copied, digest=""), unread)] == [
        False,
        False,
        True,
        False,
    ]
    assert is_another(old, replace(old, digest="fedcba9876543210"))


def test_two_saves_have_two_manifests_and_a_copy_has_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_step(tmp_path / name / step_name(3), 3, 0.5)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    os.utime(tmp_path / "copy" / step_name(3) / "manifest.json", (5, 5))
    one, two, copy = (read_root(tmp_path / name).steps[0] for name in ("one", "two", "copy"))
    assert one.written != copy.written
    assert not is_another(one, copy)
    assert is_another(one, two)
    assert Root.from_json(Root((one,)).to_json()).steps == (one,)


def test_what_can_not_be_cleared_is_named(tmp_path: Path) -> None:
    (tmp_path / staging_name("step_00000007", NONCE)).write_text("a file")
    with pytest.raises(CheckpointError, match="tried again at the next save"):
        clear_left_overs(tmp_path)
