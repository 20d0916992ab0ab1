"""Write ``model-00001-of-0000N.safetensors`` files as Hugging Face's tools read them, a block of bytes at a time.

The form is https://github.com/huggingface/safetensors#format: length, header, data without holes. ``format`` = ``pt`` in the header is what
``transformers`` asks for; the index file says which file has which tensor.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ..errors import CheckpointError
from ..storage.format import DTYPE_CODES, DTYPE_NBYTES, LENGTH_NBYTES, MAX_HEADER_NBYTES
from ..storage.header import METADATA_KEY
from .output import OutputTensor, blocks_in_order

_ALIGNMENT = 8


def index_name(stem: str) -> str:
    """Return the name of the file that says which file has which tensor."""
    return f"{stem}.safetensors.index.json"


MODEL = "model"
"""What the names of the files with a model begin with."""

INDEX_NAME = index_name(MODEL)


def write_files(
    directory: Path,
    tensors: Iterable[OutputTensor],
    max_file_nbytes: int,
    notes: Mapping[str, str],
    progress: Callable[[int, int], None] | None = None,
    *,
    stem: str = MODEL,
    workers: int = 1,
) -> list[str]:
    """Write tensors, in this order, into as many files as it takes, and the index of them; all reach the disk.

    Args:
        directory: empty so far.
        tensors: each name once.
        max_file_nbytes: how many bytes of values a file has at most; a larger tensor gets a file of its own.
        notes: for the headers.
        progress: called with the number of bytes written so far, and of all.
        stem: what the files' names begin with.
        workers: see :func:`~.output.blocks_in_order`.

    Returns:
        The names of the files with tensors.

    Raises:
        CheckpointError: there are no tensors, or too many for a header.
        OSError: the system refused.
    """
    shards = list(_shards(tensors, max_file_nbytes))
    if not shards:
        raise CheckpointError("there is not one tensor to write")
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    done = 0

    def show(nbytes: int) -> None:
        if progress is not None:
            progress(done + nbytes, total)

    with closing(blocks_in_order([tensor for shard in shards for tensor in shard], workers)) as made:
        for name, shard in zip(names, shards, strict=True):
            done += _write_file(directory / name, _header(shard, notes), itertools.islice(made, len(shard)), show)
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with open(directory / index_name(stem), "x", encoding="utf-8") as file_of_index:
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

    def show(nbytes: int) -> None:
        if progress is not None:
            progress(nbytes, total)

    _write_file(path, _header(tensors, notes), blocks_in_order(tensors, 1), show)


def _write_file(
    path: Path, header: bytes, tensors: Iterable[tuple[OutputTensor, Iterable[memoryview]]], show: Callable[[int], None]
) -> int:
    """Write one file, and return how many bytes of values it has."""
    total = 0
    with open(path, "xb") as file:
        file.write(header)
        for tensor, blocks in tensors:
            written = 0
            for block in blocks:
                written += file.write(block)
                show(total + written)
            if written != tensor.nbytes:
                raise AssertionError(f"{tensor.name}: {written} bytes written instead of {tensor.nbytes}")
            total += written
        file.flush()
        os.fsync(file.fileno())
    return total


def _shards(tensors: Iterable[OutputTensor], max_file_nbytes: int) -> Iterator[list[OutputTensor]]:
    shard: list[OutputTensor] = []
    room = max_file_nbytes
    for tensor in tensors:
        if shard and tensor.nbytes > room:
            yield _aligned(shard)
            shard, room = [], max_file_nbytes
        shard.append(tensor)
        room -= tensor.nbytes
    if shard:
        yield _aligned(shard)


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
