"""What would let a load go on that doesn't fit: the options of ``load`` that its error offers, with the patterns that they need."""

from __future__ import annotations

import glob
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..fsdp import dtype_name
from ..optimizer_states import MASTER_WEIGHT_KEY, is_master_weight
from ..storage.problems import KeyProblem, ReadProblems, WaysOut, prefixes_of_all
from ..subjects import Subjects
from .saved_names import RenamedCheckpoint

_FEW = 5
"""Of so many parameters patterns name each."""


def find_ways_out(
    problems: ReadProblems,
    saved: RenamedCheckpoint,
    subjects: Subjects,
    states: Collection[str],
    *,
    wanted: Iterable[str],
    resizable: Iterable[str],
    weights_may_fit: bool,
    may_rename: bool,
) -> WaysOut:
    """Return what would let this rank's load go on.

    Args:
        problems: what stands against it; unexpected keys as the checkpoint names them.
        saved: the checkpoint.
        subjects: what is loaded.
        states: keys of states and master weights, of the objects and of the checkpoint, by the names of the objects.
        wanted: the keys of the checkpoint, by the names of the objects, that this rank would read.
        resizable: names of parameters and buffers of another shape, by the names of the objects, of which one dimension has another size.
        weights_may_fit: whether the model could be loaded by itself, as far as single keys don't tell.
        may_rename: whether a ``key_map`` may be offered.
    """
    model_keys = subjects.model_keys()
    stored = [saved.original_key(key) for key in saved.index.stored]
    stored_states = {saved.original_key(key) for key in states}
    named = [*problems.wrong_shape, *problems.wrong_dtype, *problems.uncovered, *problems.conflicts]
    is_of_states = states.__contains__
    weights_fit = (
        weights_may_fit
        and all(map(is_of_states, problems.missing))
        and all(key in stored_states for key in problems.unexpected)
        and all(is_of_states(one.key) for one in named)
    )
    lost = [key for key in problems.missing if key in model_keys]
    left = [key for key in problems.unexpected if key not in stored_states]
    is_renamed = may_rename and lost and left
    return WaysOut(
        patterns_of_missing(problems.missing, model_keys, states, has_states=bool(subjects.steppers)),
        patterns_of_unexpected(problems.unexpected, set(stored), stored_states),
        tuple(sorted({glob.escape(_owner(one.key) if is_of_states(one.key) else one.key) for one in problems.wrong_shape})),
        tuple(sorted(map(glob.escape, resizable))),
        _renamed_layers(
            _in_layers(lost, model_keys, _described(subjects)),
            _in_layers(left, [key for key in stored if key not in stored_states], _stored_as(saved, left)),
        )
        if is_renamed
        else {},
        _in_front(lost, left, subjects, saved) if is_renamed else (),
        weights_fit,
        bool({key for key in wanted if key not in states or subjects.model is None}.difference(one.key for one in problems.wrong_shape)),
    )


def with_words_on_masters(problems: ReadProblems) -> ReadProblems:
    """Return the problems of all ranks with what helps where only one side has master weights: other words than of other keys."""
    masters = [key for key in problems.missing if is_master_weight(key)]
    words = {}
    if masters:
        words["cast"] = f"cast=True, which takes missing master weights (.{MASTER_WEIGHT_KEY}) from the parameters"
    if masters and len(masters) == len(problems.missing):
        words["allow_missing"] = ""
    if problems.unexpected and all(map(is_master_weight, problems.unexpected)):
        words["allow_unexpected"] = (
            f"allow_unexpected=['*.{MASTER_WEIGHT_KEY}'], or give the optimizer master weights by multi_precision=True"
        )
    return replace(problems, ways_out=replace(problems.ways_out, words=words))


def without_states(wrong_shape: Sequence[KeyProblem], states: Collection[str], owner_of: Mapping[str, str]) -> tuple[KeyProblem, ...]:
    """Return the problems without those of states whose parameter has another shape too, which says so.

    Args:
        wrong_shape: the problems.
        states: see :func:`find_ways_out`.
        owner_of: name of a parameter -> the name under which the checkpoint has its states, where that is another.
    """
    with_states = {_owner(one.key) for one in wrong_shape if one.key in states}
    folded = {owner_of.get(one.key, one.key) for one in wrong_shape if one.key not in states}
    return tuple(
        one._replace(text=f"{one.text} (and of its states)")
        if owner_of.get(one.key, one.key) in with_states and one.key not in states
        else one
        for one in wrong_shape
        if one.key not in states or _owner(one.key) not in folded
    )


def patterns_of_missing(
    missing: Sequence[str], model_keys: Collection[str], states: Collection[str], *, has_states: bool
) -> tuple[str, ...]:
    """Return patterns of just these keys of the objects: of the model's, with their states where there are any, and of states."""
    patterns = set()
    for beginning, keys in whole_layers([key for key in missing if key not in states], model_keys).items():
        if beginning.endswith("."):
            patterns.add(f"{glob.escape(beginning)}*")
        else:
            patterns.update(glob.escape(key) for key in keys)
            patterns.update(f"{glob.escape(key)}.*" for key in keys if has_states)
    # Master weights alone come from the parameters, by a cast.
    owners = {_owner(key) for key in missing if key in states and not is_master_weight(key)}
    if len(owners) > _FEW and not any(key.endswith("_0") for key in model_keys):
        return (*sorted(patterns), "*_0")
    return (*sorted(patterns), *sorted(f"{glob.escape(name)}.*" for name in owners))


def patterns_of_unexpected(unexpected: Sequence[str], stored: set[str], states: Collection[str]) -> tuple[str, ...]:
    """Return patterns of just these of the keys that are stored; ``states`` are those of states."""
    left = set(unexpected)
    # States of which there is no use, of parameters that are loaded.
    alone = [key for key in unexpected if key in states and _owner(key) not in left and _owner(key) in stored]
    layers = whole_layers(left.difference(alone), stored, left)
    patterns = {f"{glob.escape(beginning)}{'*' if beginning.endswith('.') else ''}" for beginning in layers}
    patterns |= {f"*.{glob.escape(key.rpartition('.')[2])}" for key in alone} if len(alone) > _FEW else set(map(glob.escape, alone))
    return tuple(sorted(patterns))


def whole_layers(keys: Iterable[str], every: Iterable[str], gone: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return keys by the shortest beginning that, among all keys, only such as are gone have; a key by itself where there is none.

    Args:
        keys: some keys, all of them gone.
        every: all keys.
        gone: all that are gone, by default ``keys``.
    """
    keys = list(keys)
    counts = Counter(beginning for key in every for beginning in _beginnings(key))
    of_gone = Counter(beginning for key in (keys if gone is None else gone) for beginning in _beginnings(key))
    layers: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        layers[next((one for one in _beginnings(key) if of_gone[one] >= counts[one]), key)].append(key)
    return dict(layers)


def _beginnings(key: str) -> Iterator[str]:
    """Yield "a." and "a.b." of "a.b.c"."""
    position = key.find(".")
    while position >= 0:
        yield key[: position + 1]
        position = key.find(".", position + 1)


def _owner(key: str) -> str:
    return key.rpartition(".")[0]


def _in_front(lost: Sequence[str], left: Sequence[str], subjects: Subjects, saved: RenamedCheckpoint) -> tuple[str, ...]:
    """Return what stands in the checkpoint in front of all keys that are missing, where they are the same there."""
    prefixes = prefixes_of_all(lost, left)
    if not prefixes:
        return ()
    here, there = _described(subjects), _stored_as(saved, left)
    return tuple(prefix for prefix in prefixes if all(here[key] == there[prefix + key] for key in lost))


_Described = tuple[tuple[int, ...], str]
"""Whole shape, and Paddle's name of the dtype."""


def _described(subjects: Subjects) -> dict[str, _Described]:
    """Return what the model's parameters and buffers are, on every rank alike."""
    slots = [(slot, one.layout.dtype) for one in subjects.sharding.flat_shards() for slot in one.layout.slots]
    found = {name: (tuple(slot.shape), dtype) for slot, dtype in slots for name in slot.names}
    tensors = [(name, one.parameter) for one in subjects.parameters for name in one.names if name not in found]
    return found | {name: (tuple(tensor.shape), dtype_name(tensor)) for name, tensor in (*tensors, *subjects.buffers)}


def _stored_as(saved: RenamedCheckpoint, keys: Iterable[str]) -> dict[str, _Described]:
    index = saved.index
    return {key: (index.global_shape(key), index.dtypes[key]) for key in keys}


def _in_layers(
    keys: Sequence[str], every: Collection[str], described: Mapping[str, _Described]
) -> dict[str, frozenset[tuple[str, _Described]]]:
    """Return what whole layers hold that are in ``keys``, by the beginnings of their names."""
    layers = {beginning: some for beginning, some in whole_layers(keys, every).items() if beginning.endswith(".")}
    return {beginning: frozenset((key.removeprefix(beginning), described[key]) for key in some) for beginning, some in layers.items()}


def _renamed_layers(
    here: Mapping[str, frozenset[tuple[str, _Described]]], there: Mapping[str, frozenset[tuple[str, _Described]]]
) -> dict[str, str]:
    """Return layers of the objects that are just like one of the checkpoint, and like no other."""
    counts, saved = Counter(here.values()), Counter(there.values())
    names = {held: beginning for beginning, held in there.items()}
    return {beginning: names[held] for beginning, held in here.items() if counts[held] == saved[held] == 1}
