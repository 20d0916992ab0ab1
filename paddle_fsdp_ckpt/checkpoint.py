"""``save`` and ``load``: a checkpoint directory written by all ranks together, and read at any world size."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import warnings
import zlib
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, MismatchError, RankFailedError, listing
from .fsdp import named_buffers, runtime_of
from .host_memory import bytes_of, destinations
from .optim import describe_learning_rate, optimizer_list, restore_learning_rate, states_restored_on_error
from .rendezvous import open_rendezvous
from .shardings import StateLoad, group_of
from .state_dict import weights_to_store
from .storage.agreement import COORDINATOR, Rendezvous, exchange
from .storage.commit import DEFAULT_TIMEOUT_SECONDS, commit_checkpoint
from .storage.flex import piece_of, write_paddle_metadata
from .storage.format import FileRecord, JsonValue, Manifest, check_json, rank_file_name, utc_now
from .storage.index import CheckpointIndex, read_headers, read_index
from .storage.plan import ReadPlan, check_complete, plan_read
from .storage.reader import PARTIAL_STATE, check_duplicates, execute_read
from .storage.writer import write_rank_file
from .subjects import Stepper, Subjects, check_subjects
from .version import __version__


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        path: the checkpoint.
        step: the step it was saved at, or None.
        world_size: how many ranks saved it.
        extra_state: what was given to ``save``.
        loaded: how many keys this rank loaded.
        without_state: parameters of the optimizers for which the checkpoint has no state, because they never had a gradient.
            They have none now either.
        not_asked_for: keys of the checkpoint that belong to a part (model or optimizer) that was not given.
        differences: in words, settings of the optimizers that were saved otherwise and were left as they are.
    """

    path: Path
    step: int | None
    world_size: int
    extra_state: JsonValue
    loaded: int
    without_state: list[str] = field(default_factory=list)
    not_asked_for: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


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
    buffers, optimizer states, master weights, and the learning rate with its scheduler's state. Not saved are random number generators,
    gradients and, so far, the other hyper-parameters.

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
    rendezvous, token = _open(model, optimizers)
    prepared: list[_Saving] = []

    def prepare() -> JsonValue:
        saving = _prepare(path, model, optimizers, step, extra_state, rendezvous.rank)
        prepared.append(saving)
        extra = _digest(json.dumps(extra_state, sort_keys=True))
        return [str(saving.target), saving.subjects.digest(), saving.step, overwrite, extra, _buffer_checksums(model)]

    exchange(rendezvous, f"{token}/prepare", prepare, _check_same_saving, timeout_seconds)
    saving = prepared[0]

    def write_files(directory: Path) -> FileRecord:
        pieces = [(piece_of(key, weight), bytes_of(weight.local_tensor)) for key, weight in saving.weights.items()]
        return write_rank_file(directory / rank_file_name(rendezvous.rank), pieces)

    def build_manifest(files: Sequence[FileRecord]) -> Manifest:
        return Manifest(
            step=saving.step,
            world_size=rendezvous.world_size,
            created=utc_now(),
            versions={"paddle": paddle.__version__, "paddle_fsdp_ckpt": __version__},
            optimizers=[_describe_optimizer(one) for one in saving.subjects.steppers],
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
        before_manifest=complete,
        token=token,
        overwrite=overwrite,
        timeout_seconds=timeout_seconds,
    )


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Layer | None = None,
    optimizer: Any = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> LoadReport:
    """Load a checkpoint into a model and its optimizers, at any world size. All ranks must call it.

    Strict: every key of the given objects must be in the checkpoint and the reverse, with the same shape and dtype, every
    element covered. Each rank reads only what it keeps. Loading only a model lets the master weights of its optimizers follow.

    Args:
        path: a directory that ``save`` made, the same on all ranks.
        model: sharded by ``fully_shard``, ours or Paddle's own, or plain.
        optimizer: bound to the model, or a list of such; plain as the model is plain; fresh or used. Its states become those of
            the checkpoint. Without a model, its master weights become those of the checkpoint too: load the model as well.
        timeout_seconds: how long to wait for the slowest rank at each point where ranks wait for each other.

    Returns:
        What was loaded, with ``extra_state`` as it was saved.

    Raises:
        IncompleteCheckpointError: no checkpoint there, a file of it is missing, or it has no optimizer state and one was asked for.
        MismatchError: checkpoint and objects differ; the message lists how.
        CorruptCheckpointError: the files contradict themselves or each other.
        RankFailedError: another rank raised one of these.
        Where the message does not say otherwise, nothing was changed on any rank.
    """
    optimizers = optimizer_list(optimizer)
    rendezvous, token = _open(model, optimizers)
    plans: list[_LoadPlan] = []
    with ExitStack() as stack:

        def plan_all() -> JsonValue:
            where = _absolute(path)
            subjects = check_subjects(model, optimizers)
            for one in subjects.steppers:
                stack.enter_context(states_restored_on_error(one.optimizer))
            plan = _plan(where, subjects)
            plans.append(plan)
            text = plan.reads.index.manifest.to_json()
            return [str(where), subjects.digest(), _digest(text)]

        exchange(rendezvous, f"{token}/plan", plan_all, _check_same_loading, timeout_seconds)
    plan = plans[0]
    try:
        exchange(rendezvous, f"{token}/read", plan.read, lambda _: None, timeout_seconds)
    except RankFailedError as error:
        if PARTIAL_STATE in str(error):
            raise
        raise RankFailedError(f"{error}; {PARTIAL_STATE}") from error
    finally:
        _announce(plan.subjects)
    manifest = plan.reads.index.manifest
    _reset_gradients(plan.subjects, manifest)
    return LoadReport(
        plan.reads.index.path,
        manifest.step,
        manifest.world_size,
        manifest.extra_state,
        len(plan.weights),
        plan.without_state,
        plan.not_asked_for,
        _restore_learning_rates(plan.subjects, _saved_optimizers(plan.reads.index)),
    )


@dataclass(frozen=True)
class _Saving:
    """What one rank is about to save, and where."""

    target: Path
    subjects: Subjects
    step: int | None
    weights: dict[str, ShardedWeight]


def _prepare(
    path: str | os.PathLike[str], model: nn.Layer | None, optimizers: Sequence[Any], step: object, extra_state: JsonValue, rank: int
) -> _Saving:
    target = _absolute(path)
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
    return _Saving(target, subjects, _check_step(step), weights_to_store(subjects, rank))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
        _check_same("save", what, values, "nothing was written", shown=what in shown)
    buffers = [values[-1] for values in ranks]
    differing = [name for name, checksum in buffers[COORDINATOR].items() if any(other[name] != checksum for other in buffers)]
    if differing:
        warnings.warn(
            f"buffers differ between ranks, and rank {COORDINATOR}'s are saved: {listing(differing)}; a resumed run has these everywhere",
            stacklevel=2,
        )


def _buffer_checksums(model: nn.Layer) -> dict[str, int]:
    return {name: zlib.crc32(bytes_of(buffer)) for name, buffer in named_buffers(model)}


def _check_same_loading(ranks: list[JsonValue]) -> None:
    for what, values in zip(("path", "model and optimizers", "checkpoint"), zip(*ranks, strict=True), strict=True):
        _check_same("load", what, values, "nothing was changed", shown=what == "path")


def _check_same(call: str, what: str, values: Sequence[JsonValue], consequence: str, *, shown: bool) -> None:
    for rank, value in enumerate(values):
        if value != values[COORDINATOR]:
            difference = (
                f": rank {COORDINATOR} {values[COORDINATOR]!r} and rank {rank} {value!r}"
                if shown
                else f", rank {rank}'s from rank {COORDINATOR}'s"
            )
            raise RankFailedError(f"{call}: {what} must be the same on all ranks, and differ{difference}; {consequence}")


@dataclass(frozen=True)
class _LoadPlan:
    """What one rank will read, and into what."""

    subjects: Subjects
    weights: dict[str, ShardedWeight]
    state_loads: Sequence[StateLoad]
    reads: ReadPlan
    without_state: list[str]
    not_asked_for: list[str]

    def read(self) -> None:
        with destinations([weight.local_tensor for weight in self.weights.values()]) as views:
            execute_read(self.reads, views)
        for one in self.state_loads:
            one.finish()


def _plan(path: Path, subjects: Subjects) -> _LoadPlan:
    index = read_index(path)
    model_keys = subjects.model_keys()
    states = _stored_states(index, model_keys)
    expected: set[str] = set()
    not_asked_for: list[str] = []
    without_state: list[str] = []
    weights: dict[str, ShardedWeight] = {}
    state_loads: list[StateLoad] = []
    if subjects.model is None:
        in_states = set().union(*states.values())
        not_asked_for += [key for key in index.stored if key not in in_states]
    else:
        tied = subjects.tied()
        _check_tied(index, model_keys, tied)
        # The values under the other names are the same, and go to the same memory.
        others = {name for names in tied for name in names[1:]}
        # Tensors without elements are not stored.
        found = subjects.sharding.model_weights(subjects.model)
        empty = {key for key, weight in found.items() if 0 in weight.global_shape}
        weights.update({key: weight for key, weight in found.items() if key not in others and key not in empty})
        expected |= model_keys - empty
    if subjects.steppers:
        _check_optimizers(index, subjects.steppers)
    else:
        not_asked_for += [key for keys in states.values() for key in keys]
    for one in subjects.steppers:
        # Where a model is given its keys say so too.
        expected |= {name for name in one.names if name not in states}
        stored = {name for name in one.names if states.get(name)}
        loading = subjects.sharding.begin_load(one.optimizer, one.parameters, stored)
        # Of the parameters of which this rank keeps nothing it has no states; those ranks judge that do.
        expected |= set().union(*(states.get(other.slot.name, set()) for other in one.parameters if not other.range.numel))
        without_state += [p.slot.name for p in one.parameters if p.slot.name not in stored and not p.parameter.stop_gradient]
        weights.update(loading.weights)
        state_loads.append(loading)
    targets = [piece_of(key, weight) for key, weight in weights.items()]
    reads = plan_read(index, targets, expected, not_asked_for)
    reads.problems.raise_if_any()
    check_duplicates(reads)
    for loading in state_loads:
        _read_copies(index, loading)
    return _LoadPlan(subjects, weights, state_loads, reads, without_state, not_asked_for)


def _read_copies(index: CheckpointIndex, loading: StateLoad) -> None:
    """Read what an optimizer must judge before anything changes, and let it."""
    if loading.copies:
        targets = [piece_of(key, weight) for key, weight in loading.copies.items()]
        with destinations([weight.local_tensor for weight in loading.copies.values()]) as views:
            execute_read(plan_read(index, targets, (), index.stored), views)
        loading.check()


def _stored_states(index: CheckpointIndex, model_keys: Collection[str]) -> dict[str, set[str]]:
    """Return the keys of the checkpoint that are states or master weights, by the parameter's name."""
    states: dict[str, set[str]] = {name: set() for one in _saved_optimizers(index) for name in one.names}
    for key in index.stored:
        name, _, state = key.rpartition(".")
        if name in states and state.endswith("_0") and key not in model_keys:
            states[name].add(key)
    return states


def _check_tied(index: CheckpointIndex, model_keys: Collection[str], tied: Sequence[Sequence[str]]) -> None:
    """Raise where names that are of one tensor in the model are of several in the checkpoint, or the reverse."""
    saved, mine = {tuple(names) for names in index.manifest.tied}, {tuple(names) for names in tied}
    only_saved = [names for names in sorted(saved - mine) if all(name in model_keys for name in names)]
    only_mine = [names for names in sorted(mine - saved) if all(name in index for name in names)]
    if only_saved or only_mine:
        sentences = [f"{' = '.join(names)} is one tied parameter in the checkpoint, and not in the model" for names in only_saved]
        sentences += [f"{' = '.join(names)} is one tied parameter in the model, and not in the checkpoint" for names in only_mine]
        raise MismatchError(
            f"the checkpoint '{index.path}' doesn't fit the objects to load; nothing was changed: {listing(sentences)}. Tie the same "
            "parameters of the model as when it was saved"
        )


@dataclass(frozen=True)
class _SavedOptimizer:
    """What a manifest says about one optimizer."""

    cls: str
    names: frozenset[str]
    with_gradient: frozenset[str]
    learning_rate: dict[str, JsonValue]


def _saved_optimizers(index: CheckpointIndex) -> list[_SavedOptimizer]:
    try:
        return [_saved_optimizer(one) for one in index.manifest.optimizers]
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"the manifest of '{index.path}' doesn't describe its optimizers as save does ({error!r}); load another checkpoint"
        ) from error


def _saved_optimizer(value: JsonValue) -> _SavedOptimizer:
    names = frozenset(name for group in value["groups"] for name in group["parameters"])
    return _SavedOptimizer(value["class"], names, frozenset(value["with_gradient"]), dict(value["learning_rate"]))


def _check_optimizers(index: CheckpointIndex, steppers: Sequence[Stepper]) -> None:
    """Raise unless each parameter that the checkpoint has is stepped by the same class of optimizer as when it was saved."""
    saved = _saved_optimizers(index)
    if not saved:
        raise IncompleteCheckpointError(f"'{index.path}' was saved without an optimizer; load it with optimizer=None")
    class_of = {name: one.cls for one in saved for name in one.names}
    way_out = "or load the model only, with optimizer=None"
    for one in steppers:
        other = sorted({class_of[name] for name in one.names if name in class_of} - {one.cls})
        if other:
            raise MismatchError(
                f"'{index.path}' holds the state of {listing(other)}, and the optimizer is {one.cls}; its states don't fit, and "
                f"nothing was changed. Use the same class, {way_out}"
            )
    unknown = [name for one in steppers for name in sorted(one.names) if name not in class_of and name in index]
    if unknown:
        raise MismatchError(
            f"the checkpoint '{index.path}' doesn't fit the objects to load; nothing was changed: {len(unknown)} parameters "
            f"of the optimizer were in no optimizer when it was saved: {listing(unknown)}. Give it the same parameters, {way_out}"
        )


def _announce(subjects: Subjects) -> None:
    """Let go of gathered weights, which are out of date now, and let master weights that were not loaded follow the model."""
    stepped = [one for stepper in subjects.steppers for one in stepper.parameters]
    subjects.sharding.values_written(subjects.model, [stepper.optimizer for stepper in subjects.steppers], stepped)


def _reset_gradients(subjects: Subjects, manifest: Manifest) -> None:
    """Let the parameters that had a gradient when they were saved have one of zeros, and the others none.

    Paddle's ``clear_grad()`` leaves zeros, and a parameter with zeros is stepped by its momentum where one without is not.
    """
    with_gradient = {name for one in manifest.optimizers for name in one["with_gradient"]}
    for stepper in subjects.steppers:
        for one in stepper.parameters:
            subjects.sharding.reset_gradient(one, one.slot.name in with_gradient)


def _describe_optimizer(stepper: Stepper) -> dict[str, JsonValue]:
    with_gradient = [one.slot.name for one in stepper.parameters if stepper.sharding.has_gradient(one)]
    return {
        "class": stepper.cls,
        "groups": [{"parameters": names} for names in stepper.groups()],
        "with_gradient": with_gradient,
        "learning_rate": describe_learning_rate(stepper.optimizer),
    }


def _restore_learning_rates(subjects: Subjects, saved: Sequence[_SavedOptimizer]) -> list[str]:
    """Give each optimizer's scheduler the state of the one that was saved, and return what differs otherwise."""
    differences = []
    for stepper in subjects.steppers:
        for one in saved:
            if stepper.names & one.names:
                differences.append(restore_learning_rate(stepper.optimizer, one.learning_rate))
                break
    return [text for text in differences if text is not None]


def _open(model: object, optimizers: Sequence[object]) -> tuple[Rendezvous, str]:
    """Return where the ranks over which the objects are sharded meet, and a token for this meeting.

    Whatever the objects are: what is wrong with them must be said at the meeting.
    """
    return open_rendezvous(group_of(model, optimizers))


def _absolute(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"path is {path!r:.100}; give the directory of a checkpoint, as a str or Path")
    return Path(os.path.abspath(text))
