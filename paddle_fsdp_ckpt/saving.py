"""``save``: a checkpoint directory written by all ranks together."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .base_weights import LeftOut, leave_out_base
from .errors import CheckpointError, RankFailedError, listing
from .fsdp import dtype_name
from .host_memory import bytes_of
from .lora_layers import lora_scalings
from .meeting import absolute_path, open_meeting
from .optim import optimizer_list
from .pieces import Piece
from .progress import long_progress, watching_file
from .save_comparison import check_same_saving, describe_extra_state, describe_own, has_same_extra_state, is_whole, raise_other_extra_state
from .save_plan import KnownIndex, SaveMemory, SourcedPlan, StoredTensors, headers_of, memory_of, stored_tensors
from .saved_run import describe_optimizer, without_gradients
from .storage.agreement import COORDINATOR, Rendezvous, exchange
from .storage.commit import DEFAULT_TIMEOUT_SECONDS, commit_checkpoint
from .storage.compressed import compressed, decompressed
from .storage.flex import paddle_metadata, piece_of
from .storage.format import DTYPE_NBYTES, PADDLE_METADATA_NAME, rank_file_name
from .storage.index import CheckpointIndex, read_headers, without_garbage_collection
from .storage.json_values import JsonValue, check_json
from .storage.manifest import MAX_COUNT, FileRecord, Manifest, utc_now
from .storage.plan import Duplicate, check_complete
from .storage.reader import differing_duplicates
from .storage.reserved_keys import bytes_piece
from .storage.writer import FileImage, FilePlan, PlacedPieces, estimate_nbytes, write_image, write_rank_file
from .subjects import Models, Subjects, check_subjects
from .version import __version__
from .warn import warn_caller


def save(
    path: str | os.PathLike[str],
    *,
    model: Models,
    optimizer: Any = None,
    step: int | None = None,
    extra_state: JsonValue = None,
    overwrite: bool = False,
    trainable_only: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Save a model and its optimizers as the checkpoint directory ``path``, as a whole or not at all. All ranks must call it.

    Nothing of model and optimizers changes. Each rank writes what it keeps, without gathering anything. Saved are parameters, persistable
    buffers, optimizer states, master weights, and the learning rate with its scheduler's state; and the other hyper-parameters, which
    ``load`` compares. Not saved are random number generators and gradients.

    Args:
        path: the directory, the same on all ranks; missing or empty.
        model: sharded by ``fully_shard``, ours or Paddle's own, or a plain model, the same on every rank, of which the first rank
            saves all. Or a dict of several such as ``{"actor": actor, "critic": critic}``, sharded by ours or plain: the keys of each
            begin with its name and a dot.
        optimizer: bound to the model, or a list or dict of such; plain as the model is plain. Of several models it may step one or more.
            States that it doesn't have yet are not made. An empty list where states are left out on purpose; else each optimizer
            of the model that is not given is warned of. Who saves them apart silences that by ``warnings.filterwarnings``.
        step: noted in the checkpoint; a whole number from 0 on.
        extra_state: JSON values (None, bool, int, float, str, list, dict with str keys), the same on all ranks.
        overwrite: replace a checkpoint that is at ``path``, as a whole.
        trainable_only: leave out the parameters that don't train (``stop_gradient``) and have no optimizer states, such as the frozen base
            of LoRA adapters. Checksums of them are saved, and ``load`` wants the model to have them as they were. Reading them all takes
            a while, but only once where our ``fully_shard`` cut the model, as long as they don't change as ``parameter_versions``
            counts it. Persistable buffers are saved all the same.
        timeout_seconds: how long to wait for the slowest rank at each point where ranks wait for each other.

    Raises:
        CheckpointError: on all ranks, where any failed; ``path`` is as it was before.
    """
    rendezvous, token = open_meeting("save", model, optimizer_list(optimizer))
    prepared = prepare_save(
        path,
        rendezvous,
        token,
        model=model,
        optimizer=optimizer,
        step=step,
        extra_state=extra_state,
        overwrite=overwrite,
        trainable_only=trainable_only,
        timeout_seconds=timeout_seconds,
    )
    commit_save(prepared, None, rendezvous)


@dataclass(frozen=True)
class Kept:
    """What a checkpoint holds beside a model and its optimizers.

    Attributes:
        data: reserved key -> bytes in this rank's file; each key on one rank only.
        sharded: reserved key -> this rank's part of a tensor. Who holds all of one holds the same as all others, and rank 0 stores it;
            replicas hold the same parts, and the first stores them.
    """

    data: dict[str, bytes] = field(default_factory=dict)
    sharded: dict[str, ShardedWeight] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedSave:
    """A save that all ranks agreed on; nothing of it is written yet.

    Attributes:
        target: the checkpoint directory.
        stored: what this rank's file is to hold of model and optimizers.
        tensors: what it is to hold besides, as the live tensors.
        data: the same of what is bytes already.
        memory: what saves of this model keep from one to the next, if anything.
        manifest: without its files.
        token: for the commit.
        overwrite: see :func:`save`; so is the rest.
        timeout_seconds: see there.
    """

    target: Path
    stored: StoredTensors
    tensors: list[tuple[Piece, paddle.Tensor]]
    data: list[tuple[Piece, memoryview]]
    memory: SaveMemory | None
    manifest: Manifest
    token: str
    overwrite: bool
    timeout_seconds: float

    @property
    def nbytes(self) -> int:
        """How many bytes this rank is about to write, about."""
        return self.stored.plan.estimated_nbytes + estimate_nbytes(self._others())

    @property
    def placed(self) -> PlacedPieces | None:
        """What this rank's file can begin with as it lies in memory; None where all is to be looked at piece by piece."""
        plan = self.stored.plan
        return plan if isinstance(plan, PlacedPieces) and plan.start.goes_before(self._others()) else None

    @property
    def plan(self) -> FilePlan | None:
        """How the first pieces of :meth:`values` and :meth:`contents` lie, where that was planned."""
        return self.stored.plan.file if isinstance(self.stored.plan, SourcedPlan) else None

    def _others(self) -> list[Piece]:
        return [piece for piece, _ in self.tensors] + [piece for piece, _ in self.data]

    def values(self) -> Iterator[tuple[Piece, paddle.Tensor | memoryview]]:
        """Yield what the file is to hold, with the tensors, or with bytes where there are such; without what is :attr:`placed`."""
        if self.placed is None:
            yield from self.stored.values()
        yield from self.tensors
        yield from self.data

    def contents(self) -> Iterator[tuple[Piece, memoryview]]:
        """Yield the same with its bytes: the tensors' own memory, where that is on the host; else copies."""
        if self.placed is None:
            yield from self.stored.contents()
        for piece, tensor in self.tensors:
            yield piece, bytes_of(tensor)
        yield from self.data


def prepare_save(
    path: str | os.PathLike[str],
    rendezvous: Rendezvous,
    token: str,
    *,
    model: Models | None,
    optimizer: Any,
    step: object,
    extra_state: JsonValue,
    overwrite: bool,
    trainable_only: bool,
    timeout_seconds: float,
    keep: Callable[[], Kept] = Kept,
) -> PreparedSave:
    """Check, together with all other ranks, that a save can begin, and describe it as it is now. Nothing is written.

    Args:
        path: see :func:`save` for this and all that isn't here.
        rendezvous: the ranks.
        token: for this save.
        model: the model.
        optimizer: see :func:`save`.
        step: the number.
        extra_state: for the manifest.
        overwrite: or not.
        trainable_only: or all.
        timeout_seconds: at each point.
        keep: returns what the checkpoint is to hold beside; what it raises is raised on all ranks.

    Raises:
        CheckpointError: on all ranks, where any failed.
    """
    prepared: list[PreparedSave] = []
    left_out: list[LeftOut] = []

    def prepare() -> JsonValue:
        target = absolute_path(path)
        if model is None:
            raise CheckpointError("save: give the model; a checkpoint of an optimizer alone can't be told from a broken one")
        subjects = check_subjects(model, optimizer_list(optimizer))
        try:
            check_json(extra_state, "extra_state")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"nothing was saved: {error}") from error
        strange = [f"{name} ({dtype_name(buffer)})" for name, buffer in subjects.buffers if dtype_name(buffer) not in DTYPE_NBYTES]
        if strange:
            raise CheckpointError(
                f"buffers of dtypes that a checkpoint can't hold: {listing(strange)}; nothing was saved. Register what can be computed "
                "anew with persistable=False, and of complex numbers keep paddle.as_real(...)"
            )
        lost = subjects.sharding.lost_weights()
        if lost is not None:
            raise lost
        if subjects.sharding.gradients_pending:
            warn_caller("save between backward and step: gradients are not saved; save after step() and clear_grad()")
        base: JsonValue = None
        if trainable_only:
            left_out.append(leave_out_base(subjects))
            base = left_out[0].message
        stored = stored_tensors(subjects, rendezvous.rank, left_out[0].keys if left_out else ())
        kept = keep()
        first_replica = subjects.sharding.communicator.replica == 0
        sharded = {
            key: weight
            for key, weight in kept.sharded.items()
            if (first_replica and not is_whole(weight)) or rendezvous.rank == COORDINATOR
        }
        manifest = Manifest(
            step=_check_step(step),
            world_size=rendezvous.world_size,
            created=utc_now(),
            versions={"paddle": paddle.__version__, "paddle_fsdp_ckpt": __version__},
            optimizers=[describe_optimizer(one) for one in subjects.steppers],
            extra_state=deepcopy(extra_state),
            files=(),
            tied=tuple(tuple(names) for names in subjects.tied()),
            lora=lora_scalings(subjects.model),
        )
        tensors = [(piece_of(key, weight), weight.local_tensor) for key, weight in sharded.items()]
        data = [(bytes_piece(key, len(value)), memoryview(value)) for key, value in kept.data.items()]
        memory = memory_of(subjects)
        prepared.append(PreparedSave(target, stored, tensors, data, memory, manifest, token, overwrite, timeout_seconds))
        if (optimizer is None or subjects.steppers) and rendezvous.rank == COORDINATOR:
            _say_what_is_left_out(subjects)
        own: JsonValue = None
        if rendezvous.world_size > 1:
            own = describe_own(
                subjects,
                kept.sharded,
                path=target,
                step=manifest.step,
                overwrite=bool(overwrite),
                extra_state=extra_state,
                trainable_only=bool(trainable_only),
            )
        return {"own": own, "base": base, "dropped": subjects.sharding.dropped_gradients()}

    def judge(ranks: list[JsonValue]) -> JsonValue:
        if rendezvous.world_size > 1:
            owns = [one["own"] for one in ranks]
            check_same_saving(owns)
            if not has_same_extra_state(owns):
                return False
        dropped = {name for one in ranks for name in one["dropped"]}
        if dropped:
            optimizers = without_gradients(prepared[0].manifest.optimizers, dropped)
            prepared[0] = replace(prepared[0], manifest=replace(prepared[0].manifest, optimizers=optimizers))
        if left_out:
            base = left_out[0].describe([one["base"] for one in ranks])
            prepared[0] = replace(prepared[0], manifest=replace(prepared[0].manifest, base=base))
        return True

    with without_garbage_collection():
        is_same = exchange(rendezvous, f"{token}/prepare", prepare, judge, timeout_seconds)
    if not is_same:
        exchange(rendezvous, f"{token}/differ", lambda: describe_extra_state(extra_state), raise_other_extra_state, timeout_seconds)
    if left_out:
        left_out[0].was_heard()
    return prepared[0]


def commit_save(
    prepared: PreparedSave, image: FileImage | None, rendezvous: Rendezvous, is_awaited: Callable[[], bool] | None = None
) -> int:
    """Write a prepared save and make it visible. No Paddle collective runs here, so that it may be called from another thread.

    Args:
        prepared: on all ranks the same save.
        image: a copy of this rank's file; None for what :meth:`PreparedSave.contents` yields, as it is now.
        rendezvous: of the same ranks; another connection where this is another thread.
        is_awaited: tells at any time whether somebody waits for it, who sees on a terminal how far it is; None where the caller does.

    Returns:
        How many bytes all ranks' files have, on rank 0; 0 elsewhere.

    Raises:
        CheckpointError: as :func:`save`.
    """
    written: list[FileRecord] = []

    def write_files(directory: Path) -> FileRecord:
        path = directory / rank_file_name(rendezvous.rank)
        progress = long_progress("saving", rendezvous.rank, is_awaited)
        with watching_file(path, prepared.nbytes, progress):
            if image is not None:
                return write_image(path, image)
            with without_garbage_collection():
                return write_rank_file(path, list(prepared.contents()), prepared.plan, prepared.placed)

    def build_manifest(files: Sequence[FileRecord]) -> Manifest:
        written[:] = files
        return replace(prepared.manifest, files=tuple(files))

    def complete(staging: Path, files: Sequence[FileRecord]) -> None:
        headers = headers_of(files)
        known = prepared.memory.index if prepared.memory is not None else None
        if known is None or known.headers != headers:
            duplicates, metadata = _read_back(staging, build_manifest(files))
            known = KnownIndex(headers, metadata, duplicates)
        _check_duplicates(CheckpointIndex(staging, tuple(files), {}, {}), known.duplicates)
        with open(staging / PADDLE_METADATA_NAME, "xb") as file:
            file.writelines(decompressed(known.paddle_metadata))
        if prepared.memory is not None:
            prepared.memory.index = known

    commit_checkpoint(
        prepared.target,
        rendezvous,
        write_files=write_files,
        build_manifest=build_manifest,
        nbytes=prepared.nbytes,
        before_manifest=complete,
        token=prepared.token,
        overwrite=prepared.overwrite,
        timeout_seconds=prepared.timeout_seconds,
    )
    return sum(record.size for record in written)


def _check_step(step: Any) -> int | None:
    try:
        number = None if step is None else operator.index(step)
    except TypeError:
        raise CheckpointError(f"step is {step!r:.100}, not a whole number") from None
    if number is not None and number < 0:
        raise CheckpointError(f"step is {number}, and steps are counted from 0 on")
    if number is not None and number > MAX_COUNT:  # which no manifest could say
        raise CheckpointError(f"step is {number}, and a checkpoint holds at most {MAX_COUNT}; count steps from 0 on")
    return number


def _say_what_is_left_out(subjects: Subjects) -> None:
    """Warn where optimizers are bound to the model and were not given."""
    others = subjects.not_given()
    if others:
        way_out = (
            "Give optimizer=[...] with all that step the model; where they are saved apart, warnings.filterwarnings silences this"
            if subjects.steppers
            else "Give optimizer=..., or optimizer=[] where that is meant"
        )
        warn_caller(
            f"save: {subjects.say_not_given(others)} is bound to the model and was not given: its states are not saved, and no run goes on "
            f"from this checkpoint as it was. {way_out}"
        )


def _read_back(staging: Path, manifest: Manifest) -> tuple[list[Duplicate], bytes]:
    """Check that files hold all of each key; return what they hold twice, and ``0.metadata`` for them, compressed."""
    with without_garbage_collection():
        index = read_headers(staging, manifest)
        return check_complete(index), compressed(paddle_metadata(index))


def _check_duplicates(index: CheckpointIndex, duplicates: Sequence[Duplicate]) -> None:
    """Raise where ranks wrote different values for the same elements. It reads what was written twice."""
    differing = sorted(
        {
            f"'{one.key}' in {index.files[one.file].name} and {index.files[one.other_file].name}"
            for one in differing_duplicates(index, duplicates)
        }
    )
    if differing:
        raise RankFailedError(
            f"ranks gave different values for the same elements of {len(differing)} keys: {listing(differing)}; nothing was saved. Give "
            "different tensors, such as the experts of each rank, different keys or offsets"
        )
