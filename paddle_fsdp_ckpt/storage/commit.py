"""Make a checkpoint appear as a whole or not at all, written by all ranks together.

The steps, each a point at which all ranks go on or all raise:

1. All ranks name the target; rank 0 refuses what it can't replace, clears what dead saves to it left behind, and makes a
   staging directory beside it.
2. All ranks look for the staging directory; who doesn't see it shares no file system with rank 0. Rank 0 refuses to go on where there
   is not enough room for all.
3. Each rank writes and fsyncs its file; rank 0 adds the manifest, fsyncs, renames the staging directory to the target, and
   fsyncs the parent.

Where a target is replaced, the old one is renamed aside just before, and removed just after. A process killed between the two
renames leaves no target: reading it then says how to rename it back, and :func:`heal_target`, or the next save to
the target, does so. A process killed at any other moment leaves the target as it was or as it will be.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import CheckpointError, RankFailedError, TargetExistsError, size_text
from .agreement import COORDINATOR, Rendezvous, exchange
from .format import MANIFEST_NAME, PADDLE_METADATA_NAME, parse_left_over, rank_file_name, replaced_name, staging_name
from .json_values import JsonValue
from .manifest import FileRecord, Manifest
from .system_errors import is_there
from .writer import record_of

DEFAULT_TIMEOUT_SECONDS = 1800.0
_NONCE_NAME = ".nonce"


def commit_checkpoint(
    directory: Path,
    rendezvous: Rendezvous,
    *,
    write_files: Callable[[Path], FileRecord],
    build_manifest: Callable[[Sequence[FileRecord]], Manifest],
    nbytes: int,
    token: str,
    before_manifest: Callable[[Path, Sequence[FileRecord]], None] | None = None,
    overwrite: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Write a checkpoint from all ranks, and make it visible as ``directory`` by one rename. All ranks must call.

    Args:
        directory: the target; missing, an empty directory, or with ``overwrite`` a checkpoint. Its parents are made.
        rendezvous: the ranks that save.
        write_files: writes this rank's file, :func:`~.format.rank_file_name` of its rank, into the directory that it is given,
            and returns its record, as :func:`~.writer.write_rank_file` does.
        build_manifest: called on rank 0 with the records in the order of the ranks; its ``files`` must be these. What the manifest says
            of ``0.metadata`` is added here.
        nbytes: about how many bytes this rank will write.
        token: unique for this save in the life of the job, the same on all ranks.
        before_manifest: called on rank 0 with the staging directory and the records, to add files; they are fsynced here.
        overwrite: replace a checkpoint that is there, as a whole. Anything that is no checkpoint of ours is never replaced.
        timeout_seconds: how much later than rank 0 any rank may reach each step, writing included, and rank 0 than any other.

    Raises:
        CheckpointError: on rank 0, there is not enough room; nothing was written.
        TargetExistsError: on rank 0, the target is there and may not be replaced.
        RankFailedError: on every other rank then; and on all ranks where a rank failed or did not answer. The target is as it
            was, and what was written is removed, unless it was rank 0 that vanished: then the save may have succeeded. A rank whose
            own failure is a CheckpointError raises that.
    """
    target = Path(os.path.abspath(directory))
    nonce = secrets.token_hex(8)
    made: list[Path] = []  # the staging directory, on rank 0, as soon as there may be one

    def open_staging(paths: list[JsonValue]) -> JsonValue:
        _check_same_path(paths)
        real_target = Path(os.path.realpath(target))
        heal_target(real_target)
        _check_replaceable(real_target, overwrite)
        _clear_left_overs(real_target)
        made.append(real_target.parent / staging_name(real_target.name, nonce))
        make_parents(made[0])
        made[0].mkdir()
        (made[0] / _NONCE_NAME).write_text(nonce)
        return [str(made[0]), nonce]

    def look(staging: Path, nonce: str) -> JsonValue:
        _check_sees(staging, nonce)
        return nbytes

    def finish(values: list[JsonValue]) -> None:
        records = tuple(FileRecord.from_json(value) for value in values)
        _complete(made[0], records, build_manifest, before_manifest)
        real_target = Path(os.path.realpath(target))
        _check_replaceable(real_target, overwrite)
        _make_visible(made[0], real_target, nonce)

    try:
        opened = exchange(rendezvous, f"{token}/open", lambda: str(target), open_staging, timeout_seconds)
        staging = Path(opened[0])
        exchange(
            rendezvous, f"{token}/see", lambda: look(staging, opened[1]), lambda sizes: _check_room(staging, sum(sizes)), timeout_seconds
        )
        exchange(rendezvous, f"{token}/write", lambda: _write(staging, rendezvous.rank, write_files), finish, timeout_seconds)
    except BaseException:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        raise


def heal_target(directory: Path) -> bool:
    """Give a checkpoint its name back that was renamed aside by a save that was then killed; tell whether it was needed.

    Only one process may call it, while no save to ``directory`` is under way.
    """
    if is_there(directory):
        return False
    for path in _left_overs(directory, "replaced"):
        if is_there(path / MANIFEST_NAME):
            os.rename(path, directory)
            _fsync(directory.parent)
            return True
    return False


def _check_same_path(paths: list[JsonValue]) -> None:
    for rank, path in enumerate(paths):
        if path != paths[COORDINATOR]:
            raise RankFailedError(
                f"ranks were given different directories: rank {COORDINATOR} '{paths[COORDINATOR]}' and rank {rank} '{path}'; nothing was "
                "written. Give all ranks the same"
            )


def _check_replaceable(target: Path, overwrite: bool) -> None:
    left_over = parse_left_over(target.name)
    if left_over is not None:
        raise CheckpointError(
            f"'{target}' has a name that a save to '{left_over[0]}' gives what it leaves behind, which is never loaded, and removed by the "
            "next one; nothing was written. Choose another path"
        )
    if not is_there(target):
        return
    if not target.is_dir():
        raise TargetExistsError(f"'{target}' is there and is no directory; rename or remove it, or choose another path")
    if os.path.ismount(target):
        raise TargetExistsError(
            f"'{target}' is where a file system is mounted, and nothing can take its place; choose a directory in it, such as "
            f"'{target / 'checkpoint'}'"
        )
    if not any(target.iterdir()):
        return
    if not is_there(target / MANIFEST_NAME):
        raise TargetExistsError(
            f"'{target}' is not empty, and no checkpoint of this package, so it is never replaced; rename or remove it, or choose another "
            "path"
        )
    if not overwrite:
        raise TargetExistsError(f"'{target}' holds a checkpoint already; choose another path, or pass overwrite=True to replace it")


def _clear_left_overs(target: Path) -> None:
    for path in _left_overs(target, "staging"):
        shutil.rmtree(path, ignore_errors=True)
    if is_there(target / MANIFEST_NAME):
        _remove_replaced(target)


def _left_overs(target: Path, kind: str) -> list[Path]:
    """Return the directories beside ``target`` that saves to it left behind."""
    if not target.parent.is_dir():
        return []
    return [path for path in target.parent.iterdir() if parse_left_over(path.name) == (target.name, kind)]


def _check_sees(staging: Path, nonce: str) -> None:
    try:
        seen = (staging / _NONCE_NAME).read_text()
    except OSError as error:
        seen = str(error)
    if seen != nonce:
        raise RankFailedError(
            f"it doesn't see what rank {COORDINATOR} made in '{staging}' ({seen}); the ranks share no file system there. Save to a "
            "directory that all ranks share"
        )


def _check_room(staging: Path, nbytes: int) -> None:
    status = os.statvfs(staging)
    # What a file system keeps back for root, root can have.
    free = (status.f_bfree if os.geteuid() == 0 else status.f_bavail) * status.f_frsize
    # Some file systems can't say how large they are.
    if status.f_blocks and free < nbytes:
        raise CheckpointError(
            f"not enough room in '{staging.parent}': the checkpoint needs about {size_text(nbytes)}, and {size_text(free)} are free; "
            "nothing was written. Make room there, or save elsewhere. (A checkpoint to be replaced is needed until the new one is there.)"
        )


def _write(staging: Path, rank: int, write_files: Callable[[Path], FileRecord]) -> JsonValue:
    record = write_files(staging)
    if record.name != rank_file_name(rank):
        raise ValueError(f"write_files wrote '{record.name}' on rank {rank}, and must write '{rank_file_name(rank)}'")
    return record.to_json()


def _complete(
    staging: Path,
    records: Sequence[FileRecord],
    build_manifest: Callable[[Sequence[FileRecord]], Manifest],
    before_manifest: Callable[[Path, Sequence[FileRecord]], None] | None,
) -> None:
    """Add all that is missing for a checkpoint to the staging directory, and bring it to the disk."""
    for record in records:
        size = (staging / record.name).stat().st_size
        if size != record.size:
            raise RankFailedError(f"'{staging / record.name}' has {size} bytes, and its rank wrote {record.size}; check the file system")
    if before_manifest is not None:
        before_manifest(staging, records)
    manifest = build_manifest(records)
    if manifest.files != tuple(records) or manifest.world_size != len(records):
        raise ValueError("build_manifest returned other files or ranks than it was given")
    if (staging / PADDLE_METADATA_NAME).exists():
        manifest = replace(manifest, paddle_metadata=record_of(staging / PADDLE_METADATA_NAME))
    (staging / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    (staging / _NONCE_NAME).unlink()
    written = {record.name for record in records}
    for path in staging.iterdir():
        if path.name not in written:
            _fsync(path)
    _fsync(staging)


def _make_visible(staging: Path, target: Path, nonce: str) -> None:
    old = target.parent / replaced_name(target.name, nonce)
    replaces = target.is_dir() and any(target.iterdir())
    if replaces:
        os.rename(target, old)
    is_visible = False
    try:
        os.rename(staging, target)
        is_visible = True
        _fsync(target.parent)
    except BaseException:
        # Who hears that the save failed shall find all as it was, and may save again; what fails besides is not the error to tell.
        with contextlib.suppress(OSError):
            if is_visible:
                os.rename(target, staging)
            if replaces:
                os.rename(old, target)
        raise
    _remove_replaced(target)


def _remove_replaced(target: Path) -> None:
    """Remove the checkpoints that ``target``, which is there, replaced; what can't be removed now is removed by the next save."""
    for path in _left_overs(target, "replaced"):
        # Unless its manifest goes first, a half-removed checkpoint could be given its name back.
        with contextlib.suppress(OSError):
            (path / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def make_parents(path: Path) -> None:
    """Make the directories above ``path`` that are missing, so that they outlive a power failure."""
    missing = [parent for parent in path.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        _fsync(parent.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
