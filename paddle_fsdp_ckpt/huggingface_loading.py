"""``load_huggingface``: a published model's weights into a model of Paddle, each rank its own part."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paddle import nn

from .errors import FEW, MismatchError, RankFailedError, ShardingError, counted, listing
from .export.config import CONFIG_NAME, TIED, ModelConfig, read_config
from .export.huggingface_files import COMPUTED, check_not_quantized, read_huggingface_index
from .export.local_values import TensorTarget
from .export.recipes import AUTO, choose_recipe
from .export.recipes.rules import Recipe, Rule, TensorSource
from .export.recipes.spelling import check_layout, spelled_for
from .fsdp import dtype_name
from .huggingface_allowed import Allowed, check_allowed, offer_kept, offer_unexpected, rules_of
from .huggingface_origins import Origin, find_heads, find_lacking, origin_of, resize_origin
from .huggingface_reading import Reading
from .huggingface_report import HuggingFaceLoadReport, OtherShape
from .layout import Range
from .loading.report import Resized
from .meeting import absolute_path, check_same, open_meeting
from .pieces import whole_piece
from .progress import long_progress
from .storage.agreement import COORDINATOR, exchange
from .storage.casts import can_cast
from .storage.commit import DEFAULT_TIMEOUT_SECONDS
from .storage.comparison import have_same_values
from .storage.index import CheckpointIndex
from .storage.json_values import JsonValue
from .storage.reader import PARTIAL_STATE
from .subjects import Subjects, check_subjects


def load_huggingface(
    path: str | os.PathLike[str],
    *,
    model: nn.Layer,
    recipe: str = AUTO,
    cast: bool = False,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    allow_other_shape: Iterable[str] = (),
    resize: Iterable[str] = (),
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> HuggingFaceLoadReport:
    """Give a model the weights of a Hugging Face model in safetensors files. All ranks must call it alike.

    Strict: each parameter and persistable buffer must come from tensors of its shape and dtype, and each tensor must go somewhere, but for
    what the caller allows. Fused projections are put together. Each rank reads what it keeps, straight into its place. Of a matrix that
    lies the other way round that is a part of each of its rows: the ranks that keep some of it read whole rows by turns, each about as much
    as it keeps, and hand on to each other what the others keep, at most 32 MiB at a time. So each byte is read by one rank of each replica;
    of a plain model, by all. Master weights of bound optimizers follow.

    Args:
        path: the directory with ``config.json`` and ``model.safetensors``, or several and an index; the same on all ranks.
        model: sharded by ``fully_shard``, or plain.
        recipe: how names and layouts differ, see :func:`~.export.recipes.choose_recipe`.
        cast: convert between floating point types by value, to the nearest. A value too large for its new type is an error.
        allow_missing: patterns, such as ``"score.*"``, of the model's names that keep their values where the files lack one of the tensors
            that they come from, or no rule of the recipe takes them; ``*`` and ``?`` stand for any text and any character, ``[...]`` for
            some characters. What the files have is loaded all the same.
        allow_unexpected: patterns, such as ``"lm_head.*"``, of names of the files' tensors that may go nowhere.
        allow_other_shape: patterns, such as ``"*.embed_tokens.weight"``, of the model's names that may have another shape in the files, as
            where a vocabulary has grown. They keep their values; of the names of one tensor that several have, one pattern is enough.
        resize: patterns of the model's names, such as the same, of which what they come from may have another size in one dimension. The
            leading rows, or columns, that both have are loaded; those that the files lack keep their values, and those that they have
            besides are left out. For keys that come from just one tensor; goes before ``allow_other_shape``.
        timeout_seconds: how long to wait for the slowest rank at each point where ranks wait for each other.

    Returns:
        How many tensors were read, and what the caller let differ.

    Raises:
        MismatchError: model, recipe, configuration and tensors don't fit each other; nothing was changed.
        CheckpointError: whatever else is wrong. Where the message does not say otherwise, nothing was changed on any rank.
        RankFailedError: another rank raised one of these.
    """
    rendezvous, token = open_meeting("load_huggingface", model, ())
    planned: list[_Plan] = []

    def prepare() -> JsonValue:
        allowed = check_allowed(
            allow_missing=allow_missing, allow_unexpected=allow_unexpected, allow_other_shape=allow_other_shape, resize=resize
        )
        plan = _prepare(absolute_path(path), check_subjects(model, []), recipe, allowed, cast=cast, compare=rendezvous.rank == COORDINATOR)
        planned.append(plan)
        arguments = {"recipe": recipe, "cast": cast, **{name: list(patterns) for name, patterns in allowed.given.items()}}
        return [str(plan.index.path), plan.subjects.digest(), plan.index.digest(), arguments, plan.reading.digest]

    exchange(rendezvous, f"{token}/prepare", prepare, lambda ranks: _check_alike(planned[0], ranks), timeout_seconds)
    plan = planned[0]
    progress = long_progress("loading", rendezvous.rank)
    progress.follow(plan.reading.how_far)
    try:
        with progress:
            for number in range(plan.reading.steps):
                exchange(rendezvous, f"{token}/read/{number}", partial(plan.reading.step, number), lambda _: None, timeout_seconds)
    except RankFailedError as error:
        if PARTIAL_STATE in str(error):
            raise
        raise RankFailedError(f"{error}; {PARTIAL_STATE}") from error
    finally:
        plan.subjects.sharding.values_written(model, [], [], plan.kept)
    return plan.report


@dataclass(frozen=True)
class _Plan:
    """What will be read, and into what.

    Attributes:
        index: of the Hugging Face model.
        subjects: the model.
        unexpected: names of tensors there that go nowhere, which is not allowed.
        kept: names of what keeps its values.
        reading: what this rank does.
        report: what the caller gets in the end.
    """

    index: CheckpointIndex
    subjects: Subjects
    unexpected: tuple[str, ...]
    kept: tuple[str, ...]
    reading: Reading
    report: HuggingFaceLoadReport


def _prepare(path: Path, subjects: Subjects, recipe: str, allowed: Allowed, *, cast: bool, compare: bool) -> _Plan:
    """Plan what this rank reads; where ``compare`` is true, look whether tensors that become one have the same values."""
    assert subjects.model is not None
    index = read_huggingface_index(path)
    config = read_config(path) if (path / CONFIG_NAME).exists() else None
    keys = sorted(subjects.model_keys())
    family = choose_recipe(recipe, config)
    check_not_quantized(config, family)
    chosen = spelled_for(family, keys)
    rules = rules_of(chosen, keys, allowed.missing)
    tensors = list(_tensors(subjects))
    shapes = {name: tensor.shape for tensor in tensors for name in tensor.names}
    heads = find_heads(index, subjects, {key: rule for key, (rule, _) in rules.items()}, config, allowed.missing, compare=compare)
    lacking = find_lacking(index, rules, heads, shapes)
    kept = {key for key in keys if key not in rules} | {key for key in lacking if allowed.missing.match(key)}
    wholes = {name: whole_piece(name, tensor.dtype, tensor.shape) for tensor in tensors for name in tensor.names}
    present = [key for key in wholes if key not in kept and key not in lacking]
    origins = {key: origin_of(index, wholes[key], rules, heads.get(key), config) for key in present}
    resizable = _resizable(_differing(tensors, origins), origins)
    resized = {key: some for key, (tensor, some) in resizable.items() if allowed.resize.match_any(tensor.names)}
    for some in resized.values():
        origins |= {name: origin for name, (origin, _) in some.items()}
    differing = _differing(tensors, origins)
    reshaped = {key: tensor for key, tensor in differing.items() if allowed.other_shape.match_any(tensor.names)}
    left = {name for tensor in reshaped.values() for name in tensor.names}
    # How what isn't read lies doesn't matter; the embedding says how all else must.
    laid = {rule.tied_to for rule in chosen.rules}.intersection(rules) | origins.keys() - left
    check_layout(chosen, {key: shape for key, shape in shapes.items() if key in laid})
    weights = subjects.sharding.model_weights(subjects.model)
    for key, weight in weights.items():
        if tuple(weight.local_shape) != tuple(weight.global_shape):
            raise ShardingError(f"'{key}' is cut by more than its flat elements, as by tensor parallelism, which this can't load")
    targets: list[TensorTarget] = []
    tied: list[tuple[Sequence[TensorSource], Sequence[TensorSource]]] = []
    problems: list[str] = []
    other_dtypes: dict[tuple[str, str], list[str]] = {}
    for tensor in tensors:
        if tensor.names[0] in left:
            continue
        found: list[tuple[TensorSource, ...]] = []
        for key in tensor.names:
            if key in kept:
                continue
            if key in lacking:
                problems += [f"'{key}' needs '{name}', which is missing" for name in lacking[key]]
                continue
            sources, _, differences = origins[key]
            problems += [*differences, *_problems(index, key, tensor.dtype, sources, other_dtypes, cast=cast)]
            if sources:
                found.append(sources)
        if found:
            targets.append(TensorTarget(tensor.names[0], tensor.dtype, tensor.shape, tensor.kept, found[0]))
            tied += [(found[0], other) for other in found[1:]]
            kept.difference_update(tensor.names)  # another name of the same tensor, which is loaded
    problems += _say_dtypes(other_dtypes)
    if problems:
        refused = [key for key in lacking if key not in kept and key not in left]
        of_other_shape = [key for key in differing if key not in reshaped]
        to_resize = [key for key in of_other_shape if key in resizable]
        offer = offer_kept(refused, of_other_shape, to_resize, keys) if _some_fit(tensors, origins, differing.values()) else ""
        raise MismatchError(f"the model doesn't fit '{path}'; nothing was changed: {listing(problems)}{offer}")
    if (kept or reshaped) and not targets:
        raise MismatchError(
            f"not one tensor of '{path}' goes into the model, and all {len(keys)} keys may be missing or have another shape; nothing was "
            "changed"
        )
    for first, also in tied if compare else ():
        _check_same_values(index, first, also)
    used = {source.name for target in targets for source in target.sources} | {source.name for _, also in tied for source in also}
    used |= {head.own_tensor for key, head in heads.items() if key not in kept}
    used |= _tied_besides(index, chosen, rules, config)
    used |= {name for key in left.intersection(origins) for name in origins[key].stored}
    unused = sorted(name for name in index.stored if name not in used and not name.endswith(COMPUTED))
    left_out = tuple(name for name in unused if allowed.unexpected.match(name))
    count = len({source.name for target in targets for source in target.sources})
    others = tuple(OtherShape(key, origins[key].stored, tensor.shape) for key, tensor in sorted(reshaped.items()))
    sizes = tuple(some[key][1] for key, some in sorted(resized.items()))
    report = HuggingFaceLoadReport(index.path, count, tuple(sorted(kept)), left_out, allowed.unused(), others, sizes)
    unexpected = tuple(name for name in unused if name not in left_out)
    reading = Reading(index, targets, subjects.sharding.communicator, weights)
    return _Plan(index, subjects, unexpected, tuple(sorted(kept | left)), reading, report)


def _differing(tensors: Iterable[_Tensor], origins: Mapping[str, Origin]) -> dict[str, _Tensor]:
    """Return the tensors whose shape doesn't fit what they come from, by the first of their names of which that is so."""
    found = {}
    for tensor in tensors:
        names = [name for name in tensor.names if name in origins and origins[name].differences]
        if names:
            found[names[0]] = tensor
    return found


def _resizable(
    differing: Mapping[str, _Tensor], origins: Mapping[str, Origin]
) -> dict[str, tuple[_Tensor, dict[str, tuple[Origin, Resized]]]]:
    """Return those of the tensors of which all names that don't fit can be resized, with what these then come from."""
    found = {}
    for key, tensor in differing.items():
        made = {name: resize_origin(origins[name]) for name in tensor.names if name in origins and origins[name].differences}
        fitting = {name: one for name, one in made.items() if one is not None}
        if len(fitting) == len(made):
            found[key] = (tensor, fitting)
    return found


def _some_fit(tensors: Iterable[_Tensor], origins: Mapping[str, Origin], differing: Iterable[_Tensor]) -> bool:
    """Tell whether anything would be loaded without what is missing and without what has another shape."""
    others = {name for tensor in differing for name in tensor.names}
    return any(name in origins and origins[name].sources for tensor in tensors for name in tensor.names if name not in others)


class _Tensor(NamedTuple):
    """A parameter or persistable buffer of the model, whichever ranks keep it.

    Attributes:
        names: in sorted order, several where it is tied.
        shape: of all of it.
        dtype: Paddle's name of it.
        kept: which of its elements each rank keeps that keeps some; of what all keep whole, this rank alone.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    kept: dict[int, Range]


def _tensors(subjects: Subjects) -> Iterator[_Tensor]:
    """Yield the model's tensors that have elements; those that are cut in the same order on all ranks."""
    assert subjects.model is not None
    for shard in subjects.sharding.flat_shards():
        layout = shard.layout
        for slot in layout.slots:
            ranks = range(slot.range.start // layout.shard_numel, -(-slot.range.stop // layout.shard_numel))
            yield _Tensor(slot.names, slot.shape, layout.dtype, {rank: layout.local_range(slot, rank) for rank in ranks})
    keys, rank = subjects.sharding.whole_keys(subjects.model), subjects.sharding.communicator.rank
    whole = [(tuple(sorted(named.names)), named.parameter) for named in subjects.parameters if named.names[0] in keys]
    for names, tensor in [*whole, *(((name,), buffer) for name, buffer in subjects.buffers)]:
        shape = tuple(tensor.shape)
        if 0 not in shape:
            yield _Tensor(names, shape, dtype_name(tensor), {rank: Range(0, math.prod(shape))})


def _check_same_values(index: CheckpointIndex, sources: Sequence[TensorSource], others: Sequence[TensorSource]) -> None:
    """Raise unless what two names of one tensor come from is the same.

    Raises:
        MismatchError: it isn't.
    """
    pairs = list(zip(sources, others, strict=False))
    is_same = len(sources) == len(others) and all((a.shape, a.ranges, a.transpose) == (b.shape, b.ranges, b.transpose) for a, b in pairs)
    if not is_same or not all(a.name == b.name or have_same_values(index, [a.name, b.name]) for a, b in pairs):
        (one, *_), (other, *_) = sources, others
        raise MismatchError(
            f"'{one.slab.key}' and '{other.slab.key}' are one tensor of the model, and what they come from, '{one.name}' and "
            f"'{other.name}', has other values; nothing was changed"
        )


def _tied_besides(
    index: CheckpointIndex, recipe: Recipe, rules: Mapping[str, tuple[Rule, dict[str, str]]], config: ModelConfig | None
) -> set[str]:
    """Return the names of tensors for heads that the model lacks, and that are the embedding by configuration and values."""
    if config is None or config.get(TIED) is not True:
        return set()
    heads = {
        rule.target_name({}): rules[rule.tied_to][0].target_name({})
        for rule in recipe.rules
        if rule.tied_to is not None and rule.tied_to in rules and rule.source not in rules
    }
    return {name for name, other in heads.items() if name in index and other in index and have_same_values(index, [name, other])}


def _problems(
    index: CheckpointIndex,
    key: str,
    dtype: str,
    sources: Sequence[TensorSource],
    other_dtypes: dict[tuple[str, str], list[str]],
    *,
    cast: bool,
) -> Iterator[str]:
    """Yield what is wrong with what a key comes from, its shape aside; where it is the dtype, add the key to those of the same two."""
    for source in sources:
        stored = index.dtypes[source.name]
        if stored != dtype and not (cast and can_cast(stored, dtype)):
            keys = other_dtypes.setdefault((dtype, stored), [])
            keys += [] if key in keys[-1:] else [key]
        if stored != index.dtypes.get(sources[0].name):
            yield f"'{key}' is made of tensors of several dtypes"


def _say_dtypes(other_dtypes: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[str]:
    for (dtype, stored), keys in other_dtypes.items():
        what = f"{counted(len(keys), 'key is', 'keys are')} {dtype} in the model and {stored} in the files"
        castable = f" (cast=True converts {'it' if len(keys) == 1 else 'them'})" if can_cast(stored, dtype) else ""
        named = listing((f"'{key}'" for key in keys), FEW)
        yield f"{what}{castable}: {named}"


def _check_alike(plan: _Plan, ranks: list[JsonValue]) -> None:
    whats = ("path", "model", "files", "the options", "what the recipe and config.json make of them")
    for what, values in zip(whats, zip(*ranks, strict=True), strict=True):
        check_same("load_huggingface", what, values, "nothing was changed", shown=what in ("path", "the options"))
    unexpected = plan.unexpected
    if unexpected:
        names = listing(f"'{name}'" for name in unexpected)
        raise MismatchError(
            f"'{plan.index.path}' has {counted(len(unexpected), 'tensor')} that the model lacks: {names}; nothing was "
            f"changed{offer_unexpected(unexpected, plan.index.stored)}"
        )
