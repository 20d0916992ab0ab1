"""The index of a checkpoint whose manifest is lost, by what each rank's file says of itself: all that nobody has digests of any more."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from ..errors import CheckpointError, CorruptCheckpointError
from .format import LENGTH_NBYTES, rank_file_name
from .header import decode_header, header_nbytes
from .index import CheckpointIndex, open_inside
from .manifest import FileRecord
from .system_errors import read_file


def read_headers_alone(path: Path) -> tuple[CheckpointIndex, dict[str, str]]:
    """Read the headers of all ranks' files in the directory ``path``, whatever its manifest says.

    How many ranks saved is not known: a file that is missing behind the last one is not missed, unless others hold parts of its keys.

    Returns:
        The index, whose ``manifest`` is None as of a directory of stock Paddle, and whose files have no digests; and, by their names, why
        the headers of other files can't be read. Of values that lie behind a sound header nothing is known.

    Raises:
        CorruptCheckpointError: the files are not of one save.
    """
    ending = rank_file_name(0)[1:]
    ranks = {name.removesuffix(ending) for name in os.listdir(path) if name.endswith(ending)}
    numbers = sorted(int(rank) for rank in ranks if rank.isascii() and rank.isdigit() and str(int(rank)) == rank)
    unreadable: dict[str, str] = {}
    found = []
    gaps = range(min(numbers[-1], 2 * len(numbers))) if numbers else ()  # not all where somebody made a file of a huge number
    for name in map(rank_file_name, sorted({*numbers, *gaps})):
        try:
            size, header = read_file(path / name, partial(_read_header, path, name))
            found.append((FileRecord(name, size, 0), list(decode_header(header, size, f"'{path / name}'"))))
        except (CheckpointError, OSError) as error:
            unreadable[name] = str(error)
    index = CheckpointIndex(path, tuple(record for record, _ in found), {}, {}, None)
    for number, (_, entries) in enumerate(found):
        for conflict in index.add(number, entries):
            raise CorruptCheckpointError(f"{conflict}. Load another checkpoint")
    return index, unreadable


def _read_header(path: Path, name: str) -> tuple[int, bytes]:
    descriptor, size = open_inside(path, name)
    with open(descriptor, "rb") as file:
        return size, file.read(header_nbytes(file.read(LENGTH_NBYTES), size, f"'{path / name}'"))
