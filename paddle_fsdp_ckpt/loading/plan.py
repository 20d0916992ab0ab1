"""What one rank will read from a checkpoint, and into what: decided and checked as a whole before anything changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..errors import IncompleteCheckpointError, MismatchError, listing
from ..layout import LOW_PRECISION
from ..optim import entry_of
from ..optimizer_states import MASTER_WEIGHT_KEY
from ..progress import ProgressLine
from ..saved_run import class_differences, read_saved_run, tied_differences
from ..shardings import StateLoad
from ..storage.base_parameter import BaseParameter
from ..storage.besides import SavedBesides
from ..storage.casts import can_cast, may_round
from ..storage.flex import piece_of
from ..storage.format import MANIFEST_NAME
from ..storage.index import CheckpointIndex
from ..storage.key_names import RESERVED_PREFIX
from ..storage.plan import plan_read
from ..storage.problems import OtherProblem, ReadProblems
from ..storage.reader import verify_first
from ..storage.reserved_keys import COMMON_KEY, without_reserved
from ..storage.salvage import salvage
from ..storage.stock import open_index
from ..subjects import ModelTensors, Stepper, Subjects
from .besides import besides_in
from .exact import plan_exact_load
from .options import PATTERNS, LoadOptions, Patterns, map_names, unused_prefixes
from .planned import KeyTarget, LoadPlan, TargetReading, counter_of
from .report import CastKey, LoadNotes, OtherShape
from .resizing import Resizing
from .saved_names import RenamedCheckpoint, rename_checkpoint
from .values import Values
from .ways_out import find_ways_out, without_states


def plan_load(path: Path, subjects: Subjects, options: LoadOptions, progress: ProgressLine) -> LoadPlan:
    """Plan how this rank loads a checkpoint. Optimizers get the states that are to be loaded, and nothing else changes.

    Args:
        path: the checkpoint.
        subjects: what was given to ``load``.
        options: what may differ.
        progress: shows how far it is where digests are checked first.

    Raises:
        CheckpointError: ``key_map`` gives something else than names.
        IncompleteCheckpointError: no checkpoint, or a file or the optimizer part of it is missing.
        CorruptCheckpointError: files contradict themselves or each other.
        MismatchError: ``key_map`` gives two names one.
    """
    names = subjects.model_keys().union(*(one.names for one in subjects.steppers))
    mapped = map_names(options.key_map, names)
    index, damaged, besides = _open(path, options)
    lacking = [name for name in damaged if not name.startswith(RESERVED_PREFIX)]
    run = replace(read_saved_run(index), is_lost=index.manifest is None and MANIFEST_NAME in damaged)
    saved = rename_checkpoint(index, run, lacking, {name: mapped.get(name, name) for name in names})
    exact = None if damaged or mapped else plan_exact_load(index, saved.run, subjects, options)
    if exact is not None:
        return replace(exact, besides=besides)
    planner = _Planner(saved, subjects, options, progress)
    planner.plan_model()
    planner.plan_optimizers()
    return replace(planner.finish(mapped, unused_prefixes(options.key_map, names), damaged), besides=besides)


def _open(path: Path, options: LoadOptions) -> tuple[CheckpointIndex, dict[str, str], SavedBesides | None]:
    """Return what there is to load from, what of the checkpoint is damaged and left out, and what a manager saved besides."""
    if not options.salvage:
        index = open_index(path, reserved=True)
        return without_reserved(index), {}, besides_in(index)
    report = salvage(path, without_manifest=not options.check_digests)
    manifest = {MANIFEST_NAME: report.manifest_problem} if report.manifest_problem is not None else {}
    besides = None if COMMON_KEY in report.damaged else besides_in(report.index)
    return without_reserved(report.index), {**report.damaged, **report.unreadable, **manifest}, besides


@dataclass
class _Planner:
    """Collects what to load, part by part, and what is wrong with it; then makes the plan."""

    saved: RenamedCheckpoint
    given: Subjects
    options: LoadOptions
    progress: ProgressLine
    targets: list[KeyTarget] = field(default_factory=list)
    kept: list[KeyTarget] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    not_asked_for: list[str] = field(default_factory=list)
    started_afresh: list[str] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)
    state_loads: list[StateLoad] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    others_of_model: list[str] = field(default_factory=list)
    base: dict[str, BaseParameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.options.parts
        model, tensors = (self.given.model, self.given.tensors) if "model" in parts else (None, ModelTensors())
        self.wanted = Subjects(model, self.given.steppers if "optimizer" in parts else (), self.given.sharding, tensors)
        self.index = self.saved.index
        self.run = self.saved.run.with_tied_names()
        self.states = self.run.states_in([*self.index.stored, *self.saved.damaged], self.given.model_keys())
        # Of tied names one has the states: the first as the checkpoint sorts them.
        owners = self.saved.run.names
        self.owner_of = {name: other for names in self.run.tied or () for other in names if other in owners for name in names}
        self.may_be_missing = Patterns(self.options.allow_missing)
        self.may_be_left_out = Patterns(self.options.allow_unexpected)
        self.may_have_other_shape = Patterns(self.options.allow_other_shape)
        self.names_of = {name: names for names in self.given.tied() for name in names}
        self.resizing = Resizing(self.saved, Patterns(self.options.resize), self.names_of, self.owner_of)

    def states_of(self, name: str) -> set[str]:
        """Return the keys of the states that the checkpoint has of a parameter."""
        return self.states.get(self.owner_of.get(name, name), set())

    def plan_model(self) -> None:
        """Plan parameters and buffers."""
        model = self.wanted.model
        if model is None:
            in_states = set().union(*self.states.values())
            self.not_asked_for += [key for key in self.index.stored if key not in in_states]
            return
        tied = self.wanted.tied()
        self.tied = tied_differences(self.run, self.index, self.wanted.model_keys(), tied)
        # The values under the other names are the same, and go to the same memory.
        others: set[str] = set()
        for names in tied:
            first = next((name for name in names if name in self.index), names[0])
            others.update(name for name in names if name != first)
            self._leave_out_others(first, names)
        self._plan_base()
        weights = self.wanted.sharding.model_weights(model)
        # Tensors without elements are not stored.
        empty = {key for key, weight in weights.items() if 0 in weight.global_shape}
        self.expected |= self.wanted.model_keys() - empty - self.base.keys()
        if self.options.cast:  # of those that are lost, who keeps something of one knows whether the master weight does
            self.expected -= {key for key in self.wanted.model_keys() if key not in self.index and self._master_of(key) is not None}
        unread = others.union(empty, self.base)
        for key, weight in weights.items():
            if key not in unread:
                target = self._model_target(key, weight)
                may_stay = self.resizing.has_other_shape(target.piece) and self._may_have_other_shape(key)
                (self.kept if may_stay else self.targets).append(target)

    def _plan_base(self) -> None:
        """Find the parameters that the checkpoint leaves to the base."""
        keys = self.wanted.model_keys()
        self.base = {name: one for name, one in self.run.base.items() if name in keys and name not in self.index}
        lacking = [self.saved.original_key(name) for name in self.run.base if name not in keys]
        lacking = sorted(name for name in lacking if not self.may_be_left_out.match(name))
        if lacking:
            self.others_of_model.append(
                f"it was saved without its base, which had {len(lacking)} parameters that the model lacks: {listing(lacking)}; load it "
                "into that model (allow_unexpected matches those that may be missing)"
            )

    def _leave_out_others(self, first: str, names: Sequence[str]) -> None:
        """Of names that are tied here and not in the checkpoint, leave out all but the first."""
        group_of = {name: group for group in self.run.tied or () for name in group}
        for name in names:
            # Stock Paddle doesn't say what is tied.
            if name in self.index and self.run.tied is not None and group_of.get(name, name) != group_of.get(first, first):
                self.left_out.add(name)
                if self.wanted.steppers:
                    self.left_out |= self.states_of(name)

    def _model_target(self, key: str, weight: ShardedWeight) -> KeyTarget:
        piece = piece_of(key, weight)
        if self.options.cast and self.index.dtypes.get(key) in (*LOW_PRECISION, None):  # None where it is lost
            master = self._master_of(key)
            if master is not None and self.index.dtypes.get(master) == piece.dtype:
                piece = replace(piece, key=master)
        self.resizing.learn(key, weight.global_shape, piece.key)
        return KeyTarget(key, self.resizing.fitted(key, key, piece), weight.local_tensor, is_substitute=piece.key != key)

    def _master_of(self, key: str) -> str | None:
        """Return the key of a parameter's master weight, where the checkpoint has one and it is whole."""
        master = f"{self.owner_of.get(key, key)}.{MASTER_WEIGHT_KEY}"
        return master if master in self.states_of(key) and master in self.index else None

    def _may_have_other_shape(self, name: str) -> bool:
        return self.may_have_other_shape.match_any(self.names_of.get(name, (name,)))

    def _state_target(self, key: str, weight: ShardedWeight) -> KeyTarget:
        source, name = self._state_source(key), key.rpartition(".")[0]
        piece = self.resizing.fitted(name, key, piece_of(source, weight))
        return KeyTarget(key, piece, weight.local_tensor, is_substitute=source == name)

    def _state_source(self, key: str) -> str:
        """Return the key of the checkpoint that holds a state."""
        name, _, state = key.rpartition(".")
        source = f"{self.owner_of.get(name, name)}.{state}"
        if self.options.cast and state == MASTER_WEIGHT_KEY and source not in self.index and name in self.index:
            return name
        return source

    def plan_optimizers(self) -> None:
        """Plan states and master weights, and let the optimizers have those that are stored."""
        if not self.run.optimizers and self.run.tied is not None and self.options.parts & {"optimizer", "learning_rate"}:
            said = "has a damaged manifest that names no optimizer" if self.saved.is_manifest_damaged else "was saved without an optimizer"
            raise IncompleteCheckpointError(f"'{self.index.path}' {said}; load it with parts={{\"model\"}}, or with optimizer=None")
        if not self.wanted.steppers:
            self.not_asked_for += [key for keys in self.states.values() for key in keys]
            return
        for stepper in self.wanted.steppers:
            differences = class_differences(self.run, self.index, stepper)
            if differences:
                self.others += differences
                self.expected |= set().union(*(self.states_of(name) for name in stepper.names))
            else:
                self._plan_optimizer(stepper)

    def _plan_optimizer(self, stepper: Stepper) -> None:
        for one in stepper.parameters:
            self.resizing.learn(one.slot.name, one.slot.shape)
        self.resizing.repeated.update(f"{state}_0" for state in entry_of(stepper.optimizer).repeated)
        stored = {name for name in stepper.names if self.states_of(name)}
        # Of what stock Paddle saved, only the states tell what was in an optimizer.
        new = {name for name in stepper.names - self.run.names if self.run.tied is not None or name not in self.index}
        new |= self._lost_without_a_trace(stepper, stored)
        new -= {one.slot.name for one in stepper.parameters if one.parameter.stop_gradient and one.slot.name in self.run.base}
        # Where a model is given its keys say so too.
        self.expected |= {name for name in new if name not in self.index and name not in self.run.base}
        self._plan_new_parameters(stepper, new)
        loading = self._begin_load(stepper, stored)
        if loading is None:
            return
        restarted = self._restarted(loading)
        if restarted:
            self.started_afresh += sorted(restarted)
            self.left_out |= set().union(*(self.states_of(name) for name in restarted))
            stored -= restarted
            loading = self._begin_load(stepper, stored)
            if loading is None:
                return
        # Of the parameters of which this rank keeps nothing it has no states; those ranks judge that do.
        elsewhere = set().union(*(self.states_of(one.slot.name) for one in stepper.parameters if not one.range.numel))
        self.expected |= {key for key in elsewhere if key in self.index}
        told = stored | new | restarted
        self.without_state += [one.slot.name for one in stepper.parameters if one.slot.name not in told and not one.parameter.stop_gradient]
        self.targets += [self._state_target(key, weight) for key, weight in loading.weights.items()]
        self.state_loads.append(loading)

    def _lost_without_a_trace(self, stepper: Stepper, stored: Collection[str]) -> set[str]:
        """Return the parameters that must have had states, of which a damaged checkpoint doesn't even have the names."""
        if not (self.saved.damaged and entry_of(stepper.optimizer).states):
            return set()
        return {name for name in stepper.names & self.run.with_gradient if name not in stored}

    def _begin_load(self, stepper: Stepper, stored: Collection[str]) -> StateLoad | None:
        try:
            return self.wanted.sharding.begin_load(stepper.optimizer, stepper.parameters, stored)
        except MismatchError as error:
            self.others.append(str(error))
            return None

    def _plan_new_parameters(self, stepper: Stepper, new: Collection[str]) -> None:
        """Let parameters that no optimizer held when they were saved start afresh where that is allowed."""
        suffixes = [f"{state}_0" for state in entry_of(stepper.optimizer).states]
        refused = []
        for name in sorted(new):
            if self.may_be_missing.match_all([f"{name}.{suffix}" for suffix in suffixes]):
                self.started_afresh.append(name)
            elif name in self.index or name in self.run.base or self.may_be_missing.match(name):
                refused.append(name)
        if refused:
            self.others.append(
                f"{len(refused)} parameters of the optimizer have no states in it, or were in no optimizer then: {listing(refused)}; "
                f"give it the same parameters, or start their states afresh with allow_missing=['{refused[0]}.*', ...]"
            )

    def _restarted(self, loading: StateLoad) -> set[str]:
        """Return the parameters that can't have all their states and may lack them, which is the only way to go on without some."""
        states: dict[str, list[str]] = defaultdict(list)
        for key in loading.weights:
            states[key.rpartition(".")[0]].append(key)
        restarted, half = set(), []
        for name, keys in states.items():
            absent = [key for key in keys if self._state_source(key) not in self.index]
            if absent and self.may_be_missing.match_all(keys):
                restarted.add(name)
            elif any(self.may_be_missing.match(key) for key in absent):
                half.append(name)
            elif absent or not any(self.resizing.has_other_shape(self._state_target(key, loading.weights[key]).piece) for key in keys):
                continue
            elif self._may_have_other_shape(name) or self.resizing.is_resized(name):
                restarted.add(name)
        if half:
            self.others.append(
                f"allow_missing matches some states of {listing(half)} and not all, and half a state is of no use; match all, "
                f"as by '{half[0]}.*', to start such parameters afresh"
            )
        return restarted

    def finish(self, mapped: dict[str, str], unused: list[str], damaged: dict[str, str]) -> LoadPlan:
        """Plan the reads, judge them, and return the plan."""
        for name in {name for one in self.wanted.steppers for name in one.names} - set(self.started_afresh):
            self.left_out -= self.states_of(name)
        self.expected |= {one.source for one in self.targets}
        targets = [one for one in self.targets if one.source in self.index]
        values = Values(self.index, self.options.cast, self.progress)
        ignored = {*self.not_asked_for, *self.left_out, *self._other_names()}
        reads = plan_read(self.index, [values.stored_piece(one) for one in targets], self.expected, ignored)
        self._check_kept_masters([*self.kept, *(one for one in self.targets if one.source not in self.index)])
        missing, problems = self._judge(reads.problems, [one.source for one in targets])
        if self.options.verify_first and not problems:
            with self.progress:
                verify_first(reads, counter_of(self.progress, reads))
        left_out = {self.saved.original_key(key) for key in {*self.left_out, *reads.problems.unexpected}}
        if not problems:
            copies = [(one, [self._state_target(key, weight) for key, weight in one.copies.items()]) for one in self.state_loads]
            problems = values.check(targets, reads, copies)
        given = (self.may_be_missing, self.may_be_left_out, self.may_have_other_shape, self.resizing.patterns)
        patterns = zip(PATTERNS, given, strict=True)
        used = [f"{name}={one!r}" for name, some in patterns for one in some.used()]
        shapes = [OtherShape(one.key, self.index.global_shape(one.source), one.piece.global_shape) for one in self.kept]
        resized = self.resizing.of([one.key for one in targets])
        return LoadPlan(
            self.index,
            self.run,
            self.options,
            self.wanted,
            TargetReading(targets, reads),
            problems,
            state_loads=self.state_loads,
            notes=LoadNotes(missing, sorted(left_out), self._casts(targets), shapes, self.started_afresh, used, resized),
            without_state=self.without_state,
            not_asked_for=sorted(self.saved.original_key(key) for key in self.not_asked_for),
            mapped=mapped,
            copied_tied=self.tied if self.options.copy_tied else [],
            unused_prefixes=unused,
            damaged=damaged,
            base=self.base,
        )

    def _other_names(self) -> set[str]:
        """Return the keys that are only other names, which the objects lack, of what the checkpoint has for them; as a tied head's."""
        groups = [set(names) for names in self.run.tied or () if any(name in self.expected and name in self.index for name in names)]
        return set().union(*groups) - self.expected

    def _judge(self, problems: ReadProblems, sources: Sequence[str]) -> tuple[list[str], ReadProblems]:
        """Return the keys that may be missing, and what is wrong besides what the options allow."""
        states = {self._state_source(key) for loading in self.state_loads for key in loading.weights}
        allowed = {key for key in problems.missing if key not in states and self.may_be_missing.match(key)}
        unexpected = sorted(map(self.saved.original_key, problems.unexpected))
        nothing_allowed = bool(self.options.allow_other_shape) and self.wanted.model is not None and not sources
        problems = replace(
            problems,
            missing=tuple(key for key in problems.missing if key not in allowed),
            unexpected=tuple(key for key in unexpected if not self.may_be_left_out.match(key)),
            tied=() if self.options.copy_tied else tuple(map(OtherProblem, self.tied)),
            others=tuple(map(OtherProblem, [*self.others_of_model, *self.others])),
            # Without a model there may be nothing to match: SGD has no states.
            nothing_matched=(problems.nothing_matched and bool(self.expected or self.wanted.model is not None)) or nothing_allowed,
        )
        return sorted(allowed), self._with_ways_out(problems, states.union(*self.states.values()), sources) if problems else problems

    def _with_ways_out(self, problems: ReadProblems, states: set[str], sources: Sequence[str]) -> ReadProblems:
        others_of_model = problems.tied or self.others_of_model or problems.nothing_matched
        reshaped = {one.key.rpartition(".")[0] if one.key in states else one.key for one in problems.wrong_shape}
        has_other_parts = self.wanted.model is not None and self.options.parts != {"model"}
        return replace(
            problems,
            wrong_shape=without_states(problems.wrong_shape, states, self.owner_of),
            ways_out=find_ways_out(
                problems,
                self.saved,
                self.wanted,
                states,
                wanted=sources,
                resizable=[name for name in reshaped if self.resizing.dimension(name) is not None],
                weights_may_fit=has_other_parts and not others_of_model,
                may_rename=self.options.key_map is None,
            ),
        )

    def _check_kept_masters(self, missing: Sequence[KeyTarget]) -> None:
        kept = [one.key for one in missing if one.piece.dtype in LOW_PRECISION]
        if kept and not self.wanted.steppers and not self.wanted.sharding.masters_follow_singly:
            self.others.append(
                f"in Paddle's fused buffers, {listing(kept)} can't keep master weights where those of others follow the model; load the "
                "optimizer too"
            )

    def _casts(self, targets: Sequence[KeyTarget]) -> list[CastKey]:
        casts = []
        for one in targets:
            saved, now = self.index.dtypes[one.source], one.piece.dtype
            if one.is_substitute or can_cast(saved, now):
                casts.append(
                    CastKey(one.key, self.saved.original_key(one.source), saved, now, can_cast(saved, now) and may_round(saved, now))
                )
        return casts
