"""A checkpoint as the files of a Hugging Face model; Paddle isn't needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import CheckpointError, MismatchError, counted, size_text
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue
from ..storage.read_lock import while_reading
from .base_of_adapters import open_base
from .config import ModelConfig, companion_files, read_config
from .contents import Contents, check_has_masters, contents_of
from .lora import fits_recipe, fits_spelled, is_lora_key, unwrapped, weight_names, without_lora
from .merging import MergingReader, adapted_model, base_of
from .model_tensors import model_tensors
from .new_directory import new_directory, sync
from .one_model import check_one_model, open_model
from .optimizer_tensors import OPTIMIZER_DIRECTORY, optimizer_tensors, write_optimizer
from .output import OutputTensor
from .recipes import AUTO, choose_recipe
from .recipes.rules import Recipe
from .recipes.spelling import spelled_for
from .safetensors_files import INDEX_NAME, write_files
from .tensors import TensorReader
from .values import check_values

DEFAULT_MAX_SHARD_NBYTES = 5 * 10**9
"""As in ``transformers``."""

_OF_QUANTIZED = ("int8", "uint8", "int32")
"""Types of the tensors that quantized values are stored in."""


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        source: the checkpoint.
        path: the directory with the model.
        recipe: name of the one that was used.
        tensors: how many.
        nbytes: of their values.
        files: their names, all.
        tied: name of a tensor that was left out -> the one that it is.
        notes: what the caller should know, in sentences.
        optimizer_tensors: how many tensors with states.
        optimizer_nbytes: of their values.
        unchecked: what could not be checked, in a sentence; the command line says it on standard error.
    """

    source: Path
    path: Path
    recipe: str
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    tied: dict[str, str]
    notes: tuple[str, ...]
    optimizer_tensors: int = 0
    optimizer_nbytes: int = 0
    unchecked: str | None = None

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        return asdict(self) | {"source": str(self.source), "path": str(self.path)}

    def __str__(self) -> str:
        amount = f"{counted(self.tensors, 'tensor')}, {size_text(self.nbytes)} in {counted(len(self.files), 'file')}"
        lines = [f"'{self.path}': {amount}, by the recipe '{self.recipe}'"]
        if self.optimizer_tensors:
            lines.append(
                f"- {counted(self.optimizer_tensors, 'tensor')} with optimizer states, {size_text(self.optimizer_nbytes)}, in "
                f"{OPTIMIZER_DIRECTORY}/"
            )
        lines += [f"- {name} is {other}, and written once" for name, other in self.tied.items()]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])


@while_reading("path", "base")
def export_huggingface(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: str = AUTO,
    config: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    master_weights: bool = False,
    base: str | os.PathLike[str] | None = None,
    merge_lora: bool = False,
    lora_alpha: float | None = None,
    allow_other_base: bool = False,
    max_shard_nbytes: int = DEFAULT_MAX_SHARD_NBYTES,
    progress: Callable[[int, int], None] | None = None,
    optimizer: bool = False,
    workers: int = 1,
    model_name: str | None = None,
) -> ExportReport:
    """Write the model of a checkpoint as ``model-00001-of-0000N.safetensors`` files and their index, as a whole or not at all.

    The checkpoint may be of any number of ranks, ours or stock Paddle's. Memory stays below its largest tensor and a few tens of MiB.
    Digests are checked as bytes pass.

    Args:
        path: the checkpoint directory.
        out: the directory to make; missing or empty.
        recipe: how names and layouts change, see :func:`~.recipes.choose_recipe`.
        config: the model's ``config.json``, or the directory in which it lies; copied, with tokenizer files that lie there.
        dtype: Paddle's name of a floating point type that all floating point tensors get, rounded to the nearest, ties to even; by default
            each keeps its own.
        master_weights: take the values of parameters that have a master weight from that.
        base: the checkpoint with the base of the LoRA adapters that ``path`` holds, which are merged into it; its names may begin
            otherwise, and it may hold several models. Or a Hugging Face model, which is made a checkpoint beside ``out`` while this runs.
        merge_lora: merge the LoRA adapters that ``path`` holds into the weights that it holds too.
        lora_alpha: where the checkpoint doesn't say how adapters scale, they do by ``lora_alpha / r``.
        allow_other_base: merge into a base that is not what it was when the adapters were saved.
        max_shard_nbytes: how many bytes of values a file has at most; a larger tensor gets a file of its own.
        progress: called now and then with the number of bytes written so far, and of all.
        optimizer: write the optimizer's states too, into the directory ``optimizer`` in there; see :mod:`.optimizer_tensors`.
        workers: how many threads read and convert; with more than one, each holds some tensors whole.
        model_name: which model, where several were saved under names.

    Raises:
        TargetExistsError: ``out`` is there and not empty.
        MismatchError: recipe, configuration and checkpoint don't fit each other.
        CorruptCheckpointError: the checkpoint is damaged.
        CheckpointError: whatever else is wrong with what was given. In all cases ``out`` is as it was.
        OSError: the system refused; ``out`` is as it was.
    """
    if max_shard_nbytes < 1:
        raise CheckpointError(f"a file can't have {max_shard_nbytes} bytes at most")
    index = open_model(Path(path), model_name)
    contents = contents_of(index)
    model_config = None if config is None else read_config(Path(config))
    names = [*without_lora(contents).model, *weight_names(index)]
    family = choose_recipe(recipe, model_config)
    if model_name is None:
        check_one_model(index.path, names, lambda some: fits_spelled(family, some, is_wrapped=base is not None or merge_lora))
    chosen = spelled_for(family, names)
    adapted = None
    if optimizer and (base is not None or merge_lora):
        raise CheckpointError(
            "LoRA adapters' states are not those of the weights that they are merged into; leave --optimizer (optimizer=) out"
        )
    with ExitStack() as opened:
        if base is not None or merge_lora:
            base_index = None
            if base is not None:
                of_base = family.name if recipe == AUTO else recipe
                opening = open_base(Path(base), Path(out), base_of(index), recipe=of_base, workers=workers, progress=progress)
                base_index = _unwrapped(opened.enter_context(opening), chosen)
            adapted = adapted_model(
                _unwrapped(index, chosen) if base is None else index,
                base_index,
                alpha=lora_alpha,
                master_weights=master_weights,
                allow_other_base=allow_other_base,
            )
            index, contents = adapted.base, adapted.contents
        else:
            _check_not_adapted(index, contents, chosen)
        if master_weights:
            check_has_masters(path, contents, *([] if adapted is None else [contents_of(adapted.adapted)]))
        model = model_tensors(index, contents, chosen, model_config, master_weights=master_weights)
        states = optimizer_tensors(index, contents, chosen, model_config) if optimizer else None
        sources = [*model.sources, *(states.sources if states is not None else ())]
        check_values(index, sorted({source.slab.key for source in sources}))
        reader = TensorReader(index, dtype) if adapted is None else MergingReader(adapted, dtype)
        tensors = [reader.output(source) for source in model.sources]
        _check_not_said_quantized(tensors, model_config)
        merged = [] if adapted is None else [f"{counted(len(adapted.adapters), 'LoRA adapter was', 'LoRA adapters were')} merged"]
        model_nbytes, states_nbytes = sum(tensor.nbytes for tensor in tensors), 0 if states is None else states.nbytes
        shown = _Parts(progress, model_nbytes + states_nbytes)
        with new_directory(Path(out)) as staging:
            files = write_files(staging, tensors, max_shard_nbytes, model.tied, shown.show, workers=workers)
            reader.check_overflows()
            if states is not None:
                shown.begin_second(model_nbytes)
                written = write_optimizer(staging, index, states, max_shard_nbytes, shown.show, workers=workers)
                files += [f"{OPTIMIZER_DIRECTORY}/{name}" for name in written]
            companions = {} if config is None else companion_files(Path(config))
            for name, companion in companions.items():
                shutil.copyfile(companion, staging / name)
                sync(staging / name)
        return ExportReport(
            source=Path(path),
            path=Path(out),
            recipe=chosen.name,
            tensors=len(tensors),
            nbytes=model_nbytes,
            files=(*files, INDEX_NAME, *companions),
            tied=model.tied,
            notes=(*merged, *model.notes, *_dtype_notes(tensors, model_config), *(() if states is None else states.notes)),
            optimizer_tensors=0 if states is None else len(states.sources),
            optimizer_nbytes=states_nbytes,
            unchecked=model.unchecked,
        )


def _unwrapped(index: CheckpointIndex, recipe: Recipe) -> CheckpointIndex:
    return unwrapped(index, without_lora(contents_of(index)).model, fits_recipe(recipe))


def _check_not_adapted(index: CheckpointIndex, contents: Contents, recipe: Recipe) -> None:
    """Raise where a checkpoint holds LoRA adapters that nobody said what to do with."""
    if index.manifest is not None and index.manifest.base:
        raise CheckpointError(
            f"'{index.path}' was saved without its base; give that by --base DIR (base=), or export the adapters, --to peft"
        )
    lora = [key for key in contents.model if is_lora_key(key)]
    if lora and not all(any(rule.match(key) is not None for rule in recipe.rules) for key in lora):
        raise CheckpointError(
            f"'{index.path}' holds LoRA adapters, such as '{lora[0]}'; say --merge-lora (merge_lora=), or export them, --to peft"
        )


def _check_not_said_quantized(tensors: list[OutputTensor], config: ModelConfig | None) -> None:
    """Raise where the configuration is that of a quantized model, as which a reader would take the tensors, and none of them is so."""
    if config is not None and config.quantization is not None and not any(tensor.dtype in _OF_QUANTIZED for tensor in tensors):
        raise MismatchError(
            f"'{config.path}' says that the model is quantized ({config.quantization}), and the checkpoint's tensors are not; give a "
            "configuration without quantization_config, such as that of the model before it was quantized"
        )


def _dtype_notes(tensors: list[OutputTensor], config: ModelConfig | None) -> list[str]:
    """Say where the configuration names another dtype than the tensors have, to which ``transformers`` would convert them."""
    wanted = None if config is None else config.get("dtype") or config.get("torch_dtype")
    found = sorted({tensor.dtype for tensor in tensors})
    return [f"config.json says dtype {wanted!r:.100}, and the tensors are {' and '.join(found)}"] if wanted and found != [wanted] else []


class _Parts:
    """Progress over two parts, one after the other, as one."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._before = 0

    def begin_second(self, before: int) -> None:
        """What comes now is beside the bytes of the first."""
        self._before = before

    def show(self, done: int, _: int) -> None:
        """Show how far the part is."""
        if self._progress is not None:
            self._progress(self._before + done, self._total)
