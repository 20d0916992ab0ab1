"""Which tensors of a Hugging Face model a checkpoint holds: recipe, configuration and checkpoint, checked against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, MismatchError, counted, listing
from ..layout import LOW_PRECISION
from ..pieces import Piece, whole_piece
from ..storage.comparison import have_same_values
from ..storage.index import CheckpointIndex
from .config import TIED, ModelConfig
from .contents import Contents
from .planning.architecture import planned_units
from .recipes import COPY, RECIPES
from .recipes.rules import BY_HEADS, Recipe, Rule, TensorSource, apply_rule
from .recipes.spelling import check_layout

_LAYER = "layer"


@dataclass(frozen=True)
class ModelTensors:
    """What is to be written.

    Attributes:
        sources: one a tensor, each name once, in the order of the checkpoint.
        tied: name of a tensor that is left out -> the one that it is.
        notes: what the user should know, in sentences.
        unchecked: what could not be checked, in a sentence.
    """

    sources: tuple[TensorSource, ...]
    tied: dict[str, str]
    notes: tuple[str, ...]
    unchecked: str | None = None


def model_tensors(
    index: CheckpointIndex, contents: Contents, recipe: Recipe, config: ModelConfig | None, *, master_weights: bool
) -> ModelTensors:
    """Find out which tensors the model of a checkpoint consists of; no values are read, save of tied tensors in stock directories.

    Args:
        index: of the checkpoint.
        contents: its keys by what they are.
        recipe: how names and layouts change.
        config: what the model's ``config.json`` says, if there is one.
        master_weights: take the values of parameters that have a master weight from that.

    Raises:
        MismatchError: they don't fit each other; it lists what doesn't.
        CheckpointError: something is missing that is needed.
    """
    rules = recipe.rules_of(contents.model)
    check_layout(recipe, {key: index.global_shape(key) for key in contents.model})
    _check_layers([values for _, values in rules.values()], config)
    kept = _tied_keys(index, contents, {key: rule for key, (rule, _) in rules.items()})
    sources_of = {
        key: tuple(apply_rule(rule, values, stored_piece(index, contents, key, master_weights=master_weights), config))
        for key, (rule, values) in rules.items()
        if key not in kept
    }
    tied: dict[str, str] = {}
    for key, other in kept.items():
        rule, values = rules[key]
        copy = replace(sources_of[other][0], name=rule.target_name(values))
        if config is not None and config.get(TIED) is not True:
            sources_of[key] = (copy,)  # a reader who isn't told that they are one needs both
        else:
            tied[copy.name] = sources_of[other][0].name
    for key, (rule, _) in rules.items():
        if rule.tied_to is not None and key not in kept:
            _check_untied(index, key, sources_of[key], sources_of.get(rule.tied_to, ()), config)
    sources = [source for key in contents.model for source in sources_of.get(key, ())]
    _check_names(sources)
    extended = {key for key, (rule, _) in rules.items() if recipe.is_extended and rule in recipe.own_rules}
    besides = {source.name for key in extended for source in sources_of.get(key, ())}
    unchecked = check_described(index.path, recipe, config, {source.name: source.shape for source in sources}, tied, besides)
    for key, (rule, _) in rules.items():
        if rule.split == BY_HEADS and config is not None and key in sources_of:
            _check_width_of_heads(key, sources_of[key], config)
    notes = _head_notes(recipe, rules.keys(), tied, config)
    if master_weights:
        bare = [key for key in contents.model if key not in contents.masters and index.dtypes[key] in LOW_PRECISION]
        notes += [f"{counted(len(bare), 'tensor has', 'tensors have')} no master weight, taken as stored: {listing(bare)}"] if bare else []
    return ModelTensors(tuple(sources), tied, tuple(notes), unchecked)


def stored_piece(index: CheckpointIndex, contents: Contents, key: str, *, master_weights: bool) -> Piece:
    """Return what the values of a key are taken from: itself or, with ``master_weights``, its master weight, where it has one.

    Raises:
        MismatchError: both have different shapes.
    """
    stored = contents.masters.get(key, key) if master_weights else key
    if index.global_shape(stored) != index.global_shape(key):
        raise MismatchError(
            f"'{key}' has shape {list(index.global_shape(key))}, and its master weight '{stored}' {list(index.global_shape(stored))}"
        )
    return index.whole_piece(stored)


def _tied_keys(index: CheckpointIndex, contents: Contents, rules: dict[str, Rule]) -> dict[str, str]:
    """Return the keys whose tensor another key has too, and that one."""
    kept = {}
    for key, rule in rules.items():
        if rule.tied_to is not None and rule.tied_to in index and _are_tied(index, contents, key, rule.tied_to):
            kept[key] = rule.tied_to
    for names in contents.tied or ():
        present = [key for key in contents.model if key in names and key not in kept and key not in contents.apart]
        first, *others = sorted(present, key=lambda key: key not in kept.values()) or [""]
        kept |= {key: first for key in others if rules[key].lies_as(rules[first])}
    return kept


def _are_tied(index: CheckpointIndex, contents: Contents, key: str, other: str) -> bool:
    if key in contents.apart or other in contents.apart:
        return False
    if contents.tied is not None:
        return any(key in names and other in names for names in contents.tied)
    return have_same_values(index, [key, other])


def _check_untied(
    index: CheckpointIndex, key: str, sources: Sequence[TensorSource], others: Sequence[TensorSource], config: ModelConfig | None
) -> None:
    if config is not None and config.get(TIED) is True:
        raise MismatchError(
            f"'{config.path}' says {TIED}, and in '{index.path}' '{key}' is a tensor of its own, which would be lost; give the "
            "configuration of this model, or say false there if it was trained so"
        )
    for source, other in zip(sources, others, strict=False):
        if source.shape != other.shape:
            raise MismatchError(
                f"'{key}' becomes {list(source.shape)}, and '{other.slab.key}' {list(other.shape)}; the recipe is that of another model"
            )


def _check_layers(found: Iterable[dict[str, str]], config: ModelConfig | None) -> None:
    """Raise where the layers are not those of the configuration."""
    layers = {int(values[_LAYER]) for values in found if _LAYER in values}
    if config is None or not layers:
        return
    wanted = set(range(config.layers))
    if layers != wanted:
        texts = [f"has no {_numbered(wanted - layers)}"] if wanted - layers else []
        texts += [f"has {_numbered(layers - wanted)} besides"] if layers - wanted else []
        raise MismatchError(
            f"'{config.path}' says num_hidden_layers = {len(wanted)}, numbered from 0, and the checkpoint {' and '.join(texts)}; give the "
            "configuration of this model"
        )


def _numbered(layers: Collection[int]) -> str:
    """Return which layers, such as "layer number 2" or "layers number 2, 3"."""
    return f"{'layer' if len(layers) == 1 else 'layers'} number {listing(map(str, sorted(layers)))}"


def check_described(
    path: Path,
    recipe: Recipe,
    config: ModelConfig | None,
    found: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    besides: Collection[str],
) -> str | None:
    """Raise where the configuration makes a model of other tensors, which a reader would start at random; as far as it says enough.

    Args:
        path: of the checkpoint.
        recipe: that made the tensors.
        config: of the model.
        found: their shapes, by their names.
        tied: see :class:`ModelTensors`.
        besides: those that rules of a file make which extends another recipe; of such the configuration may say nothing.

    Returns:
        What could not be checked of tensors that are copied as they are, or that no recipe of the configuration's family makes; None where
        there is nothing to say.
    """
    if config is None:
        return None
    family = RECIPES.get(str(config.model_type))
    if recipe is COPY and family is None:
        return (
            f"'{config.path}' has model_type {config.model_type!r:.100}, which no recipe knows; whether the tensors, copied as they are, "
            "fit it was not checked"
        )
    if family is None:
        return None
    is_family = family in (recipe, recipe.family)
    try:
        planned = [one for unit in planned_units(config, "float32") for one in unit.parameters]
    except CheckpointError as error:  # a field is missing, whose default is the reader's
        what = "the tensors, copied as they are, fit their" if recipe is COPY else "what the recipe makes fits its"
        return None if is_family else f"whether {what} configuration was not checked: {error}"
    pieces = {one.names[0]: whole_piece(one.names[0], one.dtype, one.shape) for one in planned}
    described = {
        source.name: source.shape
        for name, (rule, values) in family.rules_of(pieces).items()
        for source in apply_rule(rule, values, pieces[name], config)
    }
    known = {*tied, *_heads(recipe)} if is_family else _tied_to_heads(family, config, tied)  # of which it was said what is wrong
    lacking = [name for name in described if name not in found and name not in known]
    beyond = [name for name in found if name not in described and name not in known and name not in besides]
    others = [f"'{name}' {list(found[name])} for {list(shape)}" for name, shape in described.items() if found.get(name, shape) != shape]
    texts = [f"lacks {listing(lacking)}"] if lacking else []
    texts += [f"has besides {listing(beyond)}"] if beyond else []
    texts += [f"has other shapes: {listing(others)}"] if others else []
    if texts and recipe is COPY:
        if _is_own_form(family, found, {name: piece.global_shape for name, piece in pieces.items()}):
            return None
        raise MismatchError(
            f"'{path}', copied as it is, isn't the model that '{config.path}' describes; it {'; '.join(texts)}. "
            f"Give this model's configuration, and the recipe that makes what that says ({family.name} for PaddleFormers' names, or a FILE "
            "of rules that you write); or no configuration"
        )
    if texts and not is_family:
        raise MismatchError(
            f"the recipe '{recipe.name}' doesn't make of '{path}' the model that '{config.path}' describes; it {'; '.join(texts)}. "
            f"Mend the recipe, use that of the family ({family.name}), give this model's configuration, or none"
        )
    if texts:
        raise MismatchError(
            f"'{config.path}' describes another model than '{path}' holds, which {'; '.join(texts)}; give the configuration of this model"
        )
    if not is_family and (recipe.family or recipe) in RECIPES.values():
        return (
            f"the recipe '{recipe.name}' is not that of '{config.path}', which says model_type {family.name!r}; names and shapes of the "
            "tensors are those that it describes, and whether square matrices lie as it wants them was not checked"
        )
    undescribed = sorted(name for name in besides if name not in described)
    if undescribed:
        what = f"{counted(len(undescribed), 'tensor')}, which rules of the recipe '{recipe.name}' make: {listing(undescribed)}"
        return f"'{config.path}' describes a model without {what}; whether its reader takes them was not checked"
    return None


def _is_own_form(family: Recipe, found: Mapping[str, tuple[int, ...]], described: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether tensors, copied as they are, are those of PaddleFormers, which reads them with this configuration too.

    Fused projections, of which the configuration says nothing, are taken as they are.
    """
    try:
        family.rules_of(found)
    except MismatchError:
        return False
    return all(described.get(name, shape) == shape for name, shape in found.items())


def _tied_to_heads(family: Recipe, config: ModelConfig, tied: Mapping[str, str]) -> set[str]:
    """Return the names of tied tensors of which a reader of the configuration knows that they are one."""
    heads = {rule.targets[0] for rule in family.rules if rule.tied_to is not None}
    is_said = config.get(TIED) is True
    return {name for pair in tied.items() if is_said and heads.intersection(pair) for name in pair}


def _check_width_of_heads(key: str, sources: Sequence[TensorSource], config: ModelConfig) -> None:
    """Raise where a fused projection was divided among another number of heads than it has, which its rows fit too."""
    _, of_key, _ = sources
    groups = config.count("num_key_value_heads")
    width = of_key.shape[0] // groups
    said = config.count("head_dim", width)
    if said != width:
        raise MismatchError(
            f"'{key}' would have {counted(groups, 'key-value head')}, each {width} wide, and '{config.path}' says head_dim = {said}; give "
            "the configuration of this model"
        )


def _heads(recipe: Recipe) -> list[str]:
    """Return the keys of tensors that may be tied to others."""
    return [rule.source for rule in recipe.rules if rule.tied_to is not None]


def _check_names(sources: Sequence[TensorSource]) -> None:
    counts = Counter(source.name for source in sources)
    twice = [f"'{name}'" for name, count in counts.items() if count > 1]
    if twice:
        raise MismatchError(f"the recipe gives several tensors one name: {listing(twice)}")


def _head_notes(recipe: Recipe, keys: Collection[str], tied: dict[str, str], config: ModelConfig | None) -> list[str]:
    """Say, or raise, what the configuration must say of the head."""
    heads = _heads(recipe)
    lacking = [head for head in heads if head not in keys]
    if config is None:
        return [f'config.json must say "{TIED}": true'] if lacking or any(head in tied for head in heads) else []
    if lacking and config.get(TIED) is not True:
        raise MismatchError(
            f"the checkpoint has no '{lacking[0]}', and '{config.path}' doesn't say \"{TIED}\": true; give the configuration of this model"
        )
    return []
