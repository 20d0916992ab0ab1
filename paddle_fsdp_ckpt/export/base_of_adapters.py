"""The base of LoRA adapters, as it lies somewhere: by names that begin otherwise, one of several models, or a Hugging Face model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError, MismatchError, listing
from ..storage.base_parameter import BaseParameter
from ..storage.checksums import checksum_text, seed_of, sum_of_elements
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.plan import FLOATING_DTYPES
from ..storage.stock import open_index
from .from_huggingface import import_huggingface
from .huggingface_files import is_huggingface
from .new_directory import check_free
from .renaming import renamed
from .values import iter_values


@contextmanager
def open_base(
    path: Path,
    out: Path,
    said: Mapping[str, BaseParameter],
    *,
    recipe: str,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[CheckpointIndex]:
    """Give the index of a base. A Hugging Face model is made a checkpoint first, in a directory beside ``out`` that is gone in the end.

    Args:
        path: the directory of a checkpoint, or of a Hugging Face model.
        out: what is to be made of base and adapters.
        said: what the base was when the adapters were saved; the model's values get its dtype, where it has just one.
        recipe: how the model's names and layouts change.
        workers: how many threads convert it.
        progress: called now and then with the number of bytes of it that were written so far, and of all.

    Raises:
        CheckpointError: there is neither, or it can't be read.
        OSError: the system refused.
    """
    if not is_huggingface(path):
        yield open_index(path)
        return
    target = Path(os.path.realpath(out))
    check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    dtypes = {one.dtype for one in said.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= FLOATING_DTYPES else None
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.base-", dir=target.parent) as beside:
        made = Path(beside) / path.name
        import_huggingface(path, made, recipe=recipe, dtype=dtype, workers=workers, progress=progress)
        try:
            yield open_index(made)
        except CheckpointError as error:  # whoever reads it knows the base by its own path
            raise type(error)(str(error).replace(f"'{made}'", f"'{path}'")) from error


class _Beginning(NamedTuple):
    """How names of a base begin for its adapters, and in the checkpoint."""

    here: str
    there: str

    def there_of(self, name: str) -> str:
        """Return what a name of the adapters is in the checkpoint."""
        return self.there + name.removeprefix(self.here) if name.startswith(self.here) else name


def base_by_names(base: CheckpointIndex, names: Sequence[str], said: Mapping[str, BaseParameter]) -> CheckpointIndex:
    """Return the index of a base by the names that its adapters know, where these begin otherwise in it; as it is where that isn't so.

    Args:
        base: as it lies there.
        names: that it must have.
        said: what the base was when the adapters were saved; it tells which of several models is meant.

    Raises:
        MismatchError: several models in it have these names, and it can't be told which is meant.
    """
    if all(name in base for name in names):
        return base
    found = _beginnings(base, names)
    if len(found) > 1:
        found = [one for one in found if _is_base(base, one, said)][:1] or found
    if len(found) > 1:
        texts = listing(f"'{one.there}'" for one in found)
        raise MismatchError(
            f"'{base.path}' has the names of the base with each of {texts} in front, and with none of them the values that the base had; "
            "write the model that is meant as a Hugging Face model by itself, `paddle-fsdp-ckpt convert DIR --to hf OUT --model NAME`, and "
            "give that as the base"
        )
    return _renamed(base, found[0], names) if found else base


def described_parameter(index: CheckpointIndex, key: str) -> BaseParameter:
    """Read a key's values, and return what a checkpoint without its base says of such a parameter."""
    dtype, shape = index.dtypes[key], index.global_shape(key)
    seed = seed_of(dtype, shape)
    parts = iter_values(index, [index.whole_piece(key)])
    sums = [sum_of_elements(part.values.view(np.uint8).data, DTYPE_NBYTES[dtype], part.start, seed) for part in parts]
    return BaseParameter(dtype, shape, checksum_text(seed, sums))


def _beginnings(base: CheckpointIndex, names: Sequence[str]) -> list[_Beginning]:
    """Return the beginnings of which each alone leads from all of the names to keys, by the longest ending that they leave."""
    first = next(name for name in names if name not in base)
    parts = first.split(".")
    for start in range(len(parts)):
        ending = ".".join(parts[start:])
        here = first.removesuffix(ending)
        theres = [key.removesuffix(ending) for key in base.stored if key == ending or key.endswith(f".{ending}")]
        found = [_Beginning(here, there) for there in theres]
        # One common last word, such as "weight", says nothing.
        found = [one for one in found if "." in ending or not all(one)]
        found = [one for one in found if all(one.there_of(name) in base for name in names)]
        if found:
            return found
    return []


def _is_base(base: CheckpointIndex, beginning: _Beginning, said: Mapping[str, BaseParameter]) -> bool:
    pairs = [(beginning.there_of(name), one) for name, one in said.items()]
    is_alike = all((base.dtypes[key], base.global_shape(key)) == (one.dtype, one.shape) for key, one in pairs)
    return bool(pairs) and is_alike and all(described_parameter(base, key) == one for key, one in pairs)


def _renamed(base: CheckpointIndex, beginning: _Beginning, names: Sequence[str]) -> CheckpointIndex:
    known = {beginning.there_of(name): name for name in names}

    def rename(key: str) -> str | None:
        if key in known:
            return known[key]
        if key.startswith(beginning.there):
            name: str | None = beginning.here + key.removeprefix(beginning.there)
        else:
            # With one more name in front of all, others are another model's.
            name = key if beginning.here else None
        return None if name in names_there else name

    names_there = set(names)
    return renamed(base, rename)
