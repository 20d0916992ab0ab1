"""What a checkpoint says about the run that it was saved from, beside the values: its optimizers, and which names are tied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from .errors import IncompleteCheckpointError, listing
from .lora_layers import lora_a_of
from .optim import (
    CATALOG,
    describe_learning_rate,
    differences,
    entry_of,
    restore_learning_rate,
    say_learning_rate,
    schedule_of,
    takes_learning_rate,
)
from .storage.base_parameter import BaseParameter
from .storage.comparison import have_same_values
from .storage.index import CheckpointIndex
from .storage.json_values import JsonValue
from .subjects import Stepper, Subjects, say_held

Described = TypeVar("Described")

_MASTER_WEIGHT = "w"
_STATES = {_MASTER_WEIGHT}.union(*(entry.states for entry in CATALOG.values()))
"""What keys call states and master weights, without the "_0" at their end."""

_SAYS_LESS = "of what class the optimizer was, nor its hyper-parameters, learning rate and step; they were left as they are"
_STOCK_SAYS_LESS = f"stock Paddle wrote the checkpoint, which doesn't say {_SAYS_LESS}"
_NOTHING_SAYS = f"the checkpoint's manifest is lost, and nothing else says {_SAYS_LESS}"


@dataclass(frozen=True)
class SavedOptimizer:
    """What a checkpoint says about one optimizer.

    Attributes:
        cls: name of its class; None where a checkpoint of stock Paddle doesn't say.
        names: the parameters that it held; of stock Paddle's those with states.
        with_gradient: those that had a gradient.
        learning_rate: see :func:`~.optim.describe_learning_rate`.
        groups: see :func:`~.optim.describe_hyperparameters`.
    """

    cls: str | None
    names: frozenset[str]
    with_gradient: frozenset[str]
    learning_rate: dict[str, JsonValue]
    groups: tuple[JsonValue, ...] = ()

    def with_names(self, change: Callable[[Iterable[str]], Iterable[str]]) -> SavedOptimizer:
        """Return the same with other names of parameters."""
        groups = tuple({**group, "parameters": sorted(change(group["parameters"]))} for group in self.groups)
        return replace(self, names=frozenset(change(self.names)), with_gradient=frozenset(change(self.with_gradient)), groups=groups)


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint says about the run that it was saved from.

    Attributes:
        step: the training step, or None.
        world_size: how many ranks saved it.
        extra_state: the caller's own.
        optimizers: those that were saved.
        tied: the sorted names of each tensor that had several; None where a checkpoint of stock Paddle doesn't say.
        base: by each of its names, what a parameter was that was left out since it didn't train.
        lora: by the name of its ``lora_A``, what a LoRA layer multiplied the product of its matrices by.
        is_lost: whether the checkpoint is one of ours whose manifest is lost, which says no more than one of stock Paddle.
    """

    step: int | None
    world_size: int
    extra_state: JsonValue
    optimizers: tuple[SavedOptimizer, ...]
    tied: frozenset[tuple[str, ...]] | None
    base: Mapping[str, BaseParameter] = field(default_factory=dict)
    lora: Mapping[str, float] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def with_gradient(self) -> set[str]:
        """The parameters that had a gradient."""
        return set().union(*(one.with_gradient for one in self.optimizers))

    @property
    def names(self) -> set[str]:
        """The parameters that an optimizer held."""
        return set().union(*(one.names for one in self.optimizers))

    def with_tied_names(self) -> SavedRun:
        """Return the same with all names of tied parameters, not only the first ones, among those that optimizers held."""
        if not self.tied:
            return self
        groups = {name: names for names in self.tied or () for name in names}

        def spread(names: Iterable[str]) -> set[str]:
            return {other for name in names for other in groups.get(name, (name,))}

        return replace(self, optimizers=tuple(one.with_names(spread) for one in self.optimizers))

    def renamed(self, rename: Callable[[str], str]) -> SavedRun:
        """Return the same with other names of parameters."""
        optimizers = tuple(one.with_names(lambda names: map(rename, names)) for one in self.optimizers)

        def renamed(by_name: Mapping[str, Described]) -> dict[str, Described]:
            return {rename(name): one for name, one in by_name.items()}

        tied = None if self.tied is None else frozenset(tuple(sorted(map(rename, names))) for names in self.tied)
        return replace(self, optimizers=optimizers, tied=tied, base=renamed(self.base), lora=renamed(self.lora))

    def states_in(self, keys: Iterable[str], model_keys: Iterable[str]) -> dict[str, set[str]]:
        """Return which of the keys are states or master weights, by the name of each parameter that an optimizer held."""
        others = set(model_keys)
        states: dict[str, set[str]] = {name: set() for one in self.optimizers for name in one.names}
        for key in keys:
            name, _, state = key.rpartition(".")
            if name in states and state.endswith("_0") and key not in others:
                states[name].add(key)
        return states


def read_saved_run(index: CheckpointIndex) -> SavedRun:
    """Read what a checkpoint's manifest says about its run, or what the keys of a checkpoint of stock Paddle do."""
    manifest = index.manifest
    if manifest is None:
        names = frozenset(name for name, _ in _stock_states(index.stored))
        return SavedRun(None, len(index.files), None, (SavedOptimizer(None, names, names, {}),) if names else (), None)
    optimizers = tuple(_saved_optimizer(one) for one in manifest.optimizers)
    names_of = {name: names for names in manifest.tied for name in names}
    base = {name: one for first, one in (manifest.base or {}).items() for name in names_of.get(first, (first,))}
    lora = {lora_a_of(layer): scaling for layer, scaling in manifest.lora.items()}
    return SavedRun(manifest.step, manifest.world_size, manifest.extra_state, optimizers, frozenset(manifest.tied), base, lora)


def _stock_states(keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield parameter and state of each key that is one of a state, as far as keys tell."""
    for key in keys:
        name, dot, state = key.rpartition(".")
        if dot and state.endswith("_0") and state[:-2] in _STATES:
            yield name, state[:-2]


def _saved_optimizer(value: JsonValue) -> SavedOptimizer:
    groups = tuple({"optimizer": value["class"], **group} for group in value["groups"])
    names = frozenset(name for group in groups for name in group["parameters"])
    return SavedOptimizer(value["class"], names, names.difference(value["without_gradient"]), value["learning_rate"], groups)


def describe_optimizer(stepper: Stepper) -> dict[str, JsonValue]:
    """Return what a manifest says about an optimizer."""
    return {
        "class": stepper.cls,
        "groups": [{"parameters": one["parameters"], "settings": one["settings"]} for one in stepper.first_hyperparameters],
        "without_gradient": [
            name for name, one in zip(stepper.names_in_order, stepper.parameters, strict=True) if not stepper.sharding.has_gradient(one)
        ],
        "learning_rate": describe_learning_rate(stepper.optimizer),
    }


def without_gradients(optimizers: JsonValue, dropped: set[str]) -> list[JsonValue]:
    """Return what :func:`describe_optimizer` returned of each, with these parameters among those without gradient."""
    changed: list[JsonValue] = []
    for one in optimizers:
        held = [name for group in one["groups"] for name in group["parameters"]]
        bare = dropped | set(one["without_gradient"])
        changed.append({**one, "without_gradient": [name for name in held if name in bare]})
    return changed


def tied_differences(run: SavedRun, index: CheckpointIndex, model_keys: set[str], tied: Sequence[Sequence[str]]) -> list[str]:
    """Say which names are of one tensor in the model and of several in the checkpoint, or the reverse.

    Where the checkpoint doesn't say, the values under such names are read and compared.

    Args:
        run: what the checkpoint says.
        index: where its values lie.
        model_keys: the keys of the model.
        tied: the sorted names of each tensor of the model that has several.

    Raises:
        CorruptCheckpointError: a file changed underneath.
    """
    mine = {tuple(names) for names in tied}
    only_mine = [names for names in sorted(mine - (run.tied or set())) if all(name in index for name in names)]
    if run.tied is None:
        differing = [names for names in only_mine if not have_same_values(index, names)]
        return [f"{' = '.join(names)} is one tied parameter in the model, and has other values under each name" for names in differing]
    only_saved = [names for names in sorted(run.tied - mine) if all(name in model_keys for name in names)]
    sentences = [f"{' = '.join(names)} is one tied parameter in the checkpoint, and not in the model" for names in only_saved]
    return sentences + [f"{' = '.join(names)} is one tied parameter in the model, and not in the checkpoint" for names in only_mine]


def class_differences(run: SavedRun, index: CheckpointIndex, stepper: Stepper) -> list[str]:
    """Say where the states that a checkpoint has of an optimizer's parameters are those of another class of optimizer.

    Raises:
        IncompleteCheckpointError: stock Paddle wrote it, and it has none.
    """
    if run.tied is None:
        return _stock_differences(index, stepper)
    classes = {one.cls for one in run.optimizers if one.cls is not None and not stepper.names.isdisjoint(one.names)}
    other = sorted(classes - {stepper.cls})
    return [_say_other_class(one, stepper) for one in other]


def _say_other_class(saved: str, stepper: Stepper) -> str:
    """Say why the states of another class of optimizer can't be taken."""
    said = f"it holds the states of {saved}, and the optimizer is {stepper.cls}"
    kept, keeps = CATALOG.get(saved), entry_of(stepper.optimizer).states
    if kept is None:
        return f"{said}; what {saved} keeps is not known here"
    if kept.states.keys() != keeps.keys():
        return f"{said}, which keeps {listing(keeps) or 'none'} and not {listing(kept.states) or 'nothing'}"
    rules = "AdamW takes weight decay from the weights, and Adam adds it to the gradient and so to its moments"
    why = f"other rules: {rules}" if {saved, stepper.cls} == {"Adam", "AdamW"} else "other rules, as far as is known"
    return f"{said}: both keep {listing(keeps)}, but step by {why}. Make {saved} again, or start a new {stepper.cls} from the weights"


def _stock_differences(index: CheckpointIndex, stepper: Stepper) -> list[str]:
    """Say where the states in a checkpoint of stock Paddle can't be those of the optimizer.

    Raises:
        IncompleteCheckpointError: there are none.
    """
    kept = entry_of(stepper.optimizer).states
    held = {state for name, state in _stock_states(index.stored) if name in stepper.names} - {_MASTER_WEIGHT}
    if kept and not held:
        others = sorted({name for name, state in _stock_states(index.stored) if state != _MASTER_WEIGHT})
        way_out = (
            f"It has states of others: {listing(others)}; where these are the same by other names, give key_map; or leave {stepper.cls} "
            "out of the optimizers that you give, which then stays as it is"
            if others
            else 'If it was saved without an optimizer, load it with parts={"model"}, or with optimizer=None'
        )
        raise IncompleteCheckpointError(f"'{index.path}' has no states of the parameters of {stepper.cls}; nothing was changed. {way_out}")
    if held - kept.keys():
        return [f"it holds {listing(sorted(held))} of parameters, and {stepper.cls} keeps {listing(kept)}, so its states don't fit"]
    return []


def restore_learning_rates(steppers: Sequence[Stepper], run: SavedRun) -> tuple[list[str], bool]:
    """Give each optimizer's scheduler the state of the one that was saved.

    Returns:
        What differs otherwise, in words, and whether each optimizer goes on with the schedule, or the number, that was saved.
    """
    if run.tied is None:
        return _open_questions(steppers, run), False
    sentences, taken = [], 0
    for sharing in _by_schedule(steppers):
        optimizer, names = sharing[0].optimizer, frozenset[str]().union(*(one.names for one in sharing))
        rates = [one.learning_rate for one in run.optimizers if not names.isdisjoint(one.names)]
        if rates:
            others = [rate for number, rate in enumerate(rates) if rate not in rates[:number]][1:]
            taken += 0 if others else takes_learning_rate(optimizer, rates[0]) * len(sharing)
            sentences.append(restore_learning_rate(optimizer, rates[0]))
            sentences += [_say_dropped(rate, sharing) for rate in others]
    return [text for text in sentences if text is not None], taken == len(steppers)


def _by_schedule(steppers: Sequence[Stepper]) -> list[list[Stepper]]:
    """Return optimizers that share a scheduler together, and those that don't alone."""
    sharing: dict[int, list[Stepper]] = {}
    for one in steppers:
        sharing.setdefault(id(schedule_of(one.optimizer) or one), []).append(one)
    return list(sharing.values())


def _say_dropped(rate: dict[str, JsonValue], sharing: Sequence[Stepper]) -> str:
    """Say that the run had another learning rate than the one that optimizers of one schedule, or a single one, were given back."""
    return (
        f"{' and '.join(dict.fromkeys(one.cls for one in sharing))}: the run had {say_learning_rate(rate)} besides, for others of the "
        "parameters, which was not restored: make an optimizer with a learning rate of its own for them, as the run did"
    )


def left_optimizers(subjects: Subjects, run: SavedRun) -> list[str]:
    """Say which optimizers stepped parameters of the model when it was saved, of which those that are given hold none."""
    given = frozenset[str]().union(*(one.names for one in subjects.steppers))
    here = {name for named in subjects.parameters for name in named.names}
    return [
        f"the {say_held(one.cls or 'optimizer', one.names)} was not restored, with {say_learning_rate(one.learning_rate)}: none of "
        "the given optimizers holds any of them. Give the one that does"
        for one in run.optimizers
        if subjects.steppers and run.tied is not None and given.isdisjoint(one.names) and not here.isdisjoint(one.names)
    ]


def _open_questions(steppers: Sequence[Stepper], run: SavedRun) -> list[str]:
    """Say what a checkpoint of stock Paddle, or one without its manifest, leaves open about the optimizers."""
    sentences = [_NOTHING_SAYS if run.is_lost else _STOCK_SAYS_LESS] if steppers else []
    for one in steppers:
        bare = [p.slot.name for p in one.parameters if p.slot.name not in run.with_gradient and not p.parameter.stop_gradient]
        if bare and entry_of(one.optimizer).states:
            sentences.append(
                f"{len(bare)} parameters of {one.cls} have no states in it and were left without: {listing(bare)}; they had no gradient so "
                "far, or were tied to others, or their states were not saved"
            )
    return sentences


def hyperparameter_differences(steppers: Sequence[Stepper], run: SavedRun) -> list[str]:
    """Say in words which hyper-parameters were saved otherwise, parameter by parameter. They are left as they are."""
    saved = [group for one in run.optimizers for group in one.groups]
    return differences(saved, [group for stepper in steppers for group in stepper.first_hyperparameters]) if saved else []
