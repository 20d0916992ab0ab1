"""Where the values of each tensor of a Hugging Face model lie: its safetensors files, read like a checkpoint's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError, counted, listing
from ..storage.entries import Box, Entry
from ..storage.format import DTYPE_NAMES, DTYPE_NBYTES, LENGTH_NBYTES
from ..storage.header import METADATA_KEY, header_nbytes
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue, cut_text, parse_json
from ..storage.manifest import FileRecord
from ..storage.stock import is_stock
from ..storage.system_errors import is_there
from .config import ModelConfig
from .recipes import RECIPES
from .recipes.rules import Recipe
from .roots import entries_of, is_checkpoint
from .safetensors_files import INDEX_NAME

COMPUTED = ".rotary_emb.inv_freq"
"""How names of tensors end that old models on the hub have and no reader needs."""

UNQUANTIZED = "take the model as it is published in bfloat16 or float32, or dequantize it first with the tool that quantized it"
"""What to do about a model that is quantized."""

_SINGLE_NAME = "model.safetensors"
_MAX_INDEX_NBYTES = 1 << 28


def is_huggingface(directory: Path) -> bool:
    """Tell whether a directory looks like a Hugging Face model, and like no checkpoint."""
    return not is_checkpoint(directory) and any(is_there(directory / name) for name in (_SINGLE_NAME, INDEX_NAME))


def read_huggingface_index(directory: Path) -> CheckpointIndex:
    """Read the headers of a model's safetensors files; its ``manifest`` is None, and the files have no digests.

    The files may be links, as in the cache of ``huggingface_hub``.

    Raises:
        IncompleteCheckpointError: there is no model, or a file of it is missing.
        CorruptCheckpointError: a file is malformed, or not of this model.
        UnsafeCheckpointError: the index names files that are not plain names, or something is beyond all sizes.
        CheckpointError: it is a checkpoint, there are two models, the files lie in several directories, or have a dtype that is not
            supported.
    """
    if not directory.is_dir():
        raise IncompleteCheckpointError(
            f"there is no directory '{directory}'; check the path. Names of models on a hub are not fetched: download the model first, and "
            "give the directory that it lies in"
        )
    weight_map = _weight_map(directory)
    names = sorted(set(weight_map.values())) if weight_map is not None else [_SINGLE_NAME]
    if _SINGLE_NAME not in names and is_there(directory / _SINGLE_NAME):
        raise CheckpointError(
            f"'{directory}' holds two models: '{_SINGLE_NAME}', which transformers reads, and '{INDEX_NAME}', which names other files; "
            "move away what isn't meant"
        )
    paths = [Path(os.path.realpath(directory / name)) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if not path.is_file()]
    if missing and weight_map is None:
        _refuse_checkpoints(directory)
    if missing:
        raise IncompleteCheckpointError(
            f"'{directory}' lacks {listing(missing)}; a model in safetensors files is needed, download it again"
        )
    if len({path.parent for path in paths}) > 1:
        raise CheckpointError(f"the files of '{directory}' are links into several directories; copy them into one")
    index = CheckpointIndex(paths[0].parent, tuple(FileRecord(path.name, path.stat().st_size, 0) for path in paths), {}, {})
    found: set[str] = set()
    for number, path in enumerate(paths):
        entries = list(_read_header(path))
        for key, *_ in entries:
            if key in found or (weight_map is not None and weight_map.get(key) != names[number]):
                raise CorruptCheckpointError(
                    f"'{directory / names[number]}' has '{key}', which the index doesn't give it; download it again"
                )
        found.update(key for key, *_ in entries)
        for conflict in index.add(number, [entry for entry in entries if entry[2].numel]):
            raise CorruptCheckpointError(conflict)
    lacking = [f"'{key}'" for key in weight_map or () if key not in found]
    if lacking:
        raise IncompleteCheckpointError(f"the files of '{directory}' lack {listing(lacking)}, which the index names; download them again")
    if not index.stored:
        raise IncompleteCheckpointError(
            f"'{directory}' has {counted(len(found), 'tensor')}, and no values; where ranks each kept a part of the model, save all of it"
        )
    return index


def check_not_quantized(config: ModelConfig | None, recipe: Recipe) -> None:
    """Raise where a model is quantized, and a family's recipe would take its tensors for weights.

    Raises:
        CheckpointError: so it is.
    """
    if config is not None and config.quantization is not None and recipe in RECIPES.values():
        raise CheckpointError(f"'{config.path}' says that the model is quantized ({config.quantization}); {UNQUANTIZED}")


def _refuse_checkpoints(directory: Path) -> None:
    """Raise where a directory that is no Hugging Face model is a checkpoint, or holds some: the way is the other one then."""
    way_out = "`convert DIR --to hf OUT` (export_huggingface) makes a Hugging Face model of it, and load(path, model=model) reads it"
    if is_checkpoint(directory):
        whose = "stock Paddle's" if is_stock(directory) else "this package's"
        raise CheckpointError(f"'{directory}' is a checkpoint already, {whose}, not a Hugging Face model: {way_out}")
    if inside := entries_of(directory).checkpoints:
        names = listing(one.name for one in inside)
        raise CheckpointError(
            f"'{directory}' is no Hugging Face model, and holds {counted(len(inside), 'checkpoint')}: {names}. Of one of them, {way_out}"
        )


def _weight_map(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX_NAME
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_INDEX_NBYTES:
        raise UnsafeCheckpointError(f"'{path}' has {path.stat().st_size} bytes, more than any index needs; it was not read")
    try:
        value = parse_json(path.read_text(encoding="utf-8"), allow_nan=True)
        weight_map = value["weight_map"]
        if not weight_map or any(type(name) is not str for name in weight_map.values()):
            raise ValueError("its weight_map is none")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"'{path}' is malformed: {cut_text(error)}; download it again") from error
    strange = [name for name in weight_map.values() if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name]
    if strange:
        raise UnsafeCheckpointError(f"'{path}' names a file {strange[0]!r:.200}, which is no plain name; it was not opened")
    found: dict[str, str] = weight_map
    return found


def _read_header(path: Path) -> Iterator[Entry]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = header_nbytes(file.read(LENGTH_NBYTES), size, f"'{path}'")
        try:
            yield from _entries(path, parse_json(file.read(length).decode()), LENGTH_NBYTES + length, size)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise CorruptCheckpointError(f"'{path}' is malformed: {cut_text(error)}; download it again") from error


def _entries(path: Path, header: JsonValue, data_start: int, size: int) -> Iterator[Entry]:
    """Yield what a header describes, checked as the format wants it: no holes, and nothing twice."""
    header.pop(METADATA_KEY, None)
    position = data_start
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPE_NAMES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"'{path}': '{key:.500}' has the dtype {entry['dtype']!r:.100}, which is not supported; {UNQUANTIZED}")
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        if any(type(one) is not int or one < 0 for one in (*shape, start, stop)):
            raise ValueError(f"'{key:.500}' has a shape or a place that is not of whole numbers")
        numel = math.prod(shape)
        if data_start + start != position or stop - start != numel * DTYPE_NBYTES[dtype]:
            raise ValueError(
                f"'{key:.500}' is {dtype} {list(shape)}, and said to be at bytes [{start}, {stop}) of the data, which doesn't fit"
            )
        yield key, dtype, Box(shape, (0,) * len(shape), shape, numel), 0, numel, position
        position = data_start + stop
    if position != size:
        raise ValueError(f"it has {size} bytes, and describes {position}")
