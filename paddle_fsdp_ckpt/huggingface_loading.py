"""``load_huggingface``: a published model's weights into a model of Paddle, each rank its own part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paddle import nn

from .errors import CheckpointError, MismatchError, RankFailedError, ShardingError, listing
from .export.config import CONFIG_NAME, TIED, ModelConfig, read_config
from .export.huggingface_files import COMPUTED, read_huggingface_index
from .export.local_values import read_local
from .export.recipes import AUTO, choose_recipe
from .export.recipes.rules import Rule, TensorSource, apply_rule
from .host_memory import destinations
from .meeting import absolute_path, check_same, open_meeting
from .pieces import Piece
from .storage.agreement import exchange
from .storage.casts import can_cast, convert
from .storage.commit import DEFAULT_TIMEOUT_SECONDS
from .storage.comparison import have_same_values
from .storage.flex import piece_of
from .storage.format import JsonValue
from .storage.index import CheckpointIndex
from .storage.reader import PARTIAL_STATE
from .subjects import Subjects, check_subjects


def load_huggingface(
    path: str | os.PathLike[str],
    *,
    model: nn.Layer,
    recipe: str = AUTO,
    cast: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Give a model the weights of a Hugging Face model in safetensors files. All ranks must call it alike.

    Strict: each parameter and persistable buffer must come from tensors of its shape and dtype, and each tensor must go somewhere. Fused
    projections are put together. Each rank reads what it keeps, and holds one parameter's part a second time. Of a matrix that lies the
    other way round that is a part of each of its rows, and where those are shorter than 64 KiB all of it is read, and let go of at once.
    Master weights of bound optimizers follow.

    Args:
        path: the directory with ``config.json`` and ``model.safetensors``, or several and an index; the same on all ranks.
        model: sharded by ``fully_shard``, or plain.
        recipe: how names and layouts differ, see :func:`~.export.recipes.choose_recipe`.
        cast: convert between floating point types by value, to the nearest. A value too large for its new type is an error.
        timeout_seconds: how long to wait for the slowest rank at each point where ranks wait for each other.

    Raises:
        MismatchError: model, recipe, configuration and tensors don't fit each other; nothing was changed.
        CheckpointError: whatever else is wrong. Where the message does not say otherwise, nothing was changed on any rank.
        RankFailedError: another rank raised one of these.
    """
    rendezvous, token = open_meeting(model, ())
    planned: list[_Plan] = []

    def prepare() -> JsonValue:
        plan = _prepare(absolute_path(path), check_subjects(model, []), recipe, cast=cast)
        planned.append(plan)
        used = sorted({source.name for sources in plan.sources for source in sources})
        return [str(plan.index.path), plan.subjects.digest(), plan.index.digest(), [recipe, cast], used]

    exchange(rendezvous, f"{token}/prepare", prepare, lambda ranks: _check_alike(planned[0], ranks), timeout_seconds)
    plan = planned[0]
    try:
        exchange(rendezvous, f"{token}/read", plan.read, lambda _: None, timeout_seconds)
    except RankFailedError as error:
        raise RankFailedError(f"{error}; {PARTIAL_STATE}") from error
    finally:
        plan.subjects.sharding.values_written(model, [], [])


@dataclass(frozen=True)
class _Plan:
    """What one rank will read, and into what.

    Attributes:
        index: of the Hugging Face model.
        subjects: the model.
        pieces: what this rank keeps.
        sources: where each of them comes from.
        not_needed: names of tensors there that are other names of such as are read.
    """

    index: CheckpointIndex
    subjects: Subjects
    pieces: Sequence[Piece]
    sources: Sequence[Sequence[TensorSource]]
    not_needed: frozenset[str]

    def read(self) -> None:
        """Read everything into its place."""
        assert self.subjects.model is not None
        weights = self.subjects.sharding.model_weights(self.subjects.model)
        for piece, sources in zip(self.pieces, self.sources, strict=True):
            values = read_local(self.index, sources, piece)
            stored = self.index.dtypes[sources[0].name]
            if stored != piece.dtype:
                values, overflow = convert(values, stored, piece.dtype)
                if overflow:
                    raise CheckpointError(f"'{piece.key}': {overflow} values are too large for {piece.dtype}; {PARTIAL_STATE}")
            with destinations([weights[piece.key].local_tensor]) as (view,):
                view[:] = values.view("uint8").data


def _prepare(path: Path, subjects: Subjects, recipe: str, *, cast: bool) -> _Plan:
    assert subjects.model is not None
    index = read_huggingface_index(path)
    config = read_config(path) if (path / CONFIG_NAME).exists() else None
    chosen = choose_recipe(recipe, config)
    rules = chosen.rules_of(sorted(subjects.model_keys()))
    heads = _heads(index, subjects, {key: rule for key, (rule, _) in rules.items()}, config)
    pieces: list[Piece] = []
    all_sources: list[list[TensorSource]] = []
    problems: list[str] = []
    for key, weight in subjects.sharding.model_weights(subjects.model).items():
        piece = piece_of(key, weight)
        if piece.local_shape != piece.global_shape:
            raise ShardingError(f"'{key}' is cut by more than its flat elements, as by tensor parallelism, which this can't load")
        head = heads.get(key)
        rule, values = rules[key if head is None or not head.lies_as_embedding else head.embedding]
        whole = Piece(key, piece.dtype, piece.global_shape, (0,) * len(piece.global_shape), piece.global_shape)
        sources = list(apply_rule(rule, values, whole, config))
        if head is not None:
            sources = [replace(source, name=head.tensor) for source in sources]
        if sources and piece.numel:
            pieces.append(piece)
            all_sources.append(sources)
            problems += _problems(index, piece, sources, cast=cast)
    if problems:
        raise MismatchError(f"the model doesn't fit '{path}'; nothing was changed: {listing(problems)}")
    return _Plan(index, subjects, pieces, all_sources, frozenset(head.own_tensor for head in heads.values()))


@dataclass(frozen=True)
class _Head:
    """A head that takes the weight of the embedding.

    Attributes:
        embedding: key of the embedding.
        tensor: name of the embedding in the Hugging Face model.
        own_tensor: name of the head there, which may be there too, with equal values.
        lies_as_embedding: whether it is one tensor with the embedding here too.
    """

    embedding: str
    tensor: str
    own_tensor: str
    lies_as_embedding: bool


def _heads(index: CheckpointIndex, subjects: Subjects, rules: Mapping[str, Rule], config: ModelConfig | None) -> dict[str, _Head]:
    """Return the keys of heads that take the weight of the embedding."""
    found = {}
    for key, rule in rules.items():
        if rule.tied_to is None or rule.tied_to not in rules:
            continue
        head = _Head(
            rule.tied_to,
            rules[rule.tied_to].target_name({}),
            rule.target_name({}),
            any(key in names and rule.tied_to in names for names in subjects.tied()),
        )
        is_said = config is not None and config.get(TIED) is True
        if not (head.lies_as_embedding or is_said or (config is None and head.own_tensor not in index)):
            continue
        if head.own_tensor in index and head.tensor in index and not have_same_values(index, [head.own_tensor, head.tensor]):
            who = "the model ties them" if head.lies_as_embedding else f"config.json says {TIED}"
            raise MismatchError(f"'{head.own_tensor}' and '{head.tensor}' have other values, and {who}; nothing was changed")
        found[key] = head
    return found


def _problems(index: CheckpointIndex, piece: Piece, sources: Sequence[TensorSource], *, cast: bool) -> Iterator[str]:
    for source in sources:
        if source.name not in index:
            yield f"'{piece.key}' needs '{source.name}', which is missing"
            continue
        stored, shape = index.dtypes[source.name], index.global_shape(source.name)
        if shape != source.shape:
            yield f"'{piece.key}' needs '{source.name}' of shape {list(source.shape)}, and it has {list(shape)}"
        if stored != piece.dtype and not (cast and can_cast(stored, piece.dtype)):
            yield f"'{piece.key}' is {piece.dtype}, and '{source.name}' {stored}" + (
                " (cast=True converts)" if can_cast(stored, piece.dtype) else ""
            )
        if stored != index.dtypes.get(sources[0].name):
            yield f"'{piece.key}' is made of tensors of several dtypes"


def _check_alike(plan: _Plan, ranks: list[JsonValue]) -> None:
    whats = ("path", "model", "files", "recipe and cast")
    for what, values in zip(whats, zip(*(values[:-1] for values in ranks), strict=True), strict=True):
        check_same("load_huggingface", what, values, "nothing was changed", shown=what in ("path", "recipe and cast"))
    used = set().union(*(values[-1] for values in ranks)) | plan.not_needed
    unused = [f"'{name}'" for name in plan.index.stored if name not in used and not name.endswith(COMPUTED)]
    if unused:
        raise MismatchError(f"'{plan.index.path}' has {len(unused)} tensors that the model lacks: {listing(unused)}; nothing was changed")
