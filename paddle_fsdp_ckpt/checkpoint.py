"""``save`` and ``load``: a checkpoint directory written by all ranks together, and read at any world size."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .errors import IncompleteCheckpointError, MismatchError
from .fsdp import default_group, named_buffers, named_parameters, runtime_of
from .host_memory import bytes_of, destinations
from .optim import (
    binding_of,
    create_states,
    drop_states,
    optimizer_shards,
    parameter_groups,
    state_suffixes,
    states_restored_on_error,
)
from .rendezvous import open_rendezvous
from .state_dict import existing_states, sharded_state_dict, weights_to_store
from .storage.agreement import Rendezvous, exchange
from .storage.commit import DEFAULT_TIMEOUT_SECONDS, commit_checkpoint
from .storage.flex import piece_of, write_paddle_metadata
from .storage.format import FileRecord, JsonValue, Manifest, check_json, rank_file_name, utc_now
from .storage.index import CheckpointIndex, read_index
from .storage.plan import ReadPlan, plan_read
from .storage.reader import check_duplicates, execute_read
from .storage.writer import write_rank_file
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
    """

    path: Path
    step: int | None
    world_size: int
    extra_state: JsonValue
    loaded: int
    without_state: list[str] = field(default_factory=list)
    not_asked_for: list[str] = field(default_factory=list)


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

    Nothing of model and optimizers changes. Each rank writes what it keeps, without gathering anything.

    Args:
        path: the directory, the same on all ranks; missing or empty.
        model: sharded by ``fully_shard``, or a plain model, the same on every rank, of which the first rank saves all.
        optimizer: bound to the model, or a list of such.
        step: noted in the checkpoint.
        extra_state: JSON values (None, bool, int, float, str, list, dict with str keys), the same on all ranks; the first rank's are saved.
        overwrite: replace a checkpoint that is at ``path``, as a whole.
        timeout_seconds: how long to wait for the slowest rank at each point where ranks wait for each other.

    Raises:
        CheckpointError: on all ranks, where any failed; ``path`` is as it was before.
    """
    rendezvous, token = _open(model)
    check_json(extra_state, "extra_state")
    def write_files(directory: Path) -> FileRecord:
        weights = weights_to_store(model, _as_list(optimizer), rendezvous.rank)
        pieces = [(piece_of(key, weight), bytes_of(weight.local_tensor)) for key, weight in weights.items()]
        return write_rank_file(directory / rank_file_name(rendezvous.rank), pieces)

    def build_manifest(files: Sequence[FileRecord]) -> Manifest:
        return Manifest(
            step=step,
            world_size=rendezvous.world_size,
            created=utc_now(),
            versions={"paddle": paddle.__version__, "paddle_fsdp_ckpt": __version__},
            optimizers=[_describe_optimizer(one) for one in _as_list(optimizer)],
            extra_state=extra_state,
            files=tuple(files),
        )

    commit_checkpoint(
        Path(path),
        rendezvous,
        write_files=write_files,
        build_manifest=build_manifest,
        before_manifest=lambda staging, files: write_paddle_metadata(staging, build_manifest(files)),
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
        path: a directory that ``save`` made.
        model: sharded by ``fully_shard``, or plain.
        optimizer: bound to the model, or a list of such; fresh or used. Its states become those of the checkpoint.
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
    optimizers = _as_list(optimizer)
    if model is None and not optimizers:
        raise MismatchError("load: give a model, an optimizer, or both")
    rendezvous, token = _open(model, optimizers)
    plans: list[_LoadPlan] = []
    with ExitStack() as stack:
        for one in optimizers:
            stack.enter_context(states_restored_on_error(one))
        exchange(rendezvous, f"{token}/plan", lambda: plans.append(_plan(Path(path), model, optimizers)), lambda _: None, timeout_seconds)
    plan = plans[0]
    exchange(rendezvous, f"{token}/read", plan.read, lambda _: None, timeout_seconds)
    _announce(model, optimizers)
    manifest = plan.reads.index.manifest
    return LoadReport(
        Path(path), manifest.step, manifest.world_size, manifest.extra_state, len(plan.weights), plan.without_state, plan.not_asked_for
    )


@dataclass(frozen=True)
class _LoadPlan:
    """What one rank will read, and into what."""

    weights: dict[str, ShardedWeight]
    reads: ReadPlan
    without_state: list[str]
    not_asked_for: list[str]

    def read(self) -> None:
        with destinations([weight.local_tensor for weight in self.weights.values()]) as views:
            execute_read(self.reads, views)


def _plan(path: Path, model: nn.Layer | None, optimizers: Sequence[Any]) -> _LoadPlan:
    index = read_index(path)
    weights: dict[str, ShardedWeight] = {}
    expected: set[str] = set()
    not_asked_for: list[str] = []
    without_state: list[str] = []
    parameter_names = _parameter_names(model, optimizers)
    for one in optimizers:
        keys, absent = _match_optimizer_state(index, one)
        expected |= keys
        without_state += absent
        weights.update(existing_states(one))
    if model is None:
        not_asked_for += [key for key in index.stored if key in parameter_names]
    else:
        weights.update(sharded_state_dict(model))
        expected |= parameter_names | {name for name, _ in named_buffers(model)}
    if not optimizers:
        not_asked_for += [key for key in index.stored if key not in expected and _is_state_key(key, parameter_names)]
    targets = [piece_of(key, weight) for key, weight in weights.items()]
    reads = plan_read(index, targets, expected | set(not_asked_for))
    reads.problems.raise_if_any()
    check_duplicates(reads)
    return _LoadPlan(weights, reads, without_state, not_asked_for)


def _match_optimizer_state(index: CheckpointIndex, optimizer: Any) -> tuple[set[str], list[str]]:
    """Let the optimizer have states for just those parameters for which the checkpoint has some.

    Returns:
        The checkpoint's keys that belong to the optimizer, and the names of the parameters without state.
    """
    cls = type(optimizer).__name__
    saved = index.manifest.optimizers
    if not saved:
        raise IncompleteCheckpointError(f"'{index.path}' was saved without an optimizer; load it with optimizer=None")
    shards = optimizer_shards(optimizer)
    names = {shard.slot.name for shard in shards}
    mine = [one for one in saved if names & {name for group in one["groups"] for name in group["parameters"]}]
    if mine and all(one["class"] != cls for one in mine):
        raise MismatchError(
            f"'{index.path}' holds the state of {mine[0]['class']}, and the optimizer is {cls}; its states don't fit. Use the same class, "
            "or load the model only, with optimizer=None"
        )
    suffixes = state_suffixes(optimizer)
    keys_of = {shard.slot.name: {f"{shard.slot.name}.{suffix}" for suffix in suffixes} & index.keys() for shard in shards}
    absent = [shard for shard in shards if not keys_of[shard.slot.name]]
    drop_states(optimizer, {id(shard) for shard in absent})
    create_states(optimizer, {id(shard) for shard in shards if keys_of[shard.slot.name]})
    return set().union(*keys_of.values()), [shard.slot.name for shard in absent if not shard.parameter.stop_gradient]


def _announce(model: nn.Layer | None, optimizers: Sequence[Any]) -> None:
    """Let go of gathered weights, which are out of date now, and let master weights that were not loaded follow the model."""
    runtime = None if model is None else runtime_of(model)
    if runtime is not None:
        for unit in runtime.units:
            unit.changed()
        loaded = {id(shard) for one in optimizers for shard in optimizer_shards(one)}
        runtime.parameters_written([shard for shard in runtime.shards if id(shard) not in loaded])


def _parameter_names(model: nn.Layer | None, optimizers: Sequence[Any]) -> set[str]:
    names = {name for one in optimizers for shard in optimizer_shards(one) for name in shard.slot.names}
    return names if model is None else names | {name for named in named_parameters(model) for name in named.names}


def _is_state_key(key: str, parameter_names: Collection[str]) -> bool:
    """Tell whether a key of the checkpoint is a state, or the master weight, of one of these parameters."""
    name, _, state = key.rpartition(".")
    return name in parameter_names and state.endswith("_0")


def _describe_optimizer(optimizer: Any) -> dict[str, JsonValue]:
    groups = [{"parameters": [parameter._shard.slot.name for parameter in group["params"]]} for group in parameter_groups(optimizer)]
    return {"class": type(optimizer).__name__, "groups": groups}


def _open(model: nn.Layer | None, optimizers: Sequence[Any] = ()) -> tuple[Rendezvous, str]:
    """Return where the ranks over which the objects are sharded meet, and a token for this meeting."""
    runtime = None if model is None else runtime_of(model)
    for one in optimizers:
        if binding_of(one) is not None:
            runtime = runtime or optimizer_shards(one)[0].unit.runtime
    return open_rendezvous(default_group() if runtime is None else runtime.communicator.group)


def _as_list(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
