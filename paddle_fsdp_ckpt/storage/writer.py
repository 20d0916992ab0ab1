"""Write one rank's file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from ..pieces import Piece, check_piece
from .addresses import Places
from .buffers import CACHED_NBYTES, as_bytes, in_groups, together, write_group
from .digests import CHUNK_NBYTES, Digester
from .direct import write_directly
from .format import DTYPE_NBYTES
from .header import HeaderPart, encode_header_parts, encode_part, in_file_order
from .manifest import FileRecord
from .writeback import Writeback


def estimate_nbytes(pieces: Iterable[Piece]) -> int:
    """Return about how many bytes a checkpoint needs for these pieces, with what it says about them; rather too many than too few."""
    return sum(piece.numel * DTYPE_NBYTES.get(piece.dtype, 0) + _estimate_description_nbytes(piece.key) for piece in pieces)


def _estimate_description_nbytes(key: str) -> int:
    """Return about how many bytes a checkpoint needs for what it says about one piece."""
    return 5 * len(key) + 500


def record_of(path: Path) -> FileRecord:
    """Return the record of a file that is there, without pieces and header.

    Raises:
        OSError: it can't be read.
    """
    digester = Digester(0)
    size = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK_NBYTES):
            digester.update(memoryview(data))
            size += len(data)
    return FileRecord(path.name, size, 0, digester.finish())


@dataclass(frozen=True)
class FileStart:
    """What a rank's file begins with, whatever comes behind it. Made once, it serves every save of the same pieces.

    Attributes:
        header: what the header says about these pieces.
        count: how many there are.
        last_itemsize: bytes an element of the last one; larger ones can't come after it. No piece at all lets any come.
        description_nbytes: about how many bytes a checkpoint needs for what it says about them.
    """

    header: HeaderPart
    count: int
    last_itemsize: int
    description_nbytes: int

    def goes_before(self, others: Iterable[Piece]) -> bool:
        """Tell whether a file that begins so can hold other pieces."""
        return all(DTYPE_NBYTES.get(piece.dtype, 0) <= self.last_itemsize for piece in others if piece.numel)


def _start_of(pieces: Iterable[Piece]) -> FileStart:
    """Return what a file begins with: checked pieces, all with elements and in its order, which may be made one by one."""
    count, last, description_nbytes = 0, max(DTYPE_NBYTES.values()), 0

    def noted() -> Iterator[Piece]:
        nonlocal count, last, description_nbytes
        for piece in pieces:
            count, last = count + 1, DTYPE_NBYTES[piece.dtype]
            description_nbytes += _estimate_description_nbytes(piece.key)
            yield piece

    header = encode_part(noted())
    return FileStart(header, count, last, description_nbytes)


@dataclass(frozen=True)
class FilePlan:
    """How pieces lie in a rank's file from its first data byte on. Made once, it serves every save of the same pieces.

    Attributes:
        count: how many pieces there are, those without elements included.
        order: positions, among the pieces, of those that are stored, in the order of the data.
        nbytes: of each of these.
        start: what the file begins with.
    """

    count: int
    order: Sequence[int] = field(repr=False)
    nbytes: Sequence[int] = field(repr=False)
    start: FileStart


def plan_file(pieces: Sequence[Piece]) -> FilePlan:
    """Check pieces, and decide how they lie in a rank's file.

    Raises:
        ValueError: a piece that is no part of its tensor, an unknown dtype, or a key twice.
    """
    order, nbytes = _arrange(pieces)
    return FilePlan(len(pieces), order, nbytes, _start_of(pieces[i] for i in order))


@dataclass(frozen=True)
class PlacedPieces:
    """Pieces of which the bytes lie at known places of this host's memory.

    Attributes:
        start: of a file that begins with them.
        places: where the bytes of each are, in the order of the file; right as long as nothing moves.
        estimated_nbytes: about how many bytes a checkpoint needs for them.
    """

    start: FileStart
    places: Places
    estimated_nbytes: int


def place_pieces(pieces: Iterable[Piece], addresses: Sequence[int], nbytes: Sequence[int]) -> PlacedPieces:
    """Plan a file that begins with pieces, all with elements and in its order, from the address and the number of bytes of each.

    Raises:
        ValueError: a piece that is no part of its tensor, an unknown dtype, or a key twice.
    """
    start = _start_of(map(_checked, pieces))
    places = Places(np.array(addresses, np.int64), np.array(nbytes, np.int64))
    return PlacedPieces(start, places, places.total + start.description_nbytes)


def write_rank_file(
    path: Path, pieces: Sequence[tuple[Piece, memoryview]], plan: FilePlan | None = None, placed: PlacedPieces | None = None
) -> FileRecord:
    """Write the pieces into a new file, wait until it is on the disk, and return its record, with the digests of what was written.

    The data is handed to the system as it lies in memory, without a copy; only small pieces are put together first, a bounded number of
    bytes at a time. Pieces without elements are not stored.

    Args:
        path: the file, whose directory exists; it must not exist itself. Its permissions follow the umask.
        pieces: each with its C-contiguous bytes in row-major order, ``numel`` times the dtype's size. Any object with the
            buffer protocol will do. Each key at most once.
        plan: of the first of these pieces, or all, where they were planned before.
        placed: other pieces, which can come before all of these; see :meth:`FileStart.goes_before`.

    Raises:
        ValueError: a piece that is no part of its tensor, an unknown dtype, a wrong number of bytes, or a key twice. No file
            was made.
        FileExistsError: the file is there already; it was not touched.
        OSError: the system refused, e.g. the disk is full. The file was removed.
    """
    layout = lay_out([piece for piece, _ in pieces], plan, placed)
    before = iter(()) if placed is None else placed.places.buffers()
    buffers = chain(map(memoryview, layout.header), before, _in_layout(pieces, layout))
    return write_file(path, buffers, layout.count, layout.header_nbytes)


def _in_layout(pieces: Sequence[tuple[Piece, memoryview]], layout: FileLayout) -> list[memoryview]:
    """Return the bytes of pieces in the order in which they lie, all checked."""
    buffers = []
    for number, size in zip(layout.order, layout.sizes, strict=True):
        piece, data = pieces[number]
        buffer = as_bytes(data, piece.key)
        if len(buffer) != size:
            raise ValueError(f"'{piece.key}' has {len(buffer)} bytes, and {piece.numel} elements of {piece.dtype} are {size}")
        buffers.append(buffer)
    return buffers


@dataclass(frozen=True)
class FileLayout:
    """What a rank's file holds, from its first byte on.

    Attributes:
        header: everything before the data, in parts.
        order: positions, among the pieces, of those that are stored, in the order of the data.
        sizes: how many bytes each of these has.
        count: how many pieces the file holds, those that come before these included.
        nbytes_before: how many bytes of data come before these.
    """

    header: Sequence[bytes] = field(repr=False)
    order: Sequence[int] = field(repr=False)
    sizes: Sequence[int] = field(repr=False)
    count: int
    nbytes_before: int = 0

    @property
    def header_nbytes(self) -> int:
        """How much of the file comes before its data."""
        return sum(map(len, self.header))

    @property
    def nbytes(self) -> int:
        """How large the file is."""
        return self.header_nbytes + self.nbytes_before + sum(self.sizes)


def lay_out(pieces: Sequence[Piece], plan: FilePlan | None = None, placed: PlacedPieces | None = None) -> FileLayout:
    """Return how pieces lie in a rank's file; ``plan`` and ``placed`` as for :func:`write_rank_file`.

    Raises:
        ValueError: a piece that is no part of its tensor, an unknown dtype, or a key twice.
    """
    if placed is not None:
        header, order, nbytes = _lay_out_behind(placed.start, pieces)
        return FileLayout(header, order, nbytes, placed.start.count + len(order), placed.start.header.stop)
    if plan is None:
        plan = plan_file([])
    others = pieces[plan.count :]
    if not plan.start.goes_before(others):
        return lay_out(pieces)
    header, order, nbytes = _lay_out_behind(plan.start, others)
    order = [*plan.order, *(plan.count + i for i in order)]
    return FileLayout(header, order, [*plan.nbytes, *nbytes], len(order))


def _lay_out_behind(start: FileStart, others: Sequence[Piece]) -> tuple[list[bytes], list[int], list[int]]:
    order, nbytes = _arrange(others)
    return encode_header_parts([others[i] for i in order], start.header), order, nbytes


@dataclass(frozen=True)
class FileImage:
    """A rank's file, whole, in memory.

    Attributes:
        data: its bytes, 1-D; nobody changes them while they are written.
        pieces: how many it holds.
        header_nbytes: how much of it is header.
    """

    data: memoryview = field(repr=False)
    pieces: int
    header_nbytes: int


def write_image(path: Path, image: FileImage) -> FileRecord:
    """Write a new file, wait until it is on the disk, and return its record, as :func:`write_rank_file` does.

    Where memory and file system allow it, that is done without the system's cache, beside what the processor computes. A file that is
    read soon afterwards then comes from the disk.

    Raises:
        FileExistsError: the file is there already; it was not touched.
        OSError: the system refused, e.g. the disk is full; it names the file. The file was removed.
    """
    digester = Digester(image.header_nbytes)
    with _new_file(path) as descriptor:
        done = write_directly(descriptor, image.data, digester.update)
        _write(descriptor, [image.data[done:]], digester)
    return FileRecord(path.name, len(image.data), image.pieces, digester.finish(), image.header_nbytes)


def _arrange(pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """Check pieces; return the positions of those that are stored in the order of the data, and their bytes."""
    order = in_file_order([_checked(piece) for piece in pieces])
    return order, [pieces[i].numel * DTYPE_NBYTES[pieces[i].dtype] for i in order]


def _checked(piece: Piece) -> Piece:
    if piece.dtype not in DTYPE_NBYTES:
        raise ValueError(f"'{piece.key}' has dtype '{piece.dtype}', and a checkpoint holds only {', '.join(DTYPE_NBYTES)}")
    check_piece(piece)
    return piece


def write_file(path: Path, buffers: Iterable[memoryview], pieces: int = 0, header_nbytes: int = 0) -> FileRecord:
    """Write 1-D buffers of bytes, one behind the other, into a new file, wait until it is on the disk, and return its record.

    Args:
        path: the file, whose directory exists; it must not exist itself.
        buffers: what it will hold.
        pieces: how many pieces that is, for the record.
        header_nbytes: how much of it is header, for the record.

    Raises:
        FileExistsError: the file is there already; it was not touched.
        OSError: the system refused, e.g. the disk is full; it names the file. The file was removed.
    """
    digester = Digester(header_nbytes)
    with _new_file(path) as descriptor:
        size = _write(descriptor, buffers, digester)
    return FileRecord(path.name, size, pieces, digester.finish(), header_nbytes)


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """Make a new file; wait at the end until it is on the disk, and remove it where anything failed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException as error:
        with suppress(OSError):  # what failed first says more; the directory goes too
            os.unlink(path)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise


def _write(descriptor: int, buffers: Iterable[memoryview], digester: Digester) -> int:
    """Write buffers, one behind the other, and digest them; return how many bytes they have."""
    writeback = Writeback(descriptor)
    written = 0
    for group in in_groups(together(buffers), CACHED_NBYTES):
        write_group(descriptor, group)
        # Now, while the processor still has these bytes at hand.
        for buffer in group:
            digester.update(buffer)
        nbytes = sum(map(len, group))
        writeback.advance(nbytes)
        written += nbytes
    return written
