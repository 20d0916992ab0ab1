"""Write a checkpoint of one rank, a block of bytes at a time; Paddle isn't needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from ..errors import CheckpointError
from ..pieces import whole_piece
from ..storage.digests import Digester
from ..storage.format import MANIFEST_NAME, rank_file_name
from ..storage.header import encode_header, in_file_order
from ..storage.manifest import FileRecord, Manifest, utc_now
from ..version import __version__
from .output import OutputTensor, blocks_in_order


def write_checkpoint(
    directory: Path,
    tensors: Sequence[OutputTensor],
    tied: Sequence[tuple[str, ...]],
    progress: Callable[[int, int], None] | None = None,
    *,
    workers: int = 1,
) -> None:
    """Write tensors as the parameters of a checkpoint of one rank, without step and optimizer.

    Args:
        directory: empty so far; its files reach the disk.
        tensors: each name once.
        tied: the sorted names of each tensor that has several.
        progress: called with the number of bytes written so far, and of all.
        workers: see :func:`~.output.blocks_in_order`.

    Raises:
        CheckpointError: a name that the format can't hold, or more than it can.
        OSError: the system refused.
    """
    pieces = [whole_piece(one.name, one.dtype, one.shape) for one in tensors]
    order = in_file_order(pieces)
    try:
        header = encode_header([pieces[number] for number in order])
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    digester = Digester(len(header))
    total = sum(one.nbytes for one in tensors)
    done = 0
    path = directory / rank_file_name(0)
    with open(path, "xb") as file, closing(blocks_in_order([tensors[number] for number in order], workers)) as made:
        file.write(header)
        digester.update(memoryview(header))
        for _, blocks in made:
            for block in blocks:
                digester.update(block)
                done += file.write(block)
                if progress is not None:
                    progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    record = FileRecord(path.name, len(header) + done, len(order), digester.finish(), len(header))
    manifest = Manifest(None, 1, utc_now(), {"paddle_fsdp_ckpt": __version__}, [], None, (record,), tuple(tied))
    with open(directory / MANIFEST_NAME, "x", encoding="utf-8") as text:
        text.write(manifest.to_json())
        text.flush()
        os.fsync(text.fileno())
