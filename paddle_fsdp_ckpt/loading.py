"""``load``: a checkpoint directory read into a model and its optimizers, at any world size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .errors import RankFailedError
from .host_memory import destinations
from .meeting import absolute_path, check_same, open_meeting
from .optim import optimizer_list, states_restored_on_error
from .saved_run import SavedRun, check_optimizers, check_tied, read_saved_run, restore_learning_rates
from .shardings import StateLoad
from .storage.agreement import exchange
from .storage.commit import DEFAULT_TIMEOUT_SECONDS
from .storage.flex import piece_of
from .storage.format import JsonValue
from .storage.index import CheckpointIndex, read_index
from .storage.plan import ReadPlan, plan_read
from .storage.reader import PARTIAL_STATE, check_duplicates, execute_read
from .subjects import Subjects, check_subjects


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
    rendezvous, token = open_meeting(model, optimizers)
    plans: list[_LoadPlan] = []
    with ExitStack() as stack:

        def plan_all() -> JsonValue:
            where = absolute_path(path)
            subjects = check_subjects(model, optimizers)
            for one in subjects.steppers:
                stack.enter_context(states_restored_on_error(one.optimizer))
            plan = _plan(where, subjects)
            plans.append(plan)
            return [str(where), subjects.digest(), plan.reads.index.digest()]

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
    run = plan.run
    _reset_gradients(plan.subjects, run)
    return LoadReport(
        plan.reads.index.path,
        run.step,
        run.world_size,
        run.extra_state,
        len(plan.weights),
        plan.without_state,
        plan.not_asked_for,
        restore_learning_rates(plan.subjects.steppers, run),
    )


def _check_same_loading(ranks: list[JsonValue]) -> None:
    for what, values in zip(("path", "model and optimizers", "checkpoint"), zip(*ranks, strict=True), strict=True):
        check_same("load", what, values, "nothing was changed", shown=what == "path")


@dataclass(frozen=True)
class _LoadPlan:
    """What one rank will read, and into what."""

    subjects: Subjects
    run: SavedRun
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
    run = read_saved_run(index)
    states = run.states_in(index.stored, model_keys)
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
        check_tied(index, run, model_keys, tied)
        # The values under the other names are the same, and go to the same memory.
        others = {name for names in tied for name in names[1:]}
        # Tensors without elements are not stored.
        found = subjects.sharding.model_weights(subjects.model)
        empty = {key for key, weight in found.items() if 0 in weight.global_shape}
        weights.update({key: weight for key, weight in found.items() if key not in others and key not in empty})
        expected |= model_keys - empty
    if subjects.steppers:
        check_optimizers(index, run, subjects.steppers)
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
    return _LoadPlan(subjects, run, weights, state_loads, reads, without_state, not_asked_for)


def _read_copies(index: CheckpointIndex, loading: StateLoad) -> None:
    """Read what an optimizer must judge before anything changes, and let it."""
    if loading.copies:
        targets = [piece_of(key, weight) for key, weight in loading.copies.items()]
        with destinations([weight.local_tensor for weight in loading.copies.values()]) as views:
            execute_read(plan_read(index, targets, (), index.stored), views)
        loading.check()


def _announce(subjects: Subjects) -> None:
    """Let go of gathered weights, which are out of date now, and let master weights that were not loaded follow the model."""
    stepped = [one for stepper in subjects.steppers for one in stepper.parameters]
    subjects.sharding.values_written(subjects.model, [stepper.optimizer for stepper in subjects.steppers], stepped)


def _reset_gradients(subjects: Subjects, run: SavedRun) -> None:
    """Let the parameters that had a gradient when they were saved have one of zeros, and the others none.

    Paddle's ``clear_grad()`` leaves zeros, and a parameter with zeros is stepped by its momentum where one without is not.
    """
    with_gradient = run.with_gradient
    for stepper in subjects.steppers:
        for one in stepper.parameters:
            subjects.sharding.reset_gradient(one, one.slot.name in with_gradient)
