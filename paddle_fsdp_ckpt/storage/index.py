"""Read what a checkpoint says about itself: its manifest, and where the values of each key lie."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, KeysView
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError, counted, listing
from ..pieces import Piece, whole_piece
from .columns import FileColumns, columns_of
from .digests import digest_of_parts
from .entries import Entry, Stored
from .format import LENGTH_NBYTES, MANIFEST_NAME, VALUES_WITHOUT_MANIFEST, parse_left_over, rank_file_name
from .header import BEGINNING, decode_header, decode_header_columns, header_nbytes
from .json_values import cut_text
from .manifest import MAX_MANIFEST_NBYTES, FileRecord, Manifest
from .system_errors import is_there, read_file, says_missing
from .table import DtypesInTable, PieceTable, StoredInTable, table_of

_HUGGINGFACE_NAME = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?", re.ASCII)
"""The files of a Hugging Face model that have its weights."""


class StoredPiece(NamedTuple):
    """A piece, and where its bytes lie: row-major, without gaps, in the file ``file_name`` from ``byte_offset`` on."""

    piece: Piece
    file_name: str
    byte_offset: int


@dataclass(frozen=True, eq=False)
class CheckpointIndex:
    """Where the values of each key of one checkpoint lie.

    Attributes:
        path: the checkpoint directory.
        files: those that hold values.
        dtypes: key -> Paddle's dtype name.
        stored: key -> its pieces in light form, in the order of the files; at least one. :meth:`pieces` is the readable form.
        manifest: what it says about itself; None for a directory that stock Paddle wrote.
    """

    path: Path
    files: tuple[FileRecord, ...]
    dtypes: dict[str, str] | DtypesInTable = field(repr=False)
    stored: dict[str, list[Stored]] | StoredInTable = field(repr=False)
    manifest: Manifest | None = None

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, key: str) -> bool:
        return key in self.stored

    @property
    def table(self) -> PieceTable | None:
        """The same as columns, where the files' own columns were read."""
        return self.stored.table if isinstance(self.stored, StoredInTable) else None

    def walk(self) -> Iterator[tuple[str, list[Stored]]]:
        """Yield each key with its pieces, as in :attr:`stored`, without keeping these."""
        yield from self.stored.items() if self.table is None else self.table.walk()

    def with_table(self, table: PieceTable) -> CheckpointIndex:
        """Return the same of what a table says instead."""
        return replace(self, dtypes=DtypesInTable(table), stored=StoredInTable(table))

    def digest(self) -> str:
        """Return a digest that two ranks have alike only where they see the same checkpoint."""
        described = repr([(one.name, one.size) for one in self.files]) if self.manifest is None else self.manifest.to_json()
        return hashlib.sha256(described.encode()).hexdigest()

    def keys(self) -> KeysView[str]:
        """The keys, in the order in which the files have them."""
        return self.stored.keys()

    def add(self, number: int, entries: Iterable[Entry]) -> Iterator[str]:
        """Add what file ``number`` stores; yield, in words, each key that has another dtype or shape there than in a file before.

        Such a piece is left out.
        """
        assert isinstance(self.stored, dict)
        assert isinstance(self.dtypes, dict)
        for key, dtype, box, start, stop, byte_offset in entries:
            others = self.stored.get(key)
            if others is None:
                self.dtypes[key] = dtype
                self.stored[key] = [(number, box, start, stop, byte_offset)]
                continue
            first = others[0]
            if self.dtypes[key] != dtype or first[1].global_shape != box.global_shape:
                yield (
                    f"'{self.path}', key '{key}': {self.files[first[0]].name} has {self.dtypes[key]} {list(first[1].global_shape)}, and "
                    f"{self.files[number].name} has {dtype} {list(box.global_shape)}; the files are not of one save"
                )
                continue
            others.append((number, box, start, stop, byte_offset))

    def global_shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor under ``key``."""
        return self.stored[key][0][1].global_shape

    def whole_piece(self, key: str) -> Piece:
        """Return the piece that is all of the tensor under ``key``."""
        return whole_piece(key, self.dtypes[key], self.global_shape(key))

    def pieces(self, key: str) -> Iterator[StoredPiece]:
        """Yield the stored pieces of ``key``; a flat range over all of its box is given as the box."""
        for stored in self.stored[key]:
            yield StoredPiece(self.piece(key, stored), self.files[stored[0]].name, stored[4])

    def piece(self, key: str, stored: Stored) -> Piece:
        """Return the readable form of one of the pieces in ``stored[key]``."""
        _, box, start, stop, _ = stored
        return box.part(key, self.dtypes[key], start, stop)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint directory ``path``.

    Raises:
        IncompleteCheckpointError: there is no committed checkpoint; the message says what there is.
        CorruptCheckpointError: the manifest is malformed.
        UnsafeCheckpointError: it names files that are not plain names, is a link out of the directory, or is too large.
        NewerFormatError: it is of a newer format version.
    """
    left_over = parse_left_over(Path(os.path.abspath(path)).name)
    if left_over is not None:
        raise IncompleteCheckpointError(_say_left_over(path, *left_over))
    try:
        mode = read_file(path, lambda: os.stat(path)).st_mode
    except (OSError, ValueError) as error:
        if not says_missing(error):
            raise
        raise IncompleteCheckpointError(_say_missing(path)) from None
    if not stat.S_ISDIR(mode):
        raise IncompleteCheckpointError(_say_file(path))
    try:
        read_file(path / MANIFEST_NAME, lambda: os.lstat(path / MANIFEST_NAME))  # which may fail otherwise than since nothing is there
    except FileNotFoundError:
        raise IncompleteCheckpointError(_say_foreign(path)) from None
    return _parse_manifest(path, check_seal=True)


def read_damaged_manifest(path: Path) -> Manifest:
    """Read a manifest that :func:`read_manifest` refused, as far as it can be parsed; what it says may be wrong.

    Raises:
        CheckpointError: as :func:`read_manifest`, where it can't even be parsed.
    """
    return _parse_manifest(path, check_seal=False)


def read_manifest_bytes(path: Path) -> bytes:
    """Read the manifest of the checkpoint directory ``path``, whatever it is.

    Raises:
        UnsafeCheckpointError: it is a link out of the directory, or is too large.
        OSError: it can't be read.
    """

    def read() -> bytes:
        descriptor, size = open_inside(path, MANIFEST_NAME)
        with open(descriptor, "rb") as file:
            if size > MAX_MANIFEST_NBYTES:
                raise UnsafeCheckpointError(f"the manifest of '{path}' has {size} bytes, more than any that we wrote; it was not read")
            return file.read(size)

    return read_file(path / MANIFEST_NAME, read)


def _parse_manifest(path: Path, *, check_seal: bool) -> Manifest:
    encoded = read_manifest_bytes(path)
    try:
        return Manifest.from_json(encoded.decode(), check_seal=check_seal)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"the manifest '{path / MANIFEST_NAME}' is malformed: {cut_text(error)}; restore it from a copy, or load another "
            f"checkpoint. {VALUES_WITHOUT_MANIFEST}"
        ) from error


def read_index(path: Path) -> CheckpointIndex:
    """Read the manifest and the headers of all files of the checkpoint directory ``path``, and check them against each other.

    The values themselves are not read. Time and memory grow with the number of stored pieces, not with their sizes.

    Raises:
        IncompleteCheckpointError: there is no committed checkpoint, or a file of it is missing.
        CorruptCheckpointError: a manifest or header is malformed, or they don't agree with each other or with the files.
        UnsafeCheckpointError: a file name or link that leads out of the directory, something that is no file, or an oversized header.
        NewerFormatError: a file is of a newer format version.
    """
    manifest = read_manifest(path)
    with without_garbage_collection():
        return read_headers(path, manifest)


def read_headers(path: Path, manifest: Manifest) -> CheckpointIndex:
    """Read the headers of the files that a manifest names, in ``path``, and check them against it.

    Raises:
        IncompleteCheckpointError: a file is missing.
        CorruptCheckpointError: a header is malformed, or doesn't agree with the manifest or the files.
        UnsafeCheckpointError: a link that leads out of the directory, something that is no file, or an oversized header.
    """
    # What each file says is let go before the whole becomes an index, since both are large.
    return CheckpointIndex(path, manifest.files, {}, {}, manifest).with_table(_read_table(path, manifest))


def _read_table(path: Path, manifest: Manifest) -> PieceTable:
    table = table_of(read_columns(path, record) for record in manifest.files)
    if table is not None:
        return table
    index = CheckpointIndex(path, manifest.files, {}, {}, manifest)
    files = (read_columns(path, record) for record in manifest.files)
    conflict = next(text for number, one in enumerate(files) for text in index.add(number, one.entries()))
    raise CorruptCheckpointError(f"{conflict}. Load another checkpoint")


def read_columns(path: Path, record: FileRecord) -> FileColumns:
    """Read what the header of one rank's file says, and check it against its record.

    Raises:
        IncompleteCheckpointError: the file is missing.
        CorruptCheckpointError: the header is malformed, damaged, or doesn't agree with the record.
        UnsafeCheckpointError: a link that leads out of the directory, something that is no file, or an oversized header.
    """
    header, where = _read_header(path, record), _where(path, record)
    columns = decode_header_columns(header, record.size, where) or columns_of(decode_header(header, record.size, where))
    if len(columns.keys) != record.pieces:
        raise CorruptCheckpointError(
            f"{where} holds {len(columns.keys)} pieces, and the manifest says {record.pieces}; the files are not of one save. "
            "Load another checkpoint"
        )
    return columns


def open_inside(directory: Path, name: str) -> tuple[int, int]:
    """Open a regular file of a checkpoint for reading, and return its descriptor, which the caller closes, and its size in bytes.

    Raises:
        IncompleteCheckpointError: the file is missing.
        CorruptCheckpointError: the disk doesn't give it.
        UnsafeCheckpointError: it is a link that leads out of the directory, or not a regular file.
    """
    root = os.path.realpath(directory)
    real = os.path.realpath(os.path.join(root, name))
    if os.path.dirname(real) != root:
        raise UnsafeCheckpointError(f"'{directory / name}' leads out of its directory, to '{real}'; it was not opened. Copy the file in")
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for ever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = read_file(directory / name, lambda: os.open(real, flags))
    except FileNotFoundError:
        raise IncompleteCheckpointError(
            f"'{directory}' lacks the file {name}; restore it from a copy, or load another checkpoint"
        ) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeCheckpointError(f"'{directory / name}' is not a regular file; it was not read. Load another checkpoint")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def open_rank_file(directory: Path, record: FileRecord) -> int:
    """Open one rank's file for reading, and return its descriptor, which the caller closes.

    Raises:
        IncompleteCheckpointError: the file is missing.
        CorruptCheckpointError: it hasn't the size that the manifest says.
        UnsafeCheckpointError: it is a link that leads out of the directory, or not a regular file.
    """
    descriptor, size = open_inside(directory, record.name)
    if size != record.size:
        os.close(descriptor)
        raise CorruptCheckpointError(
            f"{_where(directory, record)} has {size} bytes, and the manifest says {record.size}; restore the file from a copy, or load "
            "another checkpoint"
        )
    return descriptor


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector from walking a growing heap of plain data again and again, which takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_header(directory: Path, record: FileRecord) -> bytes:
    def read() -> tuple[bytes, bytes]:
        with open(open_rank_file(directory, record), "rb") as file:
            length_field = file.read(LENGTH_NBYTES)
            return length_field, file.read(header_nbytes(length_field, record.size, _where(directory, record)))

    length_field, header = read_file(directory / record.name, read)
    beginning = (memoryview(length_field), memoryview(header))
    nbytes = sum(map(len, beginning))
    if record.digests and (nbytes != record.header_nbytes or digest_of_parts(beginning) != record.digest(0)):
        raise CorruptCheckpointError(
            f"the header of {_where(directory, record)} is damaged, or the file is of another save: its digest is not the one in the "
            "manifest; restore the file from a copy, or load another checkpoint"
        )
    return header


def _where(directory: Path, record: FileRecord) -> str:
    return f"'{directory / record.name}'"


def _say_left_over(path: Path, target: str, kind: str) -> str:
    if kind == "staging":
        return f"'{path}' is what an unfinished save to '{target}' left behind; load another checkpoint. It may be deleted"
    return (
        f"'{path}' is an old checkpoint that a save to '{target}' was about to replace; if '{target}' is missing, give it its name "
        f"back: mv '{path}' '{path.parent / target}'"
    )


def _checkpoints_in(directory: Path) -> list[str]:
    entries = sorted(entry.name for entry in directory.iterdir())
    return [name for name in entries if parse_left_over(name) is None and (directory / name / MANIFEST_NAME).is_file()]


def _say_missing(path: Path) -> str:
    beside = []
    if path.parent.is_dir():
        for entry in sorted(path.parent.iterdir()):
            left_over = parse_left_over(entry.name)
            if left_over is not None and left_over[0] == path.name:
                beside.append(_say_left_over(entry, *left_over))
        if there := _checkpoints_in(path.parent):
            beside.append(f"'{path.parent}' holds {counted(len(there), 'checkpoint')}: {listing(there)}")
    return f"there is no checkpoint '{path}'; check the path" + "".join(f". {sentence}" for sentence in beside)


def _say_file(path: Path) -> str:
    way_out = {
        ".pdparams": "paddle.load reads it; load_full_state_dict(model, ...) gives a sharded model what it returns, and "
        "model.set_state_dict(...) a plain one",
        ".pdopt": "paddle.load reads it, and set_state_dict(...) gives what it returns to an optimizer that is not bound",
    }.get(path.suffix, "check the path")
    return f"'{path}' is a file, not a checkpoint directory; {way_out}"


def has_lost_manifest(path: Path) -> bool:
    """Tell whether files of ours lie in a directory that has no manifest."""
    ending = rank_file_name(0)[1:]
    return not is_there(path / MANIFEST_NAME) and any(_is_ours(path, name) for name in os.listdir(path) if name.endswith(ending))


def _is_ours(path: Path, name: str) -> bool:
    try:
        descriptor, _ = open_inside(path, name)
        with open(descriptor, "rb") as file:
            return file.read(LENGTH_NBYTES + len(BEGINNING))[LENGTH_NBYTES:] == BEGINNING
    except (CheckpointError, OSError):  # whoever reads all of it says what is wrong
        return False


def say_lost_manifest(what: str) -> str:
    """Say what it means that files of ours, such as this one, lie in a directory without a manifest."""
    return (
        f"{what} was written by paddle_fsdp_ckpt, and the directory has no {MANIFEST_NAME}: the save was not finished, or the directory "
        f"not copied whole; load another checkpoint. {VALUES_WITHOUT_MANIFEST}"
    )


def _say_foreign(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return f"'{path}' is an empty directory, not a checkpoint; check the path"
    if has_lost_manifest(path):
        return say_lost_manifest(f"'{path}'")
    if any(name.endswith(".metadata") for name in names):
        return (
            f"'{path}' has no {MANIFEST_NAME}: it is a checkpoint of stock Paddle, or of an unfinished save. load and "
            "paddle.distributed.load_state_dict read the former"
        )
    if any(_HUGGINGFACE_NAME.fullmatch(name) for name in names):
        return (
            f"'{path}' is a Hugging Face model, not a checkpoint: load_huggingface(path, model=model) gives a model its weights, and "
            "`paddle-fsdp-ckpt convert DIR --to fc OUT` makes a checkpoint of it"
        )
    if inside := _checkpoints_in(path):
        return f"'{path}' is not a checkpoint, and holds {counted(len(inside), 'checkpoint')}: {listing(inside)}; name one of them"
    return f"'{path}' has no {MANIFEST_NAME}, so it is not a checkpoint, or not a finished one; check the path. It holds {listing(names)}"
