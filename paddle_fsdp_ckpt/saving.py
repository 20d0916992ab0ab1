"""``save``: a checkpoint directory written by all ranks together."""

from __future__ import annotations

import json
import operator
import os
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .errors import CheckpointError, listing
from .fsdp import named_buffers, runtime_of
from .host_memory import bytes_of
from .meeting import absolute_path, check_same, digest_of, open_meeting
from .optim import optimizer_list
from .pieces import Piece
from .saved_run import describe_optimizer
from .state_dict import weights_to_store
from .storage.agreement import COORDINATOR, exchange
from .storage.commit import DEFAULT_TIMEOUT_SECONDS, commit_checkpoint
from .storage.flex import piece_of, write_paddle_metadata
from .storage.format import FileRecord, JsonValue, Manifest, check_json, rank_file_name, utc_now
from .storage.index import read_headers
from .storage.plan import check_complete
from .storage.writer import estimate_nbytes, write_rank_file
from .subjects import Subjects, check_subjects
from .version import __version__


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Layer,
    optimizer: Any = None,
    step: int | None = None,
    extra_state: JsonValue = None,
    overwrite: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Save a model and its optimizers as the checkpoint directory ``path``, as a whole or not at all. All ranks must call it.

    Nothing of model and optimizers changes. Each rank writes what it keeps, without gathering anything. Saved are parameters, persistable
    buffers, optimizer states, master weights, and the learning rate with its scheduler's state; and the other hyper-parameters, which
    ``load`` compares. Not saved are random number generators and gradients.

    Args:
        path: the directory, the same on all ranks; missing or empty.
        model: sharded by ``fully_shard``, ours or Paddle's own, or a plain model, the same on every rank, of which the first rank
            saves all.
        optimizer: bound to the model, or a list of such; plain as the model is plain. States that it doesn't have yet are not made.
        step: noted in the checkpoint; a whole number from 0 on.
        extra_state: JSON values (None, bool, int, float, str, list, dict with str keys), the same on all ranks.
        overwrite: replace a checkpoint that is at ``path``, as a whole.
        timeout_seconds: how long to wait for the slowest rank at each point where ranks wait for each other.

    Raises:
        CheckpointError: on all ranks, where any failed; ``path`` is as it was before.
    """
    optimizers = optimizer_list(optimizer)
    rendezvous, token = open_meeting(model, optimizers)
    prepared: list[_Saving] = []

    def prepare() -> JsonValue:
        saving = _prepare(path, model, optimizers, step, extra_state, rendezvous.rank)
        prepared.append(saving)
        extra = digest_of(json.dumps(extra_state, sort_keys=True))
        return [str(saving.target), saving.subjects.digest(), saving.step, overwrite, extra, _buffer_checksums(model)]

    exchange(rendezvous, f"{token}/prepare", prepare, _check_same_saving, timeout_seconds)
    saving = prepared[0]

    def write_files(directory: Path) -> FileRecord:
        held = [(piece, bytes_of(saving.weights[piece.key].local_tensor)) for piece in saving.pieces]
        return write_rank_file(directory / rank_file_name(rendezvous.rank), held)

    def build_manifest(files: Sequence[FileRecord]) -> Manifest:
        return Manifest(
            step=saving.step,
            world_size=rendezvous.world_size,
            created=utc_now(),
            versions={"paddle": paddle.__version__, "paddle_fsdp_ckpt": __version__},
            optimizers=[describe_optimizer(one) for one in saving.subjects.steppers],
            extra_state=extra_state,
            files=tuple(files),
            tied=tuple(tuple(names) for names in saving.subjects.tied()),
        )

    def complete(staging: Path, files: Sequence[FileRecord]) -> None:
        index = read_headers(staging, build_manifest(files))
        check_complete(index)
        write_paddle_metadata(staging, index)

    commit_checkpoint(
        saving.target,
        rendezvous,
        write_files=write_files,
        build_manifest=build_manifest,
        nbytes=estimate_nbytes(saving.pieces),
        before_manifest=complete,
        token=token,
        overwrite=overwrite,
        timeout_seconds=timeout_seconds,
    )


@dataclass(frozen=True)
class _Saving:
    """What one rank is about to save, and where."""

    target: Path
    subjects: Subjects
    step: int | None
    weights: dict[str, ShardedWeight]
    pieces: list[Piece]


def _prepare(
    path: str | os.PathLike[str], model: nn.Layer | None, optimizers: Sequence[Any], step: object, extra_state: JsonValue, rank: int
) -> _Saving:
    target = absolute_path(path)
    if model is None:
        raise CheckpointError("save: give the model; a checkpoint of an optimizer alone can't be told from a broken one")
    subjects = check_subjects(model, optimizers)
    try:
        check_json(extra_state, "extra_state")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"nothing was saved: {error}") from error
    runtime = runtime_of(model)
    if runtime is not None and runtime.gradients_pending:
        warnings.warn("save between backward and step: gradients are not saved; save after the step", stacklevel=4)
    weights = weights_to_store(subjects, rank)
    return _Saving(target, subjects, _check_step(step), weights, [piece_of(key, weight) for key, weight in weights.items()])


def _check_step(step: Any) -> int | None:
    try:
        number = None if step is None else operator.index(step)
    except TypeError:
        raise CheckpointError(f"step is {step!r:.100}, not a whole number") from None
    if number is not None and number < 0:
        raise CheckpointError(f"step is {number}, and steps are counted from 0 on")
    return number


def _check_same_saving(ranks: list[JsonValue]) -> None:
    shown = ("path", "step", "overwrite")
    whats = ("path", "model and optimizers", "step", "overwrite", "extra_state")
    for what, values in zip(whats, zip(*(values[:-1] for values in ranks), strict=True), strict=True):
        check_same("save", what, values, "nothing was written", shown=what in shown)
    buffers = [values[-1] for values in ranks]
    differing = [name for name, checksum in buffers[COORDINATOR].items() if any(other[name] != checksum for other in buffers)]
    if differing:
        warnings.warn(
            f"buffers differ between ranks, and rank {COORDINATOR}'s are saved: {listing(differing)}; a resumed run has these everywhere",
            stacklevel=2,
        )


def _buffer_checksums(model: nn.Layer) -> dict[str, int]:
    return {name: zlib.crc32(bytes_of(buffer)) for name, buffer in named_buffers(model)}
