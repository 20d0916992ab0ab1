"""What the format says in plain words and numbers: its version, the names of a checkpoint's files, their bounds, and the types of values.

A checkpoint directory of format version 1 holds, and needs, only

- ``manifest.json``, written last: see :class:`~paddle_fsdp_ckpt.storage.manifest.Manifest`;
- ``{rank}_0.safetensors`` for each rank that saved: see :mod:`~paddle_fsdp_ckpt.storage.header`.

``0.metadata`` lies beside them for stock Paddle; nothing here reads it, but the manifest records its digests too.
"""

from __future__ import annotations

import re

from ..errors import NewerFormatError, UnsafeCheckpointError

FORMAT_VERSION = 1
"""What this version of the package writes. It reads this one and all older ones."""

MANIFEST_NAME = "manifest.json"
PADDLE_METADATA_NAME = "0.metadata"
VALUES_WITHOUT_MANIFEST = (
    "`paddle-fsdp-ckpt salvage --without-manifest DIR` says which values the other files hold, and load(..., salvage=True, "
    "check_digests=False) takes them unchecked"
)
"""The way out where a manifest is lost and nothing else can be loaded."""

LENGTH_NBYTES = 8
"""Bytes of a header's length, at the start of a file."""

MAX_HEADER_NBYTES = 100_000_000
"""The largest header that safetensors reads, and so the largest that we write or read."""

DTYPE_CODES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Paddle's dtype name -> the code of the same type in a safetensors header."""

DTYPE_NAMES: dict[str, str] = {code: name for name, code in DTYPE_CODES.items()}
"""The code in a safetensors header -> Paddle's dtype name."""

DTYPE_NBYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes an element, for each of Paddle's dtype names that a file can hold."""

_RANK_FILE_NAME = re.compile(r"(0|[1-9][0-9]{0,9})_0\.safetensors", re.ASCII)
_LEFT_OVER = re.compile(r"\.(?P<target>.+)\.(?P<kind>staging|replaced)-[0-9a-f]{16}", re.DOTALL)


def rank_file_name(rank: int) -> str:
    """Return the name of the file that ``rank`` writes, the one under which stock Paddle looks for it."""
    return f"{rank}_0.safetensors"


def check_rank_file_name(name: str) -> None:
    """Raise unless ``name`` could come from :func:`rank_file_name`.

    Raises:
        UnsafeCheckpointError: it could not; it may lead out of the directory.
    """
    if not _RANK_FILE_NAME.fullmatch(name):
        raise UnsafeCheckpointError(
            f"the checkpoint names a file {name!r:.200}, which isn't of the form 'N_0.safetensors' and may lead out of its directory; "
            "it was not opened. Don't use this checkpoint, its manifest was edited"
        )


def check_format_version(version: int, where: str) -> None:
    """Raise unless this package reads format ``version``; ``where`` names the file for the message.

    Raises:
        NewerFormatError: the version is newer than :data:`FORMAT_VERSION`.
        ValueError: there is no such version.
    """
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{where} has format version {version}; this version of paddle_fsdp_ckpt reads up to {FORMAT_VERSION}. "
            "Load it with a newer paddle_fsdp_ckpt (pip install --upgrade paddle_fsdp_ckpt)"
        )
    if version < 1:
        raise ValueError(f"there is no format version {version}")


def staging_name(target: str, nonce: str) -> str:
    """Return the name of the directory beside ``target`` in which a save to it grows."""
    return f".{target}.staging-{nonce}"


def replaced_name(target: str, nonce: str) -> str:
    """Return the name under which an old checkpoint ``target`` waits beside it while a new one takes its place."""
    return f".{target}.replaced-{nonce}"


def parse_left_over(name: str) -> tuple[str, str] | None:
    """Return the target's name and ``"staging"`` or ``"replaced"`` for a directory of one of these two names, else None."""
    match = _LEFT_OVER.fullmatch(name)
    return (match["target"], match["kind"]) if match else None
