"""The LoRA adapters of a checkpoint in the layout of ``peft``, which reads them onto the base model of ``transformers``.

Names and layout as ``peft`` 0.21 saves them: ``base_model.model.<layer>.lora_A.weight`` [r, in] and ``...lora_B.weight`` [out, r]; the
layers are named as in the model's files for Hugging Face.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, MismatchError, counted, listing
from ..layout import Range
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue
from ..storage.read_lock import while_reading
from .config import ModelConfig, read_config
from .contents import check_has_masters, contents_of
from .huggingface import ExportReport
from .lora import Adapter, find_adapters, fits_recipe, fits_spelled, is_lora_key, unwrapped, weight_names
from .new_directory import new_directory
from .one_model import check_one_model, open_model
from .recipes import AUTO, COPY, RECIPES, choose_recipe
from .recipes.rules import Recipe, TensorSource, apply_rule
from .recipes.spelling import spelled_for
from .safetensors_files import write_file
from .tensors import TensorReader
from .values import check_values

CONFIG_NAME, FILE_NAME = "adapter_config.json", "adapter_model.safetensors"

_BEFORE, _WEIGHT = "base_model.model.", ".weight"

_MOST_COMPARISONS = 200_000
"""Of names of layers, to find out whether one can be taken for another; they take below a second."""


class PeftLayer(NamedTuple):
    """One LoRA layer as ``peft`` has it: its name, the matrices that it is made of, and which columns of ``lora_B``."""

    name: str
    adapter: Adapter
    columns: tuple[Range, ...]

    def sources(self) -> Iterator[TensorSource]:
        """Yield where its two tensors come from; both lie the other way round there."""
        a, b, rank = self.adapter.a, self.adapter.b, self.adapter.rank
        width = sum(one.numel for one in self.columns)
        yield TensorSource(f"{_BEFORE}{self.name}.lora_A.weight", (rank, a.global_shape[0]), a, (Range(0, rank),), transpose=True)
        yield TensorSource(f"{_BEFORE}{self.name}.lora_B.weight", (width, rank), b, self.columns, transpose=True)


@while_reading("path")
def export_peft(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: str = AUTO,
    config: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    master_weights: bool = False,
    lora_alpha: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    model_name: str | None = None,
) -> ExportReport:
    """Write the LoRA adapters of a checkpoint as ``adapter_model.safetensors`` and ``adapter_config.json``, as a whole or not at all.

    Args:
        path: the checkpoint directory, with the base or without.
        out: the directory to make; missing or empty.
        recipe: how names and layouts change, see :func:`~.recipes.choose_recipe`. Of a fused projection each part gets an adapter.
        config: the ``config.json`` of the base, or the directory in which it lies.
        dtype: Paddle's name of a floating point type that all tensors get; by default each keeps its own.
        master_weights: take the values of matrices that have a master weight from that.
        lora_alpha: where the checkpoint doesn't say how adapters scale, they do by ``lora_alpha / r``.
        progress: called now and then with the number of bytes written so far, and of all.
        model_name: which model, where several were saved under names.

    Raises:
        TargetExistsError: ``out`` is there and not empty.
        MismatchError: recipe, configuration and checkpoint don't fit each other, or more trained than LoRA layers.
        CorruptCheckpointError: the checkpoint is damaged.
        CheckpointError: whatever else is wrong with what was given. In all cases ``out`` is as it was.
        OSError: the system refused; ``out`` is as it was.
    """
    model_config = None if config is None else read_config(Path(config))
    chosen = choose_recipe(recipe, model_config)
    index = open_model(Path(path), model_name)
    if model_name is None:
        check_one_model(index.path, weight_names(index), lambda names: fits_spelled(chosen, names, is_wrapped=True))
    index = unwrapped(index, weight_names(index), fits_recipe(chosen))
    chosen = spelled_for(chosen, weight_names(index))
    if master_weights:
        check_has_masters(path, contents_of(index))
    adapters = find_adapters(index, alpha=lora_alpha, master_weights=master_weights)
    more = _trained_besides(index)
    if more:
        raise MismatchError(
            f"'{index.path}' holds more that trained than LoRA layers, for which this layout has no room: {listing(more)}; export all "
            "of the model, --to hf (export_huggingface)"
        )
    layers = [layer for adapter in adapters for layer in _layers(adapter, chosen, model_config)]
    check_values(index, [piece.key for one in adapters for piece in (one.a, one.b)])
    reader = TensorReader(index, dtype)
    tensors = [reader.output(source) for layer in layers for source in layer.sources()]
    fields = adapter_config(layers, chosen, model_config, list_targets=not _ends_with_adapted(index, adapters))
    with new_directory(Path(out)) as staging:
        write_file(staging / FILE_NAME, tensors, {}, progress)
        reader.check_overflows()
        with open(staging / CONFIG_NAME, "x", encoding="utf-8") as file:
            json.dump(fields, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    return ExportReport(
        source=Path(path),
        path=Path(out),
        recipe=chosen.name,
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        files=(FILE_NAME, CONFIG_NAME),
        tied={},
        notes=(counted(len(layers), "LoRA layer"),),
    )


def _trained_besides(index: CheckpointIndex) -> list[str]:
    """Return what of a checkpoint trained, or may have, besides LoRA layers; buffers don't train."""
    manifest = index.manifest
    others = [key for key in contents_of(index).model if not is_lora_key(key)]
    if manifest is None or not manifest.optimizers:
        return others if manifest is not None and manifest.base is not None else []
    held = {name for one in manifest.optimizers for group in one["groups"] for name in group["parameters"]}
    untouched = {name for one in manifest.optimizers for name in one["without_gradient"]} if manifest.base is None else set()
    return [key for key in others if key in held - untouched]


def _layers(adapter: Adapter, recipe: Recipe, config: ModelConfig | None) -> Iterator[PeftLayer]:
    """Yield what a LoRA layer becomes: one, or one for each part of a fused projection."""
    key = adapter.weight.key
    (rule, values) = recipe.rules_of([key])[key]
    sources = list(apply_rule(rule, values, adapter.weight, config))
    if not sources or rule.unstack is not None:
        raise MismatchError(f"'{key}' is the weight of a LoRA layer, and the recipe '{recipe.name}' leaves it out or unstacks it")
    for source in sources:
        if not source.name.endswith(_WEIGHT) or (len(sources) > 1 and not rule.transpose):
            raise MismatchError(f"'{key}' becomes '{source.name}', which is no '{_WEIGHT[1:]}' of a layer that peft can adapt")
        if not rule.transpose and rule not in COPY.rules:
            raise MismatchError(
                f"the recipe '{recipe.name}' doesn't transpose '{key}', as it does a Linear's weight, and peft wants the adapters of other "
                "layers, such as an embedding, otherwise; merge them into their base, --to hf (export_huggingface)"
            )
        columns = source.ranges if rule.transpose else (Range(0, adapter.weight.global_shape[1]),)
        yield PeftLayer(source.name.removesuffix(_WEIGHT), adapter, columns)


def _ends_with_adapted(index: CheckpointIndex, adapters: Sequence[Adapter]) -> bool:
    """Tell whether the name of a layer without LoRA ends with that of one with it, as ``encoder.proj`` does with ``proj``."""
    adapted = {one.layer for one in adapters}
    base = () if index.manifest is None else index.manifest.base or ()
    others = {key.rpartition(".")[0] for key in (*contents_of(index).model, *base)} - adapted
    parts = (name.split(".") for name in others)
    return any(".".join(one[start:]) in adapted for one in parts for start in range(1, len(one)))


def adapter_config(layers: Sequence[PeftLayer], recipe: Recipe, config: ModelConfig | None, *, list_targets: bool) -> JsonValue:
    """Return what ``adapter_config.json`` is to say; where layers differ in rank or scaling, it has patterns for the rarer ones.

    ``peft`` takes a listed name in ``target_modules`` for those of all layers whose names end so, and a text for a regular expression that
    the whole name must match.

    Args:
        layers: all.
        recipe: from which their names are.
        config: of the model, if there is one.
        list_targets: whether no name of a layer that is not adapted ends with one of theirs.

    Raises:
        CheckpointError: two layers have one name.
    """
    twice = [f"'{name}'" for name, count in Counter(layer.name for layer in layers).items() if count > 1]
    if twice:
        raise CheckpointError(f"the recipe gives several LoRA layers one name: {listing(twice)}")
    ranks = {layer.name: layer.adapter.rank for layer in layers}
    alphas = {layer.name: _alpha(layer.adapter) for layer in layers}
    (rank, _), (alpha, _) = Counter(ranks.values()).most_common(1)[0], Counter(alphas.values()).most_common(1)[0]
    key_of = _pattern_keys([name for name in ranks if ranks[name] != rank or alphas[name] != alpha], list(ranks))
    name = None if config is None else config.get("_name_or_path")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if recipe.name in RECIPES else None,
        "base_model_name_or_path": name if isinstance(name, str) and name else None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {key_of[name]: one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {key_of[name]: one for name, one in alphas.items() if one != alpha},
        "target_modules": sorted(ranks) if list_targets else "|".join(re.escape(name) for name in sorted(ranks)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
    }


def _pattern_keys(names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Return what ``peft`` is to call some of the layers in a pattern, so that it finds these and no others.

    It takes a key for a regular expression, which the end of a layer's name, from a dot on, must match. That is as good as the name in most
    models, and what all versions of it understand; elsewhere keys begin with ``^``, as 0.21 understands.
    """
    is_plain = len(names) * len(others) <= _MOST_COMPARISONS and all(re.fullmatch(r"[\w.]+", name) for name in names)
    if is_plain:
        expressions = [(name, re.compile(rf"(.*\.)?{name}")) for name in names]
        is_plain = not any(one.fullmatch(other) for name, one in expressions for other in others if other != name)
    return {name: name if is_plain else f"^{re.escape(name)}" for name in names}


def _alpha(adapter: Adapter) -> float | int:
    """Return what ``peft`` divides by the rank to scale a layer."""
    alpha = adapter.scaling * adapter.rank
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-9) else alpha
