"""The manifest of a checkpoint directory: what it says about itself, and about each of its files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import cast

from .base_parameter import BaseParameter
from .digests import DIGEST_LENGTH, count_chunks, digest
from .format import (
    DTYPE_CODES,
    FORMAT_VERSION,
    LENGTH_NBYTES,
    MANIFEST_NAME,
    MAX_HEADER_NBYTES,
    PADDLE_METADATA_NAME,
    check_format_version,
    check_rank_file_name,
    rank_file_name,
)
from .json_values import JsonValue, check_json, parse_json

MAX_MANIFEST_NBYTES = 1 << 28
"""The largest manifest that we write or read; enough for the digests of 16 TiB."""

MAX_COUNT = (1 << 63) - 1
"""The largest step, and size of a file, that a manifest says."""

_SEAL = ',\n "digest": "'
_SEAL_END = '"\n}\n'
_DIGESTS = re.compile("[0-9a-f]*", re.ASCII)


def utc_now() -> str:
    """Return the time in the form of :attr:`Manifest.created`, so finely that no two saves of one step have the same."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class FileRecord:
    """What is known of one file of a checkpoint; of a rank's file unless it says otherwise.

    Attributes:
        name: see :func:`rank_file_name`.
        size: of the whole file, in bytes.
        pieces: how many pieces it holds.
        digests: of its chunks, one behind the other; see :mod:`.digests`. Empty where none are known, in directories of stock Paddle.
        header_nbytes: how many bytes at the start of the file are its header and the header's length, digested as a chunk of their own.
    """

    name: str
    size: int
    pieces: int
    digests: str = field(default="", repr=False)
    header_nbytes: int = 0

    @property
    def chunks(self) -> int:
        """How many chunks the file has, and so how many digests, where it has any."""
        return count_chunks(self.size, self.header_nbytes)

    def digest(self, number: int) -> str:
        """Return the digest of a chunk."""
        return self.digests[number * DIGEST_LENGTH : (number + 1) * DIGEST_LENGTH]

    def to_json(self) -> JsonValue:
        """Return the record as plain JSON data; :meth:`from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: JsonValue) -> FileRecord:
        """Build a record from what :meth:`to_json` returned.

        Raises:
            ValueError: a field is missing, unknown or has the wrong type, or there is not one digest for each chunk.
        """
        fields = _fields(value, "a file's record", {"name", "size", "pieces", "digests", "header_nbytes"})
        name = _string(fields["name"], "a file's name")
        record = cls(
            name,
            _count(fields["size"], f"size of '{name}'"),
            _count(fields["pieces"], f"pieces of '{name}'"),
            _string(fields["digests"], f"digests of '{name}'"),
            _count(fields["header_nbytes"], f"header_nbytes of '{name}'"),
        )
        if record.header_nbytes > record.size:
            raise ValueError(f"the header of '{name}' has {record.header_nbytes} bytes, and the whole file {record.size}")
        if record.header_nbytes > LENGTH_NBYTES + MAX_HEADER_NBYTES:
            raise ValueError(f"the header of '{name}' has {record.header_nbytes} bytes, and at most {MAX_HEADER_NBYTES} are allowed")
        if len(record.digests) != record.chunks * DIGEST_LENGTH or not _DIGESTS.fullmatch(record.digests):
            raise ValueError(f"digests of '{name}' are not {record.chunks} times {DIGEST_LENGTH} hexadecimal digits")
        return record


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint directory says about itself; its presence is what makes the directory a checkpoint.

    Within one format version the set of fields is closed: a manifest with a field missing or unknown is refused, so that a
    flipped bit in a field's name can't pass for an absent field. Fields that only some checkpoints need are written in those only.

    Attributes:
        step: the training step, or None where the caller named none.
        world_size: how many ranks saved; there is one file for each.
        created: UTC, ISO 8601 with offset, as :func:`utc_now` returns it.
        versions: package name -> version, of those that wrote the checkpoint.
        optimizers: of each a dict: its ``class``, its ``learning_rate``, ``groups`` of ``parameters``, by their names, that have the same
            ``settings``, and the parameters ``without_gradient``. Settings and learning rate are opaque here.
        extra_state: the caller's own; opaque here.
        files: in the order of the ranks.
        tied: the sorted names of each tensor that has several; its values are stored under each of them.
        paddle_metadata: what is known of ``0.metadata``, without pieces and header; None where there is none.
        format_version: of the directory; see :data:`FORMAT_VERSION`.
        base: first name of each parameter that was left out since it doesn't train -> what it was; None where nothing was left out.
        lora: name of each LoRA layer -> what the product of its two matrices is multiplied by.
        discarded: step -> the digest of its manifest, of the steps beside this one that are of another history, and go once this one is
            there; see :mod:`.discarded`. A number where that could not be read, and in manifests of before: when it was written, in
            nanoseconds; 0 where there was none.
    """

    step: int | None
    world_size: int
    created: str
    versions: dict[str, str]
    optimizers: JsonValue
    extra_state: JsonValue
    files: tuple[FileRecord, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    paddle_metadata: FileRecord | None = None
    format_version: int = FORMAT_VERSION
    base: dict[str, BaseParameter] | None = None
    lora: dict[str, float] = field(default_factory=dict)
    discarded: dict[int, int | str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of ``manifest.json``, whose last field is a digest of all the text before it.

        ``NaN`` and infinities are written as Python's json does, since losses may be such.

        Raises:
            ValueError: ``optimizers`` or ``extra_state`` would not come back from JSON as they are, or the text is too long.
        """
        check_json(self.optimizers, "optimizers")
        check_json(self.extra_state, "extra_state")
        fields = {
            "format_version": self.format_version,
            "step": self.step,
            "world_size": self.world_size,
            "created": self.created,
            "versions": self.versions,
            "optimizers": self.optimizers,
            "extra_state": self.extra_state,
            "tied": [list(names) for names in self.tied],
            "paddle_metadata": None if self.paddle_metadata is None else self.paddle_metadata.to_json(),
            "files": [record.to_json() for record in self.files],
        }
        if self.base is not None:
            fields["base"] = {name: one.to_text() for name, one in self.base.items()}
        if self.lora:
            fields["lora"] = self.lora
        if self.discarded:
            fields["discarded"] = [[step, identity] for step, identity in sorted(self.discarded.items())]
        text = seal(fields)
        if len(text) > MAX_MANIFEST_NBYTES:
            raise ValueError(f"the manifest would have {len(text)} bytes, and {MAX_MANIFEST_NBYTES} are allowed; keep less in extra_state")
        return text

    @classmethod
    def from_json(cls, text: str, *, check_seal: bool = True) -> Manifest:
        """Build a manifest from the text of ``manifest.json``.

        Args:
            text: all of it.
            check_seal: whether to compare the text's digest; without, whatever can be parsed is taken for true, and optimizers that can't
                be are left out.

        Raises:
            ValueError: the text is not what :meth:`to_json` writes, or was changed since.
            NewerFormatError: it is of a newer format version.
            UnsafeCheckpointError: it names a file that is not a plain name.
        """
        intact = is_seal_intact(text) if check_seal else True
        value = parse_json(text, allow_nan=True)
        # All format versions have the digest at this place, so a flipped bit in the version's number is no newer version.
        if intact is not False and isinstance(value, dict) and type(value.get("format_version")) is int:
            check_format_version(value["format_version"], MANIFEST_NAME)
        fields = _fields(value, "the manifest", _MANIFEST_FIELDS, _OPTIONAL_MANIFEST_FIELDS)
        if not intact:
            raise ValueError("it was damaged or edited: its text is not the one that its digest belongs to")
        versions = _dict(fields["versions"], "versions")
        manifest = cls(
            step=None if fields["step"] is None else _count(fields["step"], "step"),
            world_size=_count(fields["world_size"], "world_size"),
            created=_utc_time(fields["created"]),
            versions={name: _string(version, f"version of '{name}'") for name, version in versions.items()},
            optimizers=fields["optimizers"],
            extra_state=fields["extra_state"],
            files=tuple(FileRecord.from_json(record) for record in _list(fields["files"], "files")),
            tied=tuple(_strings(group, "a tied group") for group in _list(fields["tied"], "tied")),
            paddle_metadata=None if fields["paddle_metadata"] is None else FileRecord.from_json(fields["paddle_metadata"]),
            format_version=_count(fields["format_version"], "format_version"),
            base=_base(fields["base"]) if "base" in fields else None,
            lora={name: _number(one, f"lora of '{name}'") for name, one in _dict(fields.get("lora", {}), "lora").items()},
            discarded=_discarded(fields.get("discarded", [])),
        )
        for record in manifest.files:
            check_rank_file_name(record.name)
        metadata = manifest.paddle_metadata
        if metadata is not None and (metadata.name, metadata.pieces, metadata.header_nbytes) != (PADDLE_METADATA_NAME, 0, 0):
            raise ValueError(f"paddle_metadata is not the record of '{PADDLE_METADATA_NAME}'")
        expected = [rank_file_name(rank) for rank in range(len(manifest.files))]
        if manifest.world_size != len(manifest.files) or [record.name for record in manifest.files] != expected:
            raise ValueError(f"files are not one for each of {manifest.world_size} ranks, in order")
        try:
            _check_optimizers(manifest.optimizers)
        except ValueError:
            if check_seal:
                raise
            return replace(manifest, optimizers=[])
        return manifest


_MANIFEST_FIELDS = {
    "format_version",
    "step",
    "world_size",
    "created",
    "versions",
    "optimizers",
    "extra_state",
    "tied",
    "paddle_metadata",
    "files",
    "digest",
}
_OPTIONAL_MANIFEST_FIELDS = {"base", "lora", "discarded"}


def _discarded(value: JsonValue) -> dict[int, int | str]:
    pairs = [_list(pair, "a discarded step") for pair in _list(value, "discarded")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a discarded step is not its number and what tells it from others")
    return {_count(step, "a discarded step"): _identity(one) for step, one in pairs}


def _identity(value: JsonValue) -> int | str:
    if type(value) is not str:
        return _count(value, "the time of a discarded step")
    if len(value) != DIGEST_LENGTH or not _DIGESTS.fullmatch(value):
        raise ValueError(f"the digest of a discarded step is {value!r:.100}, not {DIGEST_LENGTH} hexadecimal digits")
    return value


def seal(fields: dict[str, JsonValue]) -> str:
    """Return ``fields`` as the text of a JSON object with one field more, ``digest``, at the end: of all the text before it."""
    # A line a field: indented further, Python writes JSON many times as slowly.
    body = "{" + ",".join(f"\n {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    return f"{body}{_SEAL}{digest(body.encode())}{_SEAL_END}"


def is_seal_intact(text: str) -> bool | None:
    """Tell whether a text is as :func:`seal` returned it; None where it has no such end at all."""
    body, mark, end = text.rpartition(_SEAL)
    if not mark or len(end) != DIGEST_LENGTH + len(_SEAL_END) or not end.endswith(_SEAL_END):
        return None
    return digest(body.encode()) == end[:DIGEST_LENGTH]


def _fields(value: JsonValue, what: str, names: set[str], optional: Collection[str] = ()) -> dict[str, JsonValue]:
    fields = _dict(value, what)
    missing, unknown = sorted(names - fields.keys()), sorted(fields.keys() - names.union(optional))
    if missing or unknown:
        raise ValueError(f"{what} lacks the fields {missing} and has the unknown fields {unknown}")
    return fields


def _dict(value: JsonValue, what: str) -> dict[str, JsonValue]:
    return cast("dict[str, JsonValue]", _typed(value, dict, what))


def _list(value: JsonValue, what: str) -> list[JsonValue]:
    return cast("list[JsonValue]", _typed(value, list, what))


def _string(value: JsonValue, what: str) -> str:
    return cast(str, _typed(value, str, what))


def _typed(value: JsonValue, kind: type, what: str) -> JsonValue:
    if type(value) is not kind:
        raise ValueError(f"{what} is {value!r:.100}, not a {kind.__name__}")
    return value


def _count(value: JsonValue, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{what} is {value!r:.100}, not a whole number from 0 to 2**63 - 1")
    return value


def _number(value: JsonValue, what: str) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r:.100}, not a finite number with a point")
    return value


def _check_optimizers(value: JsonValue) -> None:
    """Raise ValueError unless optimizers are described as :class:`Manifest` says; they may say more."""
    try:
        for one in _list(value, "optimizers"):
            _string(one["class"], "an optimizer's class")
            _dict(one["learning_rate"], "an optimizer's learning_rate")
            _strings(one["without_gradient"], "an optimizer's without_gradient")
            for group in _list(one["groups"], "an optimizer's groups"):
                _strings(group["parameters"], "a group's parameters")
                _dict(group["settings"], "a group's settings")
    except (KeyError, TypeError) as error:
        raise ValueError(f"its optimizers are not described as save does ({error!r:.200})") from None


def _strings(value: JsonValue, what: str) -> tuple[str, ...]:
    return tuple(_string(one, f"one of {what}") for one in _list(value, what))


def _base(value: JsonValue) -> dict[str, BaseParameter]:
    base = {name: BaseParameter.from_text(_string(one, f"base parameter '{name}'"), name) for name, one in _dict(value, "base").items()}
    strange = [name for name, one in base.items() if one.dtype not in DTYPE_CODES]
    if strange:
        raise ValueError(f"base parameter '{strange[0]}' has the dtype '{base[strange[0]].dtype}', which Paddle lacks")
    return base


def _utc_time(value: JsonValue) -> str:
    text = _string(value, "created")
    try:
        offset = datetime.fromisoformat(text).utcoffset()
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise ValueError(f"created is {text!r}, not a time in UTC")
    return text
