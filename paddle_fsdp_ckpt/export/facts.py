"""What two checkpoints say of themselves, beside their values, and say differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import CorruptCheckpointError, counted
from ..optimizer_states import MAY_BE_UNKNOWN
from ..storage.base_parameter import BaseParameter
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue, cut_text, parse_json
from ..storage.reserved_keys import COMMON_KEY, METRICS_KEY, metrics_of, text_and_arrays
from .text import NOTHING, value_text
from .values import read_values

_WIDTH = 100
_OPTIMIZER = "optimizer"
_KEPT_NAMES = ("extra_state", "lr_schedulers", "grad_scaler")


@dataclass(frozen=True)
class FactDifference:
    """Something that both checkpoints say, and say differently; None where one doesn't say it."""

    what: str
    one: JsonValue
    other: JsonValue
    parameters: int | None = None

    def rows(self) -> Iterator[list[str]]:
        """Yield a row of cells for each value in it that differs: what it is, of how many parameters, and both values."""
        of = "" if self.parameters is None else f"{self.parameters:,}"
        for path, *values in _leaves(self.what, self.one, self.other):
            texts = [value_text(value, _WIDTH) for value in values]
            if texts != [NOTHING, NOTHING]:
                yield [path, of, *texts]


def fact_differences(first: CheckpointIndex, second: CheckpointIndex) -> Iterator[FactDifference]:
    """Yield in what checkpoints differ besides the values; where one is stock Paddle's, which says nothing of itself, nothing.

    Args:
        first: the index of one, with reserved keys.
        second: that of the other.

    Raises:
        CheckpointError: what a manager kept can't be read.
    """
    one, other = first.manifest, second.manifest
    if one is None or other is None:
        return
    if one.step != other.step:
        yield FactDifference("step", one.step, other.step)
    if set(one.tied) != set(other.tied):
        yield FactDifference("tied", [list(names) for names in one.tied], [list(names) for names in other.tied])
    yield from _base_differences(one.base, other.base)
    if one.lora != other.lora:
        yield FactDifference("scaling of LoRA layers", one.lora, other.lora)
    yield from _setting_differences(_settings(one.optimizers), _settings(other.optimizers))
    if _plain(one.extra_state) != _plain(other.extra_state):
        yield FactDifference("extra_state", one.extra_state, other.extra_state)
    yield from _kept_differences(_kept(first), _kept(second), one.extra_state is None and other.extra_state is None)


def read_metrics(index: CheckpointIndex) -> dict[str, float]:
    """Return the metrics that a manager was given with a checkpoint, by name; none where there are none.

    Args:
        index: of the checkpoint, with reserved keys.

    Raises:
        CheckpointError: they can't be read.
    """
    if METRICS_KEY not in index:
        return {}
    try:
        return metrics_of(_bytes(index, METRICS_KEY))
    except ValueError as error:
        raise CorruptCheckpointError(f"'{index.path}': the metrics there are not what a manager writes ({cut_text(error)})") from error


@dataclass(frozen=True)
class _Kept:
    """What a manager kept beside a model and its optimizers, as far as it is the same on all ranks."""

    fields: dict[str, JsonValue]
    arrays: bytes
    metrics: dict[str, float]


def _kept(index: CheckpointIndex) -> _Kept:
    """Read it; of a checkpoint of ``save`` alone there is nothing."""
    try:
        text, arrays = text_and_arrays(_bytes(index, COMMON_KEY)) if COMMON_KEY in index else ("{}", memoryview(b""))
        return _Kept(dict(parse_json(text, allow_nan=True)), bytes(arrays), read_metrics(index))
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"'{index.path}': what a manager kept there is not what it writes ({cut_text(error)})") from error


def _bytes(index: CheckpointIndex, key: str) -> bytes:
    return read_values(index, index.whole_piece(key)).tobytes()


def _kept_differences(one: _Kept, other: _Kept, with_extra_state: bool) -> Iterator[FactDifference]:
    """Yield in what it differs; ``extra_state`` that is plain JSON stands in manifests too, and is compared there."""
    for name in _KEPT_NAMES if with_extra_state else _KEPT_NAMES[1:]:
        mine, theirs = (_by_name(kept.fields.get(name)) or None for kept in (one, other))
        if _plain(mine) != _plain(theirs):
            yield FactDifference(name, mine, theirs)
    if one.arrays != other.arrays:
        mine, theirs = (f"{counted(len(kept.arrays), 'byte')}, others" for kept in (one, other))
        yield FactDifference("arrays in extra_state", mine, theirs)
    if _plain(one.metrics) != _plain(other.metrics):
        yield FactDifference("metrics", one.metrics, other.metrics)


def _by_name(value: JsonValue) -> JsonValue:
    return {str(number): item for number, item in enumerate(value)} if isinstance(value, list) else value


def _base_differences(one: Mapping[str, BaseParameter] | None, other: Mapping[str, BaseParameter] | None) -> Iterator[FactDifference]:
    """Yield in what the parameters differ that were left out: the first one, and how many there are."""
    if (one is None) != (other is None):
        yield FactDifference("base", "stored" if one is None else "left out", "stored" if other is None else "left out")
        return
    mine, theirs = one or {}, other or {}
    names = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    if names:
        first, second = (None if one is None else one.to_text() for one in (mine.get(names[0]), theirs.get(names[0])))
        yield FactDifference("base", first, second, len(names))


def _setting_differences(one: dict[str, dict[str, JsonValue]], other: dict[str, dict[str, JsonValue]]) -> Iterator[FactDifference]:
    """Yield the settings that differ, with the number of parameters for which they do so in the same way; however they are grouped."""
    counts: dict[tuple[str, str, str], int] = {}
    values: dict[tuple[str, str, str], tuple[JsonValue, JsonValue]] = {}
    for parameter in [*one, *(name for name in other if name not in one)]:
        mine, theirs = one.get(parameter, {}), other.get(parameter, {})
        names = [*mine, *(name for name in theirs if name not in mine)] if mine and theirs else [_OPTIMIZER]
        for name in names:
            pair = mine.get(name), theirs.get(name)
            if _plain(pair[0]) != _plain(pair[1]) and not (name in MAY_BE_UNKNOWN and None in pair):
                kind = name, _plain(pair[0]), _plain(pair[1])
                counts[kind] = counts.get(kind, 0) + 1
                values[kind] = pair
    for kind, count in counts.items():
        yield FactDifference(kind[0], *values[kind], count)


def _settings(optimizers: JsonValue) -> dict[str, dict[str, JsonValue]]:
    """Return each parameter's optimizer, its settings and its learning rate."""
    found: dict[str, dict[str, JsonValue]] = {}
    for one in optimizers:
        for group in one["groups"]:
            settings = {_OPTIMIZER: one["class"], "learning rate": one["learning_rate"], **group["settings"]}
            found |= dict.fromkeys(group["parameters"], settings)
    return found


def _plain(value: JsonValue) -> str:
    """Return a value as a text that is equal for equal values, NaN among them."""
    return repr(value) if not isinstance(value, dict) else repr(sorted((name, _plain(item)) for name, item in value.items()))


def _leaves(path: str, one: JsonValue, other: JsonValue) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    """Yield what differs inside of two values, with the way there; of what only one has, all of it."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(name for name in other if name not in one)]:
            mine, theirs = one.get(name), other.get(name)
            if _plain(mine) != _plain(theirs) or (name in one) != (name in other):
                yield from _leaves(f"{path}.{name}", mine, theirs)
    else:
        yield path, one, other
