"""What a checkpoint says about the run that it was saved from, beside the values: its optimizers, and which names are tied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import CorruptCheckpointError, IncompleteCheckpointError, MismatchError, listing
from .optim import describe_learning_rate, restore_learning_rate
from .storage.format import JsonValue
from .storage.index import CheckpointIndex
from .subjects import Stepper


@dataclass(frozen=True)
class SavedOptimizer:
    """What a checkpoint says about one optimizer.

    Attributes:
        cls: name of its class.
        names: the parameters that it held.
        with_gradient: those that had a gradient.
        learning_rate: see :func:`~.optim.describe_learning_rate`.
    """

    cls: str
    names: frozenset[str]
    with_gradient: frozenset[str]
    learning_rate: dict[str, JsonValue]


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint says about the run that it was saved from.

    Attributes:
        step: the training step, or None.
        world_size: how many ranks saved it.
        extra_state: the caller's own.
        optimizers: those that were saved.
        tied: the sorted names of each tensor that had several.
    """

    step: int | None
    world_size: int
    extra_state: JsonValue
    optimizers: tuple[SavedOptimizer, ...]
    tied: frozenset[tuple[str, ...]]

    @property
    def with_gradient(self) -> set[str]:
        """The parameters that had a gradient."""
        return set().union(*(one.with_gradient for one in self.optimizers))

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
    """Read what a checkpoint's manifest says about its run.

    Raises:
        CorruptCheckpointError: it is not what ``save`` writes.
    """
    manifest = index.manifest
    assert manifest is not None
    try:
        optimizers = tuple(_saved_optimizer(one) for one in manifest.optimizers)
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"the manifest of '{index.path}' doesn't describe its optimizers as save does ({error!r}); load another checkpoint"
        ) from error
    return SavedRun(manifest.step, manifest.world_size, manifest.extra_state, optimizers, frozenset(manifest.tied))


def _saved_optimizer(value: JsonValue) -> SavedOptimizer:
    names = frozenset(name for group in value["groups"] for name in group["parameters"])
    return SavedOptimizer(value["class"], names, frozenset(value["with_gradient"]), dict(value["learning_rate"]))


def describe_optimizer(stepper: Stepper) -> dict[str, JsonValue]:
    """Return what a manifest says about an optimizer."""
    with_gradient = [one.slot.name for one in stepper.parameters if stepper.sharding.has_gradient(one)]
    return {
        "class": stepper.cls,
        "groups": [{"parameters": names} for names in stepper.groups()],
        "with_gradient": with_gradient,
        "learning_rate": describe_learning_rate(stepper.optimizer),
    }


def check_tied(index: CheckpointIndex, run: SavedRun, model_keys: set[str], tied: Sequence[Sequence[str]]) -> None:
    """Raise where names that are of one tensor in the model are of several in the checkpoint, or the reverse.

    Raises:
        MismatchError: it lists them.
    """
    mine = {tuple(names) for names in tied}
    only_saved = [names for names in sorted(run.tied - mine) if all(name in model_keys for name in names)]
    only_mine = [names for names in sorted(mine - run.tied) if all(name in index for name in names)]
    if only_saved or only_mine:
        sentences = [f"{' = '.join(names)} is one tied parameter in the checkpoint, and not in the model" for names in only_saved]
        sentences += [f"{' = '.join(names)} is one tied parameter in the model, and not in the checkpoint" for names in only_mine]
        raise MismatchError(
            f"the checkpoint '{index.path}' doesn't fit the objects to load; nothing was changed: {listing(sentences)}. Tie the same "
            "parameters of the model as when it was saved"
        )


def check_optimizers(index: CheckpointIndex, run: SavedRun, steppers: Sequence[Stepper]) -> None:
    """Raise unless each parameter that the checkpoint has is stepped by the same class of optimizer as when it was saved.

    Raises:
        IncompleteCheckpointError: it was saved without an optimizer.
        MismatchError: it lists what differs.
    """
    if not run.optimizers:
        raise IncompleteCheckpointError(f"'{index.path}' was saved without an optimizer; load it with optimizer=None")
    class_of = {name: one.cls for one in run.optimizers for name in one.names}
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


def restore_learning_rates(steppers: Sequence[Stepper], run: SavedRun) -> list[str]:
    """Give each optimizer's scheduler the state of the one that was saved, and return what differs otherwise, in words."""
    differences = []
    for stepper in steppers:
        for one in run.optimizers:
            if stepper.names & one.names:
                differences.append(restore_learning_rate(stepper.optimizer, one.learning_rate))
                break
    return [text for text in differences if text is not None]
