"""What a checkpoint of a manager holds beside a model and its optimizers, and how it is given back."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from paddle.optimizer.lr import LRScheduler

from ..differing_values import describe_values
from ..errors import CheckpointError, MismatchError, listing
from ..fsdp import why_without_values
from ..host_memory import destinations
from ..loading.besides import say_not_restored
from ..loading.planned import counter_of
from ..meeting import digest_of
from ..optim import (
    describe_grad_scaler,
    describe_scheduler,
    restore_grad_scaler,
    restore_scheduler,
    warn_of_pending_update,
)
from ..progress import ProgressLine
from ..saving import Kept
from ..storage.agreement import COORDINATOR
from ..storage.besides import read_named, read_scalers, write_named, write_scalers
from ..storage.flex import piece_of
from ..storage.index import CheckpointIndex, read_damaged_manifest, read_index, read_manifest
from ..storage.json_values import JsonValue, check_json
from ..storage.key_names import say_key
from ..storage.manifest import Manifest
from ..storage.plan import ReadPlan, plan_read
from ..storage.problems import CASTABLE
from ..storage.reader import execute_read, verify_first
from ..storage.reserved_keys import COMMON_KEY, METRICS_KEY, is_sharded_key, key_of_sharded, rank_key, sharded_key, sharded_keys
from ..storage.salvage import salvage as salvage_checkpoint
from .extra_state import encode_extra_state
from .kept_values import DAMAGED, KeptValues, read_kept_values, say_damage
from .random_state import capture_random_state, random_state_for, restore_random_state
from .several import by_name, left_names, missing_names


@dataclass(frozen=True)
class TrainerState:
    """What a trainer keeps beside a model and its optimizers.

    Attributes:
        lr_schedulers: those that were given by themselves, by name; see :func:`.several.by_name`.
        grad_scalers: the scalers, the same.
        sharded: key -> this rank's part of a tensor.
    """

    lr_schedulers: Mapping[str, LRScheduler] = field(default_factory=dict)
    grad_scalers: Mapping[str, Any] = field(default_factory=dict)
    sharded: Mapping[str, ShardedWeight] = field(default_factory=dict)


def check_trainer_state(lr_scheduler: Any, grad_scaler: Any, sharded: Any) -> TrainerState:
    """Check what was given.

    Raises:
        CheckpointError: something is not what it must be.
    """
    schedulers = by_name(lr_scheduler, "lr_scheduler")
    for one in schedulers.values():
        if not isinstance(one, LRScheduler):
            raise CheckpointError(f"lr_scheduler: {type(one).__name__} is not one of paddle.optimizer.lr, nor a list or dict of such")
    weights = {} if sharded is None else sharded
    if not isinstance(weights, Mapping) or not all(type(key) is str and isinstance(one, ShardedWeight) for key, one in weights.items()):
        raise CheckpointError("sharded: give a dict of ShardedWeight by str, as sharded_state_dict returns it")
    problems = [f"'{key}': {why}" for key, one in weights.items() if (why := why_without_values(one.local_tensor)) is not None]
    if problems:
        raise CheckpointError(f"sharded: tensors that can't be saved or restored: {listing(problems)}")
    return TrainerState(schedulers, by_name(grad_scaler, "grad_scaler"), weights)


def keep_trainer_state(state: TrainerState, extra_state: Any, rank_state: Any, metrics: Mapping[str, float], rank: int) -> tuple[Kept, str]:
    """Return what a save is to hold of all this on this rank, and a digest of what must be the same on all.

    Raises:
        CheckpointError: it can't be saved.
    """
    for scaler in state.grad_scalers.values():
        warn_of_pending_update(scaler)
    schedulers, scalers = _described(state)
    common = encode_extra_state(
        {"extra_state": extra_state, "lr_schedulers": write_named(schedulers), "grad_scaler": write_scalers(scalers)}, ""
    )
    encoded_metrics = json.dumps(metrics).encode()
    own = encode_extra_state({"random": capture_random_state(), "rank_state": rank_state, "sharded": list(state.sharded)}, "")
    data = {rank_key(rank): own}
    if rank == COORDINATOR:
        data[COMMON_KEY] = common
        if metrics:
            data[METRICS_KEY] = encoded_metrics
    kept = Kept(data, {sharded_key(key): weight for key, weight in state.sharded.items()})
    return kept, digest_of(f"{common.hex()} {json.dumps(metrics, sort_keys=True)}")


def _described(state: TrainerState) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """Return what is saved of schedulers and of scalers, by name."""
    return (
        {name: describe_scheduler(one) for name, one in state.lr_schedulers.items()},
        {name: describe_grad_scaler(one) for name, one in state.grad_scalers.items()},
    )


def describe_common(state: TrainerState, extra_state: Any, metrics: Mapping[str, float]) -> JsonValue:
    """Return what says, of the values of which the digests of :func:`keep_trainer_state` differ, which ones do."""
    schedulers, scalers = _described(state)
    values = {"extra_state": extra_state, "lr_scheduler": schedulers, "grad_scaler": scalers, "metrics": dict(metrics)}
    return describe_values(values, lambda value: encode_extra_state(value, ""))


def is_json(value: Any) -> bool:
    """Tell whether a value can stand in a manifest, where ``load`` and people find it."""
    try:
        check_json(value, "")
    except (ValueError, RecursionError):
        return False
    return True


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as a dict of floats.

    Raises:
        CheckpointError: they are something else.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise CheckpointError(f"metrics is {metrics!r:.100}; give a dict of numbers by name")
    checked = {}
    given: Mapping[str, Any] = metrics or {}
    for name, value in given.items():
        try:
            if np.iscomplexobj(value) or isinstance(value, (str, bytes)):  # float() takes numpy's real parts, and texts
                raise TypeError
            checked[name] = float(value)
        except (TypeError, ValueError, OverflowError, AssertionError):  # the last one of Paddle, of a tensor of several values
            raise CheckpointError(f"metrics[{name!r:.100}] is {value!r:.100}, not a number") from None
        if type(name) is not str:
            raise CheckpointError(f"metrics has the key {name!r:.100}, which is no str")
    return checked


@dataclass(frozen=True)
class SavedState:
    """What this rank read from a checkpoint, and will be given back once the model is loaded.

    Attributes:
        manifest: of the checkpoint.
        extra_state: as it was given to the save.
        rank_states: rank -> what it gave: of this rank, or of all where other ranks than now saved.
        random: this rank's states of random number generators; None where none were saved, empty where none are wanted.
        lr_schedulers: what was saved of schedulers, by name.
        grad_scalers: the same of scalers.
        reads: of the sharded tensors; None where none were given.
        sharded: all such keys in the checkpoint; empty where none were given.
        not_asked_for: in words, what is in the checkpoint and was not given to be restored, as far as this rank knows.
        metrics: the step's.
        lost: in words, what of all this is damaged and was left out, and what becomes of it, as far as this rank looked.
        is_manifest_damaged: whether what the manifest says may be wrong.
    """

    manifest: Manifest
    extra_state: Any
    rank_states: dict[int, Any]
    random: dict[str, JsonValue] | None
    lr_schedulers: dict[str, Any]
    grad_scalers: dict[str, Any]
    reads: ReadPlan | None
    sharded: list[str]
    not_asked_for: list[str]
    metrics: dict[str, float]
    lost: list[str] = field(default_factory=list)
    is_manifest_damaged: bool = False

    def digest(self) -> str:
        """Return a digest of what must be the same on all ranks."""
        return digest_of(self.manifest.to_json())

    def apply(self, state: TrainerState) -> list[str]:
        """Give all but the sharded tensors back, and return, in words, what differs from what was saved."""
        # Where what was saved of them is lost, there are none.
        schedulers = [(one, name) for name, one in state.lr_schedulers.items() if name in self.lr_schedulers]
        scalers = [(one, name) for name, one in state.grad_scalers.items() if name in self.grad_scalers]
        differences = [restore_scheduler(one, self.lr_schedulers[name]) for one, name in schedulers]
        differences += [restore_grad_scaler(one, self.grad_scalers[name]) for one, name in scalers]
        if self.random is None:
            differences.append("no random number states were saved")
        elif self.random:
            differences += restore_random_state(self.random)
        return [text for text in differences if text is not None]

    def not_restored(self, state: TrainerState, parts: Collection[str]) -> list[str]:
        """Say what was not given to be restored, of which schedulers may have come back with their optimizers; ``parts`` of a load."""
        left = [one for name, one in self.lr_schedulers.items() if name not in state.lr_schedulers]
        others = [what for what in self.not_asked_for if not what.startswith("lr_scheduler")]
        return say_not_restored(left, others, self.manifest.optimizers, parts, "restore")

    def read_sharded(self, state: TrainerState, progress: ProgressLine) -> None:
        """Read the sharded tensors into those that were given."""
        if self.reads is not None:
            with progress, destinations([weight.local_tensor for weight in state.sharded.values()]) as views:
                execute_read(self.reads, views, on_read=counter_of(progress, self.reads))


def read_trainer_state(
    path: Path, state: TrainerState, rank: int, world_size: int, progress: ProgressLine, *, random_state: bool, salvage: bool
) -> SavedState:
    """Read what a checkpoint holds for this rank, and check all of it. Nothing is changed.

    Args:
        path: the step.
        state: what is to be restored.
        rank: this one.
        world_size: how many there are.
        progress: shows how far it is.
        random_state: whether the random number generators are to be restored.
        salvage: whether what is damaged is left out, but for tensors that were given by ``sharded``.

    Raises:
        CheckpointError: as :func:`~.loading.load`.
    """
    manifest, lost = _read_manifest(path, salvage=salvage)
    is_manifest_damaged = bool(lost)
    every = range(manifest.world_size)
    kept = read_kept_values(path, manifest, [rank] if manifest.world_size == world_size else every, salvage=salvage)
    common = kept.common or {"extra_state": manifest.extra_state, "lr_schedulers": [], "grad_scaler": None}
    schedulers, scalers = read_named(common["lr_schedulers"]), read_scalers(common["grad_scaler"])
    missing: list[str] = []
    not_asked_for: list[str] = []
    for what, given, saved in (("lr_scheduler", state.lr_schedulers, schedulers), ("grad_scaler", state.grad_scalers, scalers)):
        missing += missing_names(what, given, saved) if COMMON_KEY not in kept.lost else ()
        not_asked_for += left_names(what, given, saved)
    if missing:
        raise MismatchError(f"'{path}' was saved without {' and '.join(missing)}; nothing was changed. Restore without, or save with")
    reads, sharded, damaged = _plan_sharded(path, state, progress, salvage=salvage)
    if not state.sharded and any(one["sharded"] for one in kept.own.values()):
        not_asked_for.append("sharded")
    own = kept.own
    if rank_key(rank) in kept.lost and not own:  # what the others kept may do
        own = read_kept_values(path, manifest, every, salvage=True).own
    random = _random_state(rank, world_size, manifest, own, is_lost=bool(kept.lost)) if random_state else {}
    lost += [*_say_lost(kept, manifest, has_random_state=bool(random), random_state=random_state), *damaged]
    return SavedState(
        manifest,
        common["extra_state"],
        {number: one["rank_state"] for number, one in kept.own.items()},
        random,
        schedulers,
        scalers,
        reads,
        sharded,
        not_asked_for,
        kept.metrics,
        lost,
        is_manifest_damaged,
    )


def _read_manifest(path: Path, *, salvage: bool) -> tuple[Manifest, list[str]]:
    """Return the manifest, and in words what is wrong with it."""
    try:
        return read_manifest(path), []
    except DAMAGED as error:
        if not salvage:
            raise
        try:
            return read_damaged_manifest(path), [f"step, extra_state and settings may be wrong, since {say_damage(error, path)}"]
        except CheckpointError:
            raise error from None


def _say_lost(kept: KeptValues, manifest: Manifest, *, has_random_state: bool, random_state: bool) -> list[str]:
    """Say what can't be read of what the manager kept, and what becomes of it."""
    generators = (
        "its random number generators go on from what other ranks kept"
        if has_random_state
        else "its random number generators stay as they are"
    )
    of_rank = f"its rank_state is lost, and {generators}" if random_state else "its rank_state is lost"
    extra = "extra_state is None" if manifest.extra_state is None else "extra_state is taken from the manifest"
    effects = {
        COMMON_KEY: f"{extra}, and schedulers and scalers stay as they are, but for schedulers of optimizers that are loaded",
        METRICS_KEY: "no metrics are known",
    }
    return [f"{say_key(key)} can't be read, since {why}; {effects.get(key, of_rank)}" for key, why in kept.lost.items()]


def _random_state(
    rank: int, world_size: int, manifest: Manifest, own: dict[int, dict[str, Any]], *, is_lost: bool
) -> dict[str, JsonValue] | None:
    if not own:
        return {} if is_lost else None
    return random_state_for(rank, world_size, {number: one["random"] for number, one in own.items()}, manifest.world_size)


def _plan_sharded(
    path: Path, state: TrainerState, progress: ProgressLine, *, salvage: bool
) -> tuple[ReadPlan | None, list[str], list[str]]:
    """Plan how the sharded tensors are read, check what is read, and return which there are, and in words which are damaged."""
    if not state.sharded:
        return None, [], []
    index, damaged = _open_sharded(path, salvage=salvage)
    saved = sorted(sharded_keys(index))
    told = [f"{say_key(sharded_key(key))} is lost: {why}" for key, why in damaged.items()]
    needed = [f"'{key}' ({why})" for key, why in damaged.items() if key in state.sharded]
    if needed:
        raise MismatchError(
            f"sharded: '{path}' has no whole values any more of {listing(needed)}; nothing was changed. Leave these out of sharded=, and "
            "start them afresh (from the weights, for an average)"
        )
    if not state.sharded.keys() <= set(saved):
        return None, saved, told  # what all ranks gave is compared with it
    pieces = [piece_of(sharded_key(key), weight) for key, weight in state.sharded.items()]
    # What this rank holds nothing of, another one does.
    reads = plan_read(index, pieces, (), index.stored)
    problems = reads.problems
    found = [*problems.wrong_shape, *problems.wrong_dtype, *problems.uncovered]
    if found:
        texts = listing(f"'{key_of_sharded(one.key)}': {one.text.removesuffix(f' {CASTABLE}')}" for one in found)
        raise MismatchError(
            f"sharded: '{path}' holds these otherwise than they were given; nothing was changed: {texts}. Give tensors like those that "
            "were saved, or restore without sharded="
        )
    problems.raise_if_any()
    with progress:
        verify_first(reads, counter_of(progress, reads))
    return reads, saved, told


def _open_sharded(path: Path, *, salvage: bool) -> tuple[CheckpointIndex, dict[str, str]]:
    """Return the index in which sharded tensors are, and which of them are damaged and left out, and why."""
    if not salvage:
        return read_index(path), {}
    report = salvage_checkpoint(path)
    return report.index, {key_of_sharded(key): why for key, why in report.damaged.items() if is_sharded_key(key)}
