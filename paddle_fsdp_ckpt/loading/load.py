"""The call itself: what is wrong is judged for all ranks at once, then each reads, then the rest follows."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle

from ..base_weights import ParameterPart, note_told, other_base, own_sums, parameter_parts, say_other_base
from ..errors import CorruptCheckpointError, MismatchError, RankFailedError
from ..lora_layers import scaling_differences
from ..meeting import absolute_path, check_same, open_meeting
from ..optim import WholeParameter, keeps_states, note_states, optimizer_list, states_restored_on_error
from ..optimizer_states import is_master_weight
from ..progress import long_progress
from ..saved_run import SavedRun, hyperparameter_differences, left_optimizers, restore_learning_rates
from ..storage.agreement import COORDINATOR, exchange
from ..storage.commit import DEFAULT_TIMEOUT_SECONDS
from ..storage.index import without_garbage_collection
from ..storage.json_values import JsonValue
from ..storage.problems import OtherProblem, merge_problems
from ..storage.read_lock import while_reading
from ..storage.reader import PARTIAL_STATE
from ..subjects import Models, Stepper, Subjects, check_subjects
from ..warn import warn_caller
from .besides import say_all_not_restored
from .options import PARTS, PATTERNS, KeyMap, check_options
from .plan import plan_load
from .planned import LoadPlan
from .report import LoadNotes, LoadReport, merge_notes
from .ways_out import with_words_on_masters

_LOG = logging.getLogger("paddle_fsdp_ckpt")


@while_reading("path")
def load(
    path: str | os.PathLike[str],
    *,
    model: Models | None = None,
    optimizer: Any = None,
    parts: Iterable[str] | None = None,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    allow_other_shape: Iterable[str] = (),
    resize: Iterable[str] = (),
    cast: bool = False,
    key_map: KeyMap | None = None,
    copy_tied: bool = False,
    verify_first: bool = False,
    salvage: bool = False,
    allow_other_base: bool = False,
    check_digests: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> LoadReport:
    """Load a checkpoint into a model and its optimizers, at any world size. All ranks must call it alike.

    Strict: every key of the given objects must be in the checkpoint and the reverse, with the same shape and dtype, every
    element covered; what may differ must be said, and is in the report. Each rank reads only what it keeps. Where only a model is
    loaded, the master weights of its optimizers follow: of those bound to it, and of those given.

    Args:
        path: a directory that ``save`` made, or stock Paddle's ``save_state_dict``; the same on all ranks.
        model: sharded by ``fully_shard``, ours or Paddle's own, or plain; or a dict of several, as ``save`` takes it. Some of those that
            were saved: give these, and say ``allow_unexpected=["critic.*"]`` of the others.
        optimizer: bound to the model, or a list or dict of such; plain as the model is plain; fresh or used. Its states become those of
            the checkpoint. Without a model, its master weights become those of the checkpoint too: load the model as well. An empty list
            where states are left out on purpose; else each optimizer of the model of which the checkpoint holds something
            and that is not given is warned of, unless ``parts`` are.
        parts: some of ``"model"`` (parameters and buffers), ``"optimizer"`` (states and master weights) and ``"learning_rate"`` (the
            scheduler's state). By default all that the given objects have. The others stay as they are.
        allow_missing: patterns, such as ``"head.*"``, of keys that the checkpoint may lack; ``*`` and ``?`` stand for any text and any
            character, ``[...]`` for some characters. Parameters and buffers then keep their values. A parameter that lacks states
            starts afresh, and patterns must match all its states (``"head.weight.*"``): half a state is of no use.
        allow_unexpected: patterns of keys, as the checkpoint names them, that the objects may lack. They are not loaded.
        allow_other_shape: patterns of names of parameters and buffers that may have another shape in the checkpoint, such as
            ``["embed.weight", "head.*"]`` of a vocabulary that has grown. They keep their values, and their states start afresh.
        resize: patterns of names of parameters and buffers, such as the same, that may have another size in one dimension, which any
            is: of an embedding ``[vocabulary, width]`` the rows, of a Linear's weight ``[width, vocabulary]`` the columns. The leading
            ones that both have are loaded, with their master weights and states. Those that the checkpoint lacks keep the weights and
            states that they have, which in a new optimizer are those of rows that no batch had yet; those that it has besides are left
            out. States that can't be resized (all of NAdam and RAdam, and of ASGD by columns) start afresh. Of the names of
            one tensor that several have, one pattern is enough. Goes before ``allow_other_shape``.
        cast: convert between floating point types by value, to the nearest. A float32 parameter is then taken from the master weight
            of a low-precision one, and a missing master weight from the parameter. A value too large for its new type is an error.
        key_map: where names differ: a function from the name of a parameter or buffer in the model to its name in the checkpoint, or a
            dict from beginnings of such names to what stands there for them; the longest that fits counts. ``{"_layers.": ""}`` loads
            into a model that is wrapped now, ``{"": "_layers."}`` from one that was. States follow their parameters.
        copy_tied: where names are of one tensor in the checkpoint and of several in the model, give each the value and the states;
            where it is the reverse, take those of the first name.
        verify_first: check all digests of what is read before anything changes. It reads twice. Otherwise they are checked
            while reading, and an error leaves a part of the checkpoint in the objects.
        salvage: of a checkpoint that ``save`` made and that is damaged, load what is intact. What is not counts as missing, so that
            ``allow_missing`` must say what may be, and is in the report's ``damaged``. Every rank reads the whole checkpoint first.
        allow_other_base: where the checkpoint was saved with ``trainable_only``, take the model's other parameters as they are, though they
            are not what they were then.
        check_digests: whether what is read is compared with its digests. Without, damage of values is not found; that of manifest and
            headers is. Without, and with ``salvage``, a checkpoint whose manifest is lost is loaded by the headers of its files, as one of
            stock Paddle's is: parameters and states, but no step, hyper-parameters, learning rate and ``extra_state``.
        timeout_seconds: how long to wait for the slowest rank at each point where ranks wait for each other.

    Returns:
        What was loaded, with ``extra_state`` as it was saved, and all that differed.

    Raises:
        CheckpointError: an argument is not what it must be.
        IncompleteCheckpointError: no checkpoint there, a file of it is missing, or it has no optimizer state and one was asked for.
        MismatchError: checkpoint and objects differ; the message lists how, on all ranks.
        CorruptCheckpointError: the files contradict themselves or each other.
        RankFailedError: another rank raised one of these.
        Where the message does not say otherwise, nothing was changed on any rank.
    """
    optimizers = optimizer_list(optimizer)
    rendezvous, token = open_meeting("load", model, optimizers)
    planned: list[tuple[Subjects, LoadPlan]] = []
    told: list[JsonValue] = []
    progress = long_progress("loading", rendezvous.rank)
    with ExitStack() as stack:

        def plan_all() -> JsonValue:
            options = check_options(
                [name for name, there in (("model", model is not None), ("optimizer", optimizers)) if there],
                allow_missing=allow_missing,
                allow_unexpected=allow_unexpected,
                allow_other_shape=allow_other_shape,
                resize=resize,
                cast=cast,
                key_map=key_map,
                parts=parts,
                copy_tied=copy_tied,
                verify_first=verify_first,
                salvage=salvage,
                allow_other_base=allow_other_base,
                check_digests=check_digests,
            )
            where = absolute_path(path)
            subjects = check_subjects(model, optimizers)
            for one in subjects.steppers:
                stack.enter_context(states_restored_on_error(one.optimizer))
            plan = plan_load(where, subjects, options, progress)
            planned.append((subjects, plan))
            alike = [str(where), subjects.digest(), plan.digest(), options.digest(plan.mapped)]
            told.append(own_sums(subjects, _base_parts(subjects, plan)) if plan.base else None)
            return {
                "alike": alike,
                "problems": plan.problems.to_json(),
                "notes": plan.notes.to_json(),
                "base": told[0],
                "states": [keeps_states(one.optimizer) for one in plan.subjects.steppers],
            }

        with without_garbage_collection():
            verdict = exchange(rendezvous, f"{token}/plan", plan_all, lambda ranks: _judge(ranks, *planned[0]), timeout_seconds)
        if planned[0][1].base:
            note_told(planned[0][0], told[0])
        if verdict["problems"] is not None:
            raise (CorruptCheckpointError if verdict["corrupt"] else MismatchError)(verdict["problems"])
    subjects, plan = planned[0]
    # What starts afresh, or keeps its values, is judged by the ranks that keep something of it.
    notes = merge_notes([verdict["notes"]])
    for stepper, there in zip(plan.subjects.steppers, verdict["states"], strict=True):
        note_states(stepper.optimizer, there)
    if (optimizer is None or optimizers) and parts is None and rendezvous.rank == COORDINATOR:
        _say_what_is_left_out(plan)
    try:
        with without_garbage_collection():
            exchange(rendezvous, f"{token}/read", lambda: plan.read(progress), lambda _: None, timeout_seconds)
    except RankFailedError as error:
        if PARTIAL_STATE in str(error):
            raise
        raise RankFailedError(f"{error}; {PARTIAL_STATE}") from error
    finally:
        _announce(subjects, plan, notes)
    _reset_gradients(plan.subjects, plan.run)
    differences, has_rates = restore_learning_rates(subjects.steppers, plan.run) if "learning_rate" in plan.options.parts else ([], False)
    differences += left_optimizers(plan.subjects, plan.run)
    differences += hyperparameter_differences(plan.subjects.steppers, plan.run)
    if plan.subjects.model is not None:
        differences += scaling_differences(plan.subjects.model, plan.run.lora)
    if plan.subjects.steppers and plan.subjects.model is None and any(map(is_master_weight, plan.index.stored)):
        differences.append(
            "master weights were loaded and the model's weights were not; where those are others, the first step replaces them by the "
            "checkpoint's"
        )
    if rendezvous.rank == COORDINATOR:
        for one in differences:
            _LOG.warning("loaded '%s': %s", plan.index.path, one)
    if plan.subjects.steppers and "learning_rate" not in plan.options.parts:
        differences.append("the learning rate and its schedule were left as they are, since parts lacks 'learning_rate'")
    found = {"model": True, "optimizer": bool(plan.run.optimizers), "learning_rate": has_rates}
    parts = [part for part in PARTS if part in plan.options.parts and found[part]]
    return _report(plan, notes, parts, differences, verdict["other_base"])


def _say_what_is_left_out(plan: LoadPlan) -> None:
    """Warn where optimizers are bound to the model, the checkpoint holds something of such, and they were not given."""
    subjects, saved = plan.subjects, plan.run.names
    others = subjects.not_given()
    if subjects.steppers:
        others = [one for one in others if not saved.isdisjoint(one.names)]
    elif not (plan.not_asked_for or saved):
        return
    if others:
        way_out = (
            'Give optimizer=[...] with all that step the model; or parts={"model", "optimizer", "learning_rate"}'
            if subjects.steppers
            else 'Give optimizer=...; or parts={"model"}, or optimizer=[],'
        )
        warn_caller(
            f"load: {subjects.say_not_given(others)} is bound to the model and was not given: the states and learning rate in "
            f"'{plan.index.path}' are not loaded, and the run goes on otherwise. {way_out} where that is meant"
        )


def _base_parts(subjects: Subjects, plan: LoadPlan) -> list[ParameterPart]:
    return [part for part in parameter_parts(subjects) if not plan.base.keys().isdisjoint(part.names)]


def _judge(ranks: list[JsonValue], subjects: Subjects, plan: LoadPlan) -> JsonValue:
    """Return what is wrong on any rank, in words, or None, and what all of them have to report."""
    for what, values in zip(
        ("path", "model and optimizers", "checkpoint", "options"), zip(*(one["alike"] for one in ranks), strict=True), strict=True
    ):
        check_same("load", what, values, "nothing was changed", shown=what == "path")
    problems = with_words_on_masters(merge_problems(Path(ranks[0]["alike"][0]), [one["problems"] for one in ranks]))
    other = other_base(subjects, _base_parts(subjects, plan), [one["base"] for one in ranks], plan.base) if plan.base else []
    if other and not plan.options.allow_other_base:
        problems = replace(problems, others=(*problems.others, OtherProblem(say_other_base(other, len(plan.base)))))
    if problems.nothing_matched and not problems.unexpected:
        problems = replace(problems, lost=plan.lost)
    return {
        "problems": f"{problems}{'' if problems.lost else plan.damage}" if problems else None,
        "corrupt": bool(problems.conflicts or problems.lost),
        "notes": merge_notes([one["notes"] for one in ranks]).to_json(),
        "other_base": other,
        "states": [any(some) for some in zip(*(one["states"] for one in ranks), strict=True)],
    }


def _report(plan: LoadPlan, notes: LoadNotes, parts: list[str], differences: list[str], other_base: list[str]) -> LoadReport:
    run, options = plan.run, plan.options
    optimizers = [] if plan.index.manifest is None else plan.index.manifest.optimizers
    given = [f"{name}={one!r}" for name in PATTERNS for one in getattr(options, name)]
    return LoadReport(
        plan.index.path,
        run.step,
        run.world_size,
        run.extra_state,
        plan.reading.count,
        parts=parts,
        without_state=plan.without_state,
        not_asked_for=plan.not_asked_for,
        differences=differences,
        # Ranks that keep nothing of a parameter don't know that all its states start afresh.
        missing=[key for key in notes.missing if key.rpartition(".")[0] not in notes.started_afresh],
        other_shape=notes.other_shape,
        resized=notes.resized,
        started_afresh=notes.started_afresh,
        unexpected=notes.unexpected,
        casts=notes.casts,
        mapped=plan.mapped,
        copied_tied=plan.copied_tied,
        damaged=plan.damaged,
        base=sorted(plan.base),
        other_base=other_base,
        not_restored=say_all_not_restored(plan.besides, plan.index.path, optimizers, parts),
        unused_options=[one for one in given if one not in notes.used_options] + [f"key_map={one!r}" for one in plan.unused_prefixes],
    )


def _announce(subjects: Subjects, plan: LoadPlan, notes: LoadNotes) -> None:
    """Let go of gathered weights, which are out of date now, and let master weights that were not loaded follow the model."""
    loaded = plan.subjects
    stepped = [one for stepper in loaded.steppers for one in stepper.parameters]
    kept = _kept_names(plan, notes)
    loaded.sharding.values_written(loaded.model, [stepper.optimizer for stepper in loaded.steppers], stepped, kept)
    # What is cut knows its optimizers; a plain model doesn't.
    if loaded.model is not None and not loaded.steppers:
        for stepper in subjects.steppers:
            _let_masters_follow(stepper, kept)


def _kept_names(plan: LoadPlan, notes: LoadNotes) -> set[str]:
    """Return all names of the parameters and buffers that keep their values, the same on every rank; ``notes`` are of all ranks."""
    reshaped, lacking = {one.key for one in notes.other_shape}, {*notes.missing, *plan.base}
    for names in plan.subjects.tied():
        if not reshaped.isdisjoint(names):
            reshaped.update(names)
        elif not lacking.issuperset(names):  # it has the values that are there under another name
            lacking.difference_update(names)
    return reshaped | lacking


def _let_masters_follow(stepper: Stepper, kept: Collection[str]) -> None:
    masters = stepper.optimizer._master_weights
    for one in stepper.parameters:
        master = masters.get(one.parameter.name)
        if isinstance(one, WholeParameter) and master is not None and one.slot.name not in kept:
            with paddle.no_grad():
                paddle.assign(one.parameter.astype(master.dtype), master)


def _reset_gradients(subjects: Subjects, run: SavedRun) -> None:
    """Let the parameters that had a gradient when they were saved have one of zeros, and the others none.

    Paddle's ``clear_grad()`` leaves zeros, and a parameter with zeros is stepped by its momentum where one without is not.
    """
    with_gradient = run.with_gradient
    for stepper in subjects.steppers:
        for name, one in zip(stepper.names_in_order, stepper.parameters, strict=True):
            subjects.sharding.reset_gradient(one, name in with_gradient)
