"""What each key of a model comes from in the files of a published one, and whether shapes fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .errors import MismatchError
from .export.config import TIED, ModelConfig
from .export.recipes.rules import Rule, TensorSource, apply_rule
from .layout import Range
from .loading.options import Patterns
from .loading.report import Resized
from .pieces import Piece, only_difference
from .storage.comparison import have_same_values
from .storage.index import CheckpointIndex
from .subjects import Subjects


@dataclass(frozen=True)
class Head:
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


def find_heads(
    index: CheckpointIndex,
    subjects: Subjects,
    rules: Mapping[str, Rule],
    config: ModelConfig | None,
    may_be_missing: Patterns,
    *,
    compare: bool,
) -> dict[str, Head]:
    """Return the keys of heads that take the weight of the embedding; where ``compare`` is true, look whether both have the same values.

    A head that the files lack does so where they have no configuration either, unless it may be missing.
    """
    found = {}
    for key, rule in rules.items():
        if rule.tied_to is None or rule.tied_to not in rules:
            continue
        head = Head(
            rule.tied_to,
            rules[rule.tied_to].target_name({}),
            rule.target_name({}),
            any(key in names and rule.tied_to in names for names in subjects.tied()),
        )
        is_said = config is not None and config.get(TIED) is True
        is_meant = config is None and head.own_tensor not in index
        if not (head.lies_as_embedding or is_said or (is_meant and not may_be_missing.match(key))):
            continue
        both = head.own_tensor in index and head.tensor in index
        if compare and both and not have_same_values(index, [head.own_tensor, head.tensor]):
            who = "the model ties them" if head.lies_as_embedding else f"config.json says {TIED}"
            raise MismatchError(f"'{head.own_tensor}' and '{head.tensor}' have other values, and {who}; nothing was changed")
        found[key] = head
    return found


def find_lacking(
    index: CheckpointIndex,
    rules: Mapping[str, tuple[Rule, dict[str, str]]],
    heads: Mapping[str, Head],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, list[str]]:
    """Return, for each key of which there are such, the names of tensors that it needs and the files lack."""
    found = {}
    for key, shape in shapes.items():
        if key not in rules:
            continue
        rule, values = rules[key]
        names = [heads[key].tensor] if key in heads else rule.target_names(values, shape)
        missing = [name for name in names if name not in index]
        if missing:
            found[key] = missing
    return found


class Origin(NamedTuple):
    """What a key comes from, all of which the files have.

    Attributes:
        sources: where shapes fit, what the key's tensor consists of; those of the files' tensors that it is made of.
        stored: name of each of these tensors -> its shape in the files.
        differences: in words, what doesn't fit in their shapes; none where they do.
    """

    sources: tuple[TensorSource, ...]
    stored: dict[str, tuple[int, ...]]
    differences: tuple[str, ...] = ()


def origin_of(
    index: CheckpointIndex, whole: Piece, rules: Mapping[str, tuple[Rule, dict[str, str]]], head: Head | None, config: ModelConfig | None
) -> Origin:
    """Return what a key comes from.

    Args:
        index: of the Hugging Face model.
        whole: all of the key's tensor in the model of Paddle.
        rules: of all keys.
        head: what the key is, where it takes the weight of the embedding.
        config: of the Hugging Face model.

    Raises:
        MismatchError: the files fit, and the configuration says another shape.
        CheckpointError: the configuration is needed, and lacks what is.
    """
    rule, values = rules[whole.key if head is None or not head.lies_as_embedding else head.embedding]
    names = rule.target_names(values, whole.global_shape) if head is None else [head.tensor]
    stored = {name: index.global_shape(name) for name in names}
    try:
        # First what the files say: where they have another shape, the configuration, which is theirs, has it too.
        sources = _named(apply_rule(replace(rule, shape=()), values, whole, config), head)
    except MismatchError as error:
        return Origin((), stored, (str(error),))
    differences = tuple(
        f"'{whole.key}' needs '{one.name}' of shape {list(one.shape)}, and it has {list(stored[one.name])}"
        for one in sources
        if one.shape != stored[one.name]
    )
    return Origin(sources if differences else _named(apply_rule(rule, values, whole, config), head), stored, differences)


def resize_origin(origin: Origin) -> tuple[Origin, Resized] | None:
    """Return the origin of a key whose only tensor has another size in one dimension, for what both have, and what is reported of it.

    None where it isn't so: shapes differ otherwise, or the key is made of parts of several tensors.
    """
    if len(origin.stored) != 1 or len(origin.sources) != 1:
        return None
    (source,), (stored,) = origin.sources, origin.stored.values()
    whole = source.slab
    if only_difference(stored, source.shape) is None or len(source.shape) != len(whole.global_shape) or len(source.ranges) != 1:
        return None
    both = tuple(min(sizes) for sizes in zip(stored, source.shape, strict=True))
    saved = stored[::-1] if source.transpose else stored
    resized = Resized(whole.key, source.name, saved, whole.global_shape)
    return Origin((replace(source, shape=both, ranges=(Range(0, both[0]),)),), origin.stored), resized


def _named(sources: Iterable[TensorSource], head: Head | None) -> tuple[TensorSource, ...]:
    return tuple(sources) if head is None else tuple(replace(one, name=head.tensor) for one in sources)
