"""``diff``: in what two checkpoints differ, whatever their world sizes and groupings; in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import listing
from ..storage.base_parameter import BaseParameter
from ..storage.format import JsonValue
from ..storage.index import CheckpointIndex
from ..storage.read_lock import while_reading
from ..storage.stock import open_index
from .statistics import as_float64
from .text import Block, BlockReport, Table
from .values import Array, Part, check_values, iter_values, whole_piece

_SHOWN = 20
_WIDTH = 100
_NOTHING = "-"
_OPTIMIZER = "optimizer"


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
        for path, one, other in _leaves(self.what, self.one, self.other):
            if (_brief(one), _brief(other)) != (_NOTHING, _NOTHING):
                yield [path, of, _brief(one), _brief(other)]


@dataclass(frozen=True)
class ValueDifference:
    """How the values under one key differ.

    Attributes:
        key: its name.
        numel: of the tensor.
        differing: how many elements differ in a bit, or in value where the dtypes differ.
        largest: the largest absolute difference of two finite values.
        largest_relative: the largest absolute difference, divided by the larger of both absolute values.
        not_finite: how many differ in that one is NaN or infinite, or is another such.
    """

    key: str
    numel: int
    differing: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0
    not_finite: int = 0


@dataclass(frozen=True)
class Difference(BlockReport):
    """In what two checkpoints differ.

    Attributes:
        one: directory of the first.
        other: directory of the second.
        only_one: keys that only the first has, sorted.
        only_other: keys that only the second has, sorted.
        shapes: keys whose shapes differ.
        dtypes: keys whose dtypes differ.
        facts: other things that they say of themselves; when, by which versions and on how many ranks they were saved not among them.
        values: keys whose values differ, by the largest difference.
        compared: of how many keys the values were compared.
    """

    one: Path
    other: Path
    only_one: tuple[str, ...]
    only_other: tuple[str, ...]
    shapes: tuple[FactDifference, ...]
    dtypes: tuple[FactDifference, ...]
    facts: tuple[FactDifference, ...]
    values: tuple[ValueDifference, ...]
    compared: int

    @property
    def is_none(self) -> bool:
        """Whether they don't differ."""
        return not (self.only_one or self.only_other or self.shapes or self.dtypes or self.facts or self.values)

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        return asdict(self) | {"one": str(self.one), "other": str(self.other), "is_none": self.is_none}

    def blocks(self) -> Iterator[Block]:
        """Yield what only one has, then in what both differ, values last."""
        if self.is_none:
            yield f"no difference: {self.compared} keys, equal bit for bit"
            return
        yield f"A  '{self.one}'"
        yield f"B  '{self.other}'"
        for name, keys in (("A", self.only_one), ("B", self.only_other)):
            if keys:
                yield f"only in {name}, {len(keys)} keys: {listing(keys)}"
        for title, several in (("", self.facts), ("shape of", self.shapes), ("dtype of", self.dtypes)):
            if several:
                yield ""
                # The number of parameters is said where there is one: of hyper-parameters.
                titles = [title, "parameters", "A", "B"]
                rows = [row for one in several[:_SHOWN] for row in one.rows()]
                columns = [i for i in range(4) if i != 1 or any(row[1] for row in rows)]
                yield Table([titles[i] for i in columns], [[row[i] for i in columns] for row in rows])
                if len(several) > _SHOWN:
                    yield f"... and {len(several) - _SHOWN} more"
        yield ""
        yield f"the values of {len(self.values)} of {self.compared} keys differ"
        if self.values:
            rows = [
                [one.key, f"{one.differing:,} of {one.numel:,}", f"{one.largest:.3g}", f"{one.largest_relative:.3g}", str(one.not_finite)]
                for one in self.values[:_SHOWN]
            ]
            yield Table(["key", "elements", "largest", "relative", "not finite"], rows, right={1, 2, 3, 4})
            if len(self.values) > _SHOWN:
                yield f"... and {len(self.values) - _SHOWN} more"


@while_reading("one", "other")
def compare(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Difference:
    """Compare two checkpoints, of ours or of stock Paddle's: keys, shapes, dtypes, hyper-parameters, and all values.

    Raises:
        CheckpointError: one can't be read, or isn't whole.
    """
    first, second = open_index(Path(one)), open_index(Path(other))
    common = [key for key in first.stored if key in second]
    shapes = [FactDifference(key, list(first.global_shape(key)), list(second.global_shape(key))) for key in common]
    shapes = [difference for difference in shapes if difference.one != difference.other]
    incomparable = {difference.what for difference in shapes}
    comparable = [key for key in common if key not in incomparable]
    for index in (first, second):
        check_values(index, comparable)
    values = [difference for difference in _compare_values(first, second, comparable) if difference.differing]
    return Difference(
        first.path,
        second.path,
        tuple(sorted(first.stored.keys() - second.stored.keys())),
        tuple(sorted(second.stored.keys() - first.stored.keys())),
        tuple(shapes),
        tuple(FactDifference(key, first.dtypes[key], second.dtypes[key]) for key in common if first.dtypes[key] != second.dtypes[key]),
        tuple(_facts(first, second)),
        tuple(sorted(values, key=lambda difference: (-difference.not_finite, -difference.largest, difference.key))),
        len(comparable),
    )


def _compare_values(first: CheckpointIndex, second: CheckpointIndex, keys: Sequence[str]) -> list[ValueDifference]:
    found = [ValueDifference(key, whole_piece(first, key).numel) for key in keys]
    parts = (iter_values(index, [whole_piece(index, key) for key in keys]) for index in (first, second))
    for one, other in zip(*parts, strict=True):
        dtypes = first.dtypes[keys[one.number]], second.dtypes[keys[one.number]]
        found[one.number] = _add(found[one.number], one, other, dtypes)
    return found


def _add(found: ValueDifference, one: Part, other: Part, dtypes: tuple[str, str]) -> ValueDifference:
    if dtypes[0] == dtypes[1]:
        differ = _bits(one.values) != _bits(other.values)
        if not differ.any():
            return found
        a, b = (as_float64(part.values[differ], dtypes[0]) for part in (one, other))
        count = len(a)
    else:
        a, b = (as_float64(part.values, dtype) for part, dtype in zip((one, other), dtypes, strict=True))
        differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
        a, b, count = a[differ], b[differ], int(differ.sum())
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    with np.errstate(over="ignore"):
        absolute = np.abs(a - b)
    larger = np.maximum(np.abs(a), np.abs(b))
    relative = absolute[larger > 0] / larger[larger > 0]
    return replace(
        found,
        differing=found.differing + count,
        largest=max(found.largest, float(absolute.max(initial=0.0))),
        largest_relative=max(found.largest_relative, float(relative.max(initial=0.0))),
        not_finite=found.not_finite + count - len(a),
    )


def _bits(values: Array) -> Array:
    return values.view(f"uint{8 * values.itemsize}")


def _facts(first: CheckpointIndex, second: CheckpointIndex) -> Iterator[FactDifference]:
    """Yield in what the manifests differ; where one is stock Paddle's, which has none, nothing."""
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
            if _plain(pair[0]) != _plain(pair[1]):
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


def _brief(value: JsonValue) -> str:
    text = _NOTHING if value is None else _inline(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _inline(value: JsonValue) -> str:
    """Return a value as people write it: a dict's items without braces."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inline(item)}" for name, item in value.items() if item is not None) or _NOTHING
    return str(value)
