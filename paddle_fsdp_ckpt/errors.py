"""The exceptions of this package: one tree under :class:`CheckpointError`.

Every message names what is wrong (key, file or rank), where, and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable

_LISTED = 20
FEW = 5
"""How many items a message lists whose readers need to know only of which kind they are."""
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


class CheckpointError(Exception):
    """Base of every error that this package raises on purpose."""


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint, or a part of one, is not there: missing path, file, manifest or values."""


class CorruptCheckpointError(CheckpointError):
    """A file does not hold what its own description says: sizes, headers, digests, ranges."""


class ReplacedCheckpointError(CheckpointError):
    """A checkpoint was replaced by another one while it was read, so that what was read may be of both."""


class UnsafeCheckpointError(CheckpointError):
    """A file asks for something that reading must never do: run code, leave its directory, use unbounded memory."""


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a newer version of this package, in a format that this one doesn't know."""


class TargetExistsError(CheckpointError):
    """A save would have to replace something that it may not. Nothing was changed."""


class MismatchError(CheckpointError):
    """Checkpoint and objects disagree in keys, shapes, dtypes or coverage. Nothing was changed."""


class UnsupportedOptimizerError(CheckpointError):
    """An optimizer, or a setting of one, that can't be trained or restored right on flat buffers."""


class RankFailedError(CheckpointError):
    """Another rank failed, or did not answer in time, during a collective operation of this package."""


class ShardingError(CheckpointError):
    """A model can't be sharded, or a sharded model was used in a way that can't give right results."""


class UnboundOptimizerError(ShardingError):
    """A sharded model was trained, or an optimizer stepped, without the optimizer being bound to the model."""


def listing(items: Iterable[str], most: int = _LISTED) -> str:
    """Return the first items joined by commas, 20 at most by default, and how many more there are."""
    all_items = list(items)
    shown = ", ".join(all_items[:most])
    rest = len(all_items) - most
    return f"{shown}, ... ({rest} more)" if rest > 0 else shown


def counted(number: int, one: str, several: str | None = None) -> str:
    """Return a number and what it counts: "1 key", "1,024 keys"; ``several`` is ``one`` with an ``s`` unless it is given."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def size_text(nbytes: int) -> str:
    """Return a number of bytes in three digits or so, in powers of 1,000."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"
