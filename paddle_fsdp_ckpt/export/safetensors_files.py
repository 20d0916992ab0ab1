"""Write ``model-00001-of-0000N.safetensors`` files as Hugging Face's tools read them, a block of bytes at a time.

The form is https://github.com/huggingface/safetensors#format: length, header, data without holes. ``format`` = ``pt`` in the header is what
``transformers`` asks for; the index file says which file has which tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import CheckpointError
from ..storage.format import DTYPE_CODES, DTYPE_NBYTES
from ..storage.header import LENGTH_NBYTES, MAX_HEADER_NBYTES, METADATA_KEY

INDEX_NAME = "model.safetensors.index.json"
_ALIGNMENT = 8


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that is to be written.

    Attributes:
        name: of the tensor.
        dtype: Paddle's dtype name.
        shape: of the tensor.
        nbytes: how many bytes its values have.
        blocks: yields them, row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: Callable[[], Iterator[memoryview]]


def write_files(
    directory: Path,
    tensors: Iterable[OutputTensor],
    max_file_nbytes: int,
    notes: Mapping[str, str],
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write tensors, in this order, into as many files as it takes, and the index of them; all reach the disk.

    Args:
        directory: empty so far.
        tensors: each name once.
        max_file_nbytes: how many bytes of values a file has at most; a larger tensor gets a file of its own.
        notes: for the headers.
        progress: called with the number of bytes written so far, and of all.

    Returns:
        The names of the files with tensors.

    Raises:
        CheckpointError: there are no tensors, or too many for a header.
        OSError: the system refused.
    """
    shards = list(_shards(tensors, max_file_nbytes))
    if not shards:
        raise CheckpointError("there is not one tensor to write")
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    done = 0
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, notes, None if progress is None else partial(_shift, progress, done, total))
        done += sum(tensor.nbytes for tensor in shard)
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with open(directory / INDEX_NAME, "x", encoding="utf-8") as file_of_index:
        json.dump(index, file_of_index, indent=2, ensure_ascii=False)
        file_of_index.write("\n")
        file_of_index.flush()
        os.fsync(file_of_index.fileno())
    return names


def write_file(
    path: Path, tensors: Sequence[OutputTensor], notes: Mapping[str, str], progress: Callable[[int, int], None] | None = None
) -> None:
    """Write one file of tensors, largest elements first, and bring it to the disk; arguments as for :func:`write_files`."""
    tensors = _aligned(tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    with open(path, "xb") as file:
        file.write(_header(tensors, notes))
        for tensor in tensors:
            written = 0
            for block in tensor.blocks():
                written += file.write(block)
                if progress is not None:
                    progress(done + written, total)
            if written != tensor.nbytes:
                raise AssertionError(f"{tensor.name}: {written} bytes written instead of {tensor.nbytes}")
            done += written
        file.flush()
        os.fsync(file.fileno())


def _shift(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _shards(tensors: Iterable[OutputTensor], max_file_nbytes: int) -> Iterator[list[OutputTensor]]:
    shard: list[OutputTensor] = []
    room = max_file_nbytes
    for tensor in tensors:
        if shard and tensor.nbytes > room:
            yield shard
            shard, room = [], max_file_nbytes
        shard.append(tensor)
        room -= tensor.nbytes
    if shard:
        yield shard


def _aligned(shard: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Return the tensors in an order in which each begins at a multiple of its element's size."""
    return sorted(shard, key=lambda tensor: -DTYPE_NBYTES[tensor.dtype])


def _header(shard: Sequence[OutputTensor], notes: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {METADATA_KEY: {"format": "pt", **notes}}
    position = 0
    for tensor in shard:
        entries[tensor.name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    encoded = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    if len(encoded) > MAX_HEADER_NBYTES:
        raise CheckpointError(f"{len(shard)} tensors need a header of {len(encoded)} bytes, and safetensors allows {MAX_HEADER_NBYTES}")
    return len(encoded).to_bytes(LENGTH_NBYTES, "little") + encoded
