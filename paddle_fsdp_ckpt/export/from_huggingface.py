"""The files of a Hugging Face model as a checkpoint, which ``load`` reads at any number of ranks; Paddle isn't needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import MismatchError, counted, size_text
from ..storage.comparison import have_same_values
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue
from .checkpoint_file import write_checkpoint
from .config import CONFIG_NAME, TIED, ModelConfig, read_config
from .huggingface_files import COMPUTED, check_not_quantized, read_huggingface_index
from .model_tensors import check_described
from .new_directory import new_directory
from .recipes import AUTO, RECIPES, choose_recipe
from .recipes.rules import Recipe, TensorSource, apply_rule
from .tensors import TensorReader


@dataclass(frozen=True)
class ImportReport:
    """What was written.

    Attributes:
        source: directory of the model.
        path: the checkpoint.
        recipe: name of the one that was used.
        keys: how many.
        nbytes: of their values.
        tied: the names of each tensor that has several.
    """

    source: Path
    path: Path
    recipe: str
    keys: int
    nbytes: int
    tied: tuple[tuple[str, ...], ...]

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        return asdict(self) | {"source": str(self.source), "path": str(self.path)}

    def __str__(self) -> str:
        lines = [f"'{self.path}': {counted(self.keys, 'key')}, {size_text(self.nbytes)}, by the recipe '{self.recipe}'"]
        return "\n".join([*lines, *(f"- {' = '.join(names)} is one tensor" for names in self.tied)])


def import_huggingface(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: str = AUTO,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    workers: int = 1,
) -> ImportReport:
    """Write the model in a directory with safetensors files as a checkpoint of one rank, as a whole or not at all.

    Fused projections stay apart: the checkpoint is that of a model without them. Memory stays below the largest tensor and a few
    tens of MiB. Stock Paddle can't read the checkpoint, since its own metadata is not written.

    Args:
        path: directory of the model: ``config.json``, and ``model.safetensors`` or several with an index.
        out: the checkpoint directory to make; missing or empty.
        recipe: how names and layouts change, see :func:`~.recipes.choose_recipe`.
        dtype: Paddle's name of a floating point type that all floating point tensors get, rounded to the nearest, ties to even; by default
            each keeps its own.
        progress: called now and then with the number of bytes written so far, and of all.
        workers: how many threads read and convert; with more than one, each holds some tensors whole.

    Raises:
        TargetExistsError: ``out`` is there and not empty.
        MismatchError: recipe, configuration and tensors don't fit each other.
        CheckpointError: whatever else is wrong with what was given. In all cases ``out`` is as it was.
        OSError: the system refused; ``out`` is as it was.
    """
    directory = Path(path)
    index = read_huggingface_index(directory)
    config = read_config(directory) if (directory / CONFIG_NAME).exists() else None
    chosen = choose_recipe(recipe, config)
    check_not_quantized(config, chosen)
    sources, tied = _sources(index, chosen, config)
    if chosen in RECIPES.values():  # rules of a file may be for more than the configuration describes
        check_described(directory, chosen, config, {source.slab.key: source.slab.global_shape for source in sources}, {}, ())
    reader = TensorReader(index, dtype)
    tensors = [reader.output(source) for source in sources]
    with new_directory(Path(out)) as staging:
        write_checkpoint(staging, tensors, tied, progress, workers=workers)
        reader.check_overflows()
    return ImportReport(directory, Path(out), chosen.name, len(tensors), sum(one.nbytes for one in tensors), tuple(tied))


def _sources(index: CheckpointIndex, recipe: Recipe, config: ModelConfig | None) -> tuple[list[TensorSource], list[tuple[str, ...]]]:
    """Return what the keys of the checkpoint come from, and which of them are tied."""
    names = [name for name in index.stored if not name.endswith(COMPUTED)]
    sources: dict[str, TensorSource] = {}
    for name, (rule, values) in recipe.inverse().rules_of(names).items():
        (source,) = apply_rule(rule, values, index.whole_piece(name), config)
        if source.name in sources:
            raise MismatchError(f"'{name}' and '{sources[source.name].slab.key}' both become '{source.name}'")
        if recipe.is_extended:
            _check_not_hidden(recipe, source)
        sources[source.name] = source
    tied = []
    for rule in recipe.rules:
        if rule.tied_to in sources and _is_tied(index, rule.source, sources.get(rule.source), sources[rule.tied_to], config):
            sources[rule.source] = replace(sources[rule.tied_to], name=rule.source)
            tied.append(tuple(sorted((rule.source, rule.tied_to))))
    return list(sources.values()), tied


def _check_not_hidden(recipe: Recipe, source: TensorSource) -> None:
    """Raise where a rule that makes a key of a tensor isn't the one that takes this key, since an own one of the recipe does."""
    rule, values = recipe.rules_of([source.name])[source.name]
    if source.slab.key not in rule.target_names(values, source.shape):
        raise MismatchError(
            f"'{source.slab.key}' would become '{source.name}', and that belongs to the rule for '{rule.source}' of the recipe "
            f"'{recipe.name}', which makes something else of it; give the recipe of this model"
        )


def _is_tied(index: CheckpointIndex, key: str, source: TensorSource | None, other: TensorSource, config: ModelConfig | None) -> bool:
    is_said = config is not None and config.get(TIED) is True
    if source is None and config is not None and not is_said:
        raise MismatchError(f"the model has nothing that becomes '{key}', and '{config.path}' doesn't say \"{TIED}\": true")
    if source is not None and is_said and not have_same_values(index, [source.slab.key, other.slab.key]):
        raise MismatchError(
            f"the configuration says {TIED}, and '{source.slab.key}' and '{other.slab.key}' have other values; say false there if that is "
            "meant"
        )
    return source is None or is_said
