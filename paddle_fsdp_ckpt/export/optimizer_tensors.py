"""The states of a checkpoint's optimizer, whole, beside the files of a Hugging Face model: for those who go on without Paddle.

In the directory ``optimizer`` lie

- ``states-0000I-of-0000N.safetensors`` and ``states.safetensors.index.json``, in the form of the model's own files. The state of a tensor
  is called ``<tensor>.<state>``, with Paddle's name of the state: ``model.norm.weight.moment1``; its master weight
  ``<tensor>.master_weight``.
  A state with a value for each element lies as the tensor lies, cut and transposed with it, so that elements correspond. One with a single
  value, such as ``beta1_pow_acc``, keeps its shape, [] or [1]; each tensor that a fused parameter becomes has it. ASGD's ``y`` keeps the
  shape [batches, elements], as far as its parameter is neither cut nor transposed. Dtypes are those of the checkpoint.
- ``optimizer.json``: ``format_version`` 1, ``step``, and ``optimizers``: of each its ``class``, ``learning_rate``, and ``groups`` with the
  ``parameters``, by the names of the tensors, and the ``settings`` that they have; as far as the checkpoint says it.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, MismatchError, counted, listing
from ..layout import Range
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue
from .config import ModelConfig
from .contents import Contents
from .model_tensors import model_tensors
from .new_directory import sync
from .recipes.rules import Recipe, TensorSource
from .safetensors_files import index_name, write_files
from .tensors import TensorReader

OPTIMIZER_DIRECTORY = "optimizer"
DESCRIPTION_NAME = "optimizer.json"
FORMAT_VERSION = 1
"""Of ``optimizer.json``."""

_STEM = "states"
_MASTER_WEIGHT = "master_weight"


@dataclass(frozen=True)
class OptimizerTensors:
    """What is to be written.

    Attributes:
        sources: one a state and tensor, each name once.
        names: parameter, as the checkpoint calls it -> the tensors that it becomes.
        notes: what the user should know, in sentences.
    """

    sources: tuple[TensorSource, ...]
    names: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(source.numel * DTYPE_NBYTES[source.slab.dtype] for source in self.sources)


def optimizer_tensors(index: CheckpointIndex, contents: Contents, recipe: Recipe, config: ModelConfig | None) -> OptimizerTensors:
    """Find out which tensors the optimizer's states of a model consist of; no values are read.

    Args:
        index: of the checkpoint.
        contents: its keys by what they are.
        recipe: how names and layouts of the parameters change.
        config: what the model's ``config.json`` says, if there is one.

    Raises:
        CheckpointError: there are no states.
        MismatchError: states can't be cut or transposed as their parameters are.
    """
    if not contents.states and not contents.masters:
        raise CheckpointError(f"'{index.path}' holds no states of an optimizer; leave --optimizer (optimizer=) out")
    model = model_tensors(index, contents, recipe, config, master_weights=False)
    first = {name: names[0] for names in contents.tied or () for name in names}
    sources: list[TensorSource] = []
    names: dict[str, tuple[str, ...]] = {}
    strange: list[str] = []
    for source in model.sources:
        owner = first.get(source.slab.key, source.slab.key)
        names[owner] = (*names.get(owner, ()), source.name)
        for state, key in _states(contents, owner):
            made = _source(index, source, state, key)
            if made is None:
                strange.append(f"'{key}' {list(index.global_shape(key))}")
            else:
                sources.append(made)
    if strange:
        raise MismatchError(
            f"{counted(len(strange), 'state lies', 'states lie')} otherwise than its parameter, which is cut or transposed: "
            f"{listing(strange)}; leave --optimizer (optimizer=) out, or use the recipe none"
        )
    counts = Counter(source.name for source in sources)
    twice = [f"'{name}'" for name, count in counts.items() if count > 1]
    if twice:
        raise MismatchError(f"several states get one name: {listing(twice)}; leave --optimizer (optimizer=) out")
    lost = sorted(owner for owner in {*contents.states, *contents.masters} if owner not in names and first.get(owner, owner) not in names)
    notes = (f"states of {counted(len(lost), 'parameter')} that the model doesn't have were left out: {listing(lost)}",) if lost else ()
    return OptimizerTensors(tuple(sources), names, notes)


def write_optimizer(
    directory: Path,
    index: CheckpointIndex,
    tensors: OptimizerTensors,
    max_file_nbytes: int,
    progress: Callable[[int, int], None],
    *,
    workers: int,
) -> list[str]:
    """Write the states of an optimizer into the directory ``optimizer`` in ``directory``, and return the names of the files in there.

    Args:
        directory: of the model.
        index: of the checkpoint.
        tensors: from it.
        max_file_nbytes: how many bytes of values a file has at most; a larger tensor gets a file of its own.
        progress: called with the number of bytes written so far, and of all.
        workers: see :func:`~.output.blocks_in_order`.

    Raises:
        OSError: the system refused.
    """
    inside = directory / OPTIMIZER_DIRECTORY
    inside.mkdir()
    reader = TensorReader(index, None)
    outputs = [reader.output(source) for source in tensors.sources]
    files = write_files(inside, outputs, max_file_nbytes, {}, progress, stem=_STEM, workers=workers)
    with open(inside / DESCRIPTION_NAME, "x", encoding="utf-8") as file:
        json.dump(_description(index, tensors), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    sync(inside)
    return [*files, index_name(_STEM), DESCRIPTION_NAME]


def _states(contents: Contents, owner: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the key of each state that a parameter has."""
    yield from ((state.removesuffix("_0"), key) for state, key in contents.states.get(owner, {}).items())
    if owner in contents.masters:
        yield _MASTER_WEIGHT, contents.masters[owner]


def _source(index: CheckpointIndex, parameter: TensorSource, state: str, key: str) -> TensorSource | None:
    """Return where a state of a tensor comes from; None where that can't be told."""
    name, shape = f"{parameter.name}.{state}", index.global_shape(key)
    if shape == parameter.slab.global_shape:
        return replace(parameter, name=name, slab=replace(parameter.slab, key=key, dtype=index.dtypes[key]))
    is_whole = parameter.numel == math.prod(parameter.slab.global_shape) and not parameter.transpose
    if math.prod(shape) == 1 or is_whole:
        return TensorSource(name, shape, index.whole_piece(key), (Range(0, (shape or (1,))[0]),))
    return None


def _description(index: CheckpointIndex, tensors: OptimizerTensors) -> JsonValue:
    manifest = index.manifest
    described = [] if manifest is None else manifest.optimizers
    return {
        "format_version": FORMAT_VERSION,
        "step": None if manifest is None else manifest.step,
        "optimizers": [
            {
                "class": one["class"],
                "learning_rate": one["learning_rate"],
                "groups": [
                    {
                        "parameters": [name for parameter in group["parameters"] for name in tensors.names.get(parameter, ())],
                        "settings": group["settings"],
                    }
                    for group in one["groups"]
                ],
            }
            for one in described
        ],
    }
