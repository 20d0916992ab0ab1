"""The step directories under a manager's root: what is there, which are committed, and how one is removed.

Only the coordinator looks into a root or changes it: shared file systems show other ranks other things for a while.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ..errors import CheckpointError, listing
from ..storage.agreement import COORDINATOR
from ..storage.discarded import digest_of_manifest, when_written
from ..storage.format import MANIFEST_NAME, parse_left_over
from ..storage.index import read_manifest
from ..storage.json_values import JsonValue
from ..storage.reserved_keys import METRICS_KEY, metrics_of, read_bytes
from ..storage.system_errors import is_there

HISTORY_NAME = "history.jsonl"
WRITER_LOCK_NAME = ".writer.lock"

MAX_STEP = 10**18 - 1
"""The largest step whose directory's name is one of a step."""

_STEP = re.compile("step_([0-9]{8,18})", re.ASCII)
_REMOVED = re.compile(r"\.(?P<target>step_[0-9]{8,18})\.removed-[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True)
class SavedStep:
    """A committed step.

    Attributes:
        step: its number.
        created: when it was saved, in UTC; None where it can't be read.
        metrics: what was given to the save, e.g. ``{"loss": 1.5}``; empty where nobody needs it.
        is_known: whether that could be read.
        digest: of its manifest; see :func:`~.storage.discarded.digest_of_manifest`. Empty where that can't be read.
        written: when its manifest was; see :func:`~.storage.discarded.when_written`.
        discarded: what it says of the steps that are of another history, by their numbers; see :func:`~.storage.discarded.identity_of`.
    """

    step: int
    created: datetime | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    is_known: bool = True
    written: int = 0
    discarded: dict[int, int | str] = field(default_factory=dict)
    digest: str = ""


@dataclass(frozen=True)
class Root:
    """What a root holds.

    Attributes:
        steps: the committed ones, in ascending order.
        skipped: name -> in words, why it is none, of all else that is there.
    """

    steps: tuple[SavedStep, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """The committed steps' numbers, in ascending order."""
        return [one.step for one in self.steps]

    @property
    def taken(self) -> list[int]:
        """The numbers of the steps under whose names something else is, in ascending order."""
        return sorted(step for name in self.skipped if (step := parse_step(name)) is not None)

    def to_json(self) -> JsonValue:
        """Return the root as plain JSON data; :meth:`from_json` is the inverse."""
        steps = [
            [
                one.step,
                None if one.created is None else one.created.isoformat(),
                one.metrics,
                one.is_known,
                one.written,
                [*one.discarded.items()],
                one.digest,
            ]
            for one in self.steps
        ]
        return {"steps": steps, "skipped": self.skipped}

    @classmethod
    def from_json(cls, value: JsonValue) -> Root:
        """Build a root from what :meth:`to_json` returned."""
        steps = tuple(
            SavedStep(
                step, None if created is None else datetime.fromisoformat(created), metrics, is_known, written, dict(discarded), digest
            )
            for step, created, metrics, is_known, written, discarded, digest in value["steps"]
        )
        return cls(steps, value["skipped"])


def step_name(step: int) -> str:
    """Return the name of a step's directory."""
    return f"step_{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the number of the step whose directory has this name, or None."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def read_root(root: Path, known: Iterable[SavedStep] = (), *, metrics: bool = False) -> Root:
    """Look what a root holds; a missing one is empty. Nothing is changed.

    Args:
        root: the directory.
        known: steps whose manifests need not be read again; one whose metrics are needed and could not be read is.
        metrics: whether to read the steps' metrics, for which a header of each is read.

    Raises:
        CheckpointError: the root is no directory.
        OSError: it can't be read.
    """
    if not is_there(root):
        return Root()
    if not root.is_dir():
        raise CheckpointError(f"'{root}' is no directory; give the directory that holds, or is to hold, the steps")
    known_by_name = {step_name(one.step): one for one in known if one.is_known or not metrics}
    steps, skipped = [], {}
    for name in sorted(os.listdir(root)):
        reason = why_no_step(root / name)
        if reason is None:
            steps.append(known_by_name.get(name) or _read_step(root, name, metrics))
        elif name not in (HISTORY_NAME, WRITER_LOCK_NAME):
            skipped[name] = reason
    return Root(tuple(sorted(steps, key=lambda one: one.step)), skipped)


def steps_aside(root: Path) -> list[int]:
    """Return the numbers of the steps that were renamed aside by saves that were then killed, or are not finished, and are not there."""
    left = [parse_left_over(name) or ("", "") for name in (sorted(os.listdir(root)) if root.is_dir() else [])]
    aside = {step for target, kind in left if kind == "replaced" and (step := parse_step(target)) is not None}
    return sorted(step for step in aside if not is_there(root / step_name(step)))


def clear_left_overs(root: Path) -> None:
    """Remove what killed saves and unfinished removals left in a root. No save may be under way there.

    Raises:
        CheckpointError: some could not be removed.
    """
    failed: list[str] = []
    for name in sorted(os.listdir(root)) if root.is_dir() else []:
        target, kind = parse_left_over(name) or ("", "")
        is_over = kind == "staging" or (kind == "replaced" and is_there(root / target / MANIFEST_NAME))
        if (is_over and parse_step(target) is not None) or _REMOVED.fullmatch(name):
            failed += _try_to_remove(root / name)
    if failed:
        raise CheckpointError(f"left in '{root}', and tried again at the next save: {listing(failed)}")


def hide_replaced(root: Path, step: int) -> None:
    """Take out of a root what a step, which is there, replaced: once that is gone, it could be given the name back.

    Raises:
        OSError: the system refused.
    """
    for name in os.listdir(root):
        if parse_left_over(name) == (step_name(step), "replaced"):
            os.rename(root / name, root / f".{step_name(step)}.removed-{secrets.token_hex(8)}")


def hide_step(root: Path, step: int) -> Path:
    """Take a step out of a root by one rename, and return where it waits for :func:`clear_left_overs`.

    Raises:
        OSError: the system refused; the step is as it was.
    """
    name = step_name(step)
    aside = root / f".{name}.removed-{secrets.token_hex(8)}"
    os.rename(root / name, aside)
    return aside


def _try_to_remove(path: Path) -> Iterator[str]:
    """Remove a directory, and yield what is wrong, in words, where that fails."""
    try:
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(path)
    except OSError as error:
        yield f"'{path.name}' ({error})"


def why_no_step(path: Path) -> str | None:
    """Return, in words, why a path is no committed step, or None where it is one."""
    target, kind = parse_left_over(path.name) or ("", "")
    if kind == "staging" and parse_step(target) is not None:
        return "what a save that was killed, or is not finished, wrote"
    if kind == "replaced" and parse_step(target) is not None:
        return "what a save replaced"
    if _REMOVED.fullmatch(path.name):
        return "a step that is being removed"
    if parse_step(path.name) is None:
        return "not made by this manager"
    if not is_own_directory(path):
        return "not made by this manager: it is no directory of its own"
    if not may_be_there(path / MANIFEST_NAME):
        return f"it has no {MANIFEST_NAME}, as what was copied or removed in part, or what this package did not save"
    return None


def is_own_directory(path: Path) -> bool:
    """Tell whether a path is a directory, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def may_be_there(path: Path) -> bool:
    """Tell whether a file is there, or can't be looked at: whoever loads the step must hear of that."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _read_step(root: Path, name: str, metrics: bool) -> SavedStep:
    number = parse_step(name)
    assert number is not None
    written, digest = 0, ""
    try:
        written = when_written(root / name)
        digest = digest_of_manifest(root / name)
        manifest = read_manifest(root / name)
        encoded = read_bytes(root / name, manifest, COORDINATOR, [METRICS_KEY]) if metrics else {}
        values = metrics_of(encoded.get(METRICS_KEY, b"{}"))
    except (CheckpointError, OSError, ValueError) as error:
        # It is committed: whoever loads it must hear what is wrong with it, and it must not be passed over in silence.
        return SavedStep(number, is_known=isinstance(error, ValueError), written=written, digest=digest)
    return SavedStep(number, datetime.fromisoformat(manifest.created), values, written=written, discarded=manifest.discarded, digest=digest)


def names_of(steps: Sequence[int]) -> str:
    """Return the names of steps, the first 20 of them, for a message."""
    return listing(map(step_name, steps))
