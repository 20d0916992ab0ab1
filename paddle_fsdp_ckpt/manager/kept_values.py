"""What a manager kept beside a model and its optimizers, read from a step; where that is allowed, what is damaged of it is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError
from ..storage.agreement import COORDINATOR
from ..storage.key_names import say_key
from ..storage.manifest import Manifest
from ..storage.reserved_keys import COMMON_KEY, METRICS_KEY, metrics_of, rank_key, read_bytes
from .extra_state import decode_extra_state

DAMAGED = (CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError)
"""The errors that say that a step is damaged, rather than that it doesn't fit."""


def say_damage(error: CheckpointError, path: Path) -> str:
    """Return what an error says is wrong with a step, without what it says of the way out, since that step is taken all the same."""
    text = str(error)
    end = text.find("; ", text.rfind(str(path)) + len(str(path)))
    return text if end < 0 else text[:end]


@dataclass(frozen=True)
class KeptValues:
    """What a step holds under reserved keys.

    Attributes:
        common: what is the same on all ranks; None where plain ``save`` made the step, and where it is lost.
        metrics: numbers by name.
        own: rank -> what it kept for itself, of those that were asked for; empty where plain ``save`` made the step.
        lost: reserved key -> in words, why what it held can't be read.
    """

    common: dict[str, Any] | None
    metrics: dict[str, float]
    own: dict[int, dict[str, Any]]
    lost: dict[str, str]


def read_kept_values(path: Path, manifest: Manifest, ranks: Sequence[int], *, salvage: bool) -> KeptValues:
    """Read what a step holds under reserved keys, but for sharded tensors. Digests are checked.

    Args:
        path: the step.
        manifest: what it says of itself.
        ranks: those of which the own values are wanted.
        salvage: whether what is damaged is left out.

    Raises:
        CheckpointError: something is damaged, and ``salvage`` is false.
    """
    reading = _Reading(path, manifest, salvage)
    encoded = reading.read(COORDINATOR, [COMMON_KEY, METRICS_KEY])
    common = reading.decode(COMMON_KEY, encoded, {"extra_state", "lr_schedulers", "grad_scaler"})
    metrics = reading.decode_metrics(encoded)
    own: dict[int, dict[str, Any]] = {}
    if common is not None or COMMON_KEY in reading.lost:
        own = {number: value for number in ranks if (value := reading.read_own(number, is_needed=common is not None)) is not None}
    return KeptValues(common, metrics, own, reading.lost)


@dataclass(frozen=True)
class _Reading:
    path: Path
    manifest: Manifest
    salvage: bool
    lost: dict[str, str] = field(default_factory=dict)

    def read(self, file: int, keys: Sequence[str]) -> dict[str, bytearray]:
        """Return the bytes under some keys of one rank's file, of those that are there."""
        try:
            return read_bytes(self.path, self.manifest, file, keys)
        except DAMAGED as error:
            if len(keys) == 1:
                self._lose(keys[0], error)
                return {}
            if not self.salvage:
                raise
        return {key: value for one in keys for key, value in self.read(file, [one]).items()}

    def decode(self, key: str, encoded: Mapping[str, bytearray], fields: set[str]) -> dict[str, Any] | None:
        """Return the dict with these fields that is kept under a key, or None where that is not there."""
        if key not in encoded:
            return None
        try:
            return _decoded(self.path, key, encoded[key], fields)
        except CorruptCheckpointError as error:
            self._lose(key, error)
            return None

    def decode_metrics(self, encoded: Mapping[str, bytearray]) -> dict[str, float]:
        """Return the metrics; empty where there are none."""
        try:
            return metrics_of(encoded.get(METRICS_KEY, b"{}"))
        except ValueError as error:
            text = f"'{self.path}', '{METRICS_KEY}' is not what a save writes ({error}); load another checkpoint"
            self._lose(METRICS_KEY, CorruptCheckpointError(text))
            return {}

    def read_own(self, number: int, *, is_needed: bool) -> dict[str, Any] | None:
        """Return what a rank kept for itself, or None where it is lost, or not there and not needed."""
        key = rank_key(number)
        encoded = self.read(number, [key])
        if is_needed and key not in encoded and key not in self.lost:
            text = f"'{self.path}' lacks what rank {number} kept for itself; load another checkpoint"
            self._lose(key, CorruptCheckpointError(text))
        return self.decode(key, encoded, {"random", "rank_state", "sharded"})

    def _lose(self, key: str, error: CorruptCheckpointError | IncompleteCheckpointError | UnsafeCheckpointError) -> None:
        if not self.salvage:
            raise error
        self.lost[key] = say_damage(error, self.path)


def _decoded(path: Path, key: str, encoded: bytearray, fields: set[str]) -> dict[str, Any]:
    value = decode_extra_state(encoded, f"'{path}', {say_key(key)}")
    if not isinstance(value, dict) or value.keys() != fields:
        raise CorruptCheckpointError(f"'{path}', {say_key(key)}: it is not what a save writes; load another checkpoint")
    return value
