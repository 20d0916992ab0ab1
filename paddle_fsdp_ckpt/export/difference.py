"""``diff``: in what two checkpoints differ, whatever their world sizes and groupings; in bounded memory."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import IncompleteCheckpointError, counted, listing
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue
from ..storage.read_lock import while_reading
from ..storage.stock import open_index
from .contents import MODEL, TRAINER, contents_of, kinds_of, patterns_of
from .facts import FactDifference, fact_differences
from .statistics import as_float64
from .text import Block, BlockReport, Table
from .values import Array, Part, check_values, iter_values

_SHOWN = 20
_COLUMNS = (
    "(largest: of all differences |a - b|; relative: of all |a - b| divided by the larger of |a| and |b|, from 0 to 2; not finite: how "
    "many are NaN or infinite on one side)"
)


@dataclass(frozen=True)
class ValueDifference:
    """How the values under one key differ.

    Attributes:
        key: its name.
        kind: what it is, in words.
        numel: of the tensor.
        differing: how many elements differ in a bit, or in value where the dtypes differ.
        largest: the largest absolute difference of two finite values.
        largest_relative: the largest absolute difference, divided by the larger of both absolute values.
        not_finite: how many differ in that one is NaN or infinite, or is another such.
    """

    key: str
    kind: str
    numel: int
    differing: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0
    not_finite: int = 0

    @property
    def order(self) -> tuple[object, ...]:
        """Where it comes among others: the model first, states with one value last, and otherwise what moved most first."""
        return self.kind != MODEL, self.kind != MODEL and self.numel == 1, -self.not_finite, -self.largest, self.key

    def cells(self) -> list[str]:
        """Return what a table says of it."""
        return [
            self.key,
            f"{self.differing:,} of {self.numel:,}",
            f"{self.largest:.3g}",
            f"{self.largest_relative:.3g}",
            str(self.not_finite),
        ]


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
        values: keys whose values differ: parameters and buffers, then others; by the largest difference.
        compared: of how many keys the values were compared.
        compared_model: of how many of those that are parameters and buffers.
        left_out: what was not compared, in words.
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
    compared_model: int
    left_out: tuple[str, ...]

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
            yield f"no difference: {counted(self.compared, 'key')}, equal bit for bit"
            yield from self._notes()
            return
        yield f"A  '{self.one}'"
        yield f"B  '{self.other}'"
        for name, keys in (("A", self.only_one), ("B", self.only_other)):
            if keys:
                yield f"only in {name}, {counted(len(keys), 'key')}: {listing(keys)}"
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
        of_model = [one for one in self.values if one.kind == MODEL]
        others = self.compared - self.compared_model
        if self.compared_model:
            yield from _value_blocks(of_model, self.compared_model, f"{self.compared_model:,} {MODEL}")
        if others:
            of_what = counted(others, "other key" if self.compared_model else "key")
            yield from _value_blocks(self.values[len(of_model) :], others, of_what)
        if self.values:
            yield _COLUMNS
        if not self.compared:
            yield ""
            yield "no values were compared: no key is in both with one shape"
        yield from self._notes()

    def _notes(self) -> Iterator[str]:
        yield from (f"(not compared: {what})" for what in self.left_out)


def _value_blocks(values: Sequence[ValueDifference], count: int, of_what: str) -> Iterator[Block]:
    yield ""
    if not values:
        yield f"all {of_what} are equal" if count > 1 else f"{of_what}: equal"
    else:
        yield f"the values of {len(values):,} of {of_what} differ"
        rows = [one.cells() for one in values[:_SHOWN]]
        yield Table(["key", "elements", "largest", "relative", "not finite"], rows, right={1, 2, 3, 4})
        if len(values) > _SHOWN:
            yield f"... and {len(values) - _SHOWN:,} more"


@while_reading("one", "other")
def compare(
    one: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    keys: str | Sequence[str] | None = None,
    weights_only: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Difference:
    """Compare two checkpoints, of ours or of stock Paddle's: keys, shapes, dtypes, hyper-parameters, and all values.

    Of what a manager keeps for each rank by itself, such as its random number generators, nothing is compared.

    Args:
        one: directory of the first.
        other: directory of the second.
        keys: compare the keys of this form only, or of one of these, with ``*``, ``?`` and ``[...]`` as in file names, and nothing else.
        weights_only: compare parameters and buffers only, and nothing else.
        progress: called now and then with the number of bytes of the first that were compared so far, and of all.

    Raises:
        CheckpointError: one can't be read, isn't whole, or neither has such keys.
    """
    indexes = [open_index(Path(path), reserved=True) for path in (one, other)]
    kinds = [kinds_of(index, contents_of(index)) for index in indexes]
    patterns = patterns_of(keys)
    is_limited = bool(patterns) or weights_only
    chosen = [{key: kind for key, kind in some.items() if _is_chosen(key, kind, patterns, weights_only)} for some in kinds]
    lacking = [repr(one) for one in patterns if not any(fnmatch.fnmatchcase(key, one) for some in chosen for key in some)]
    if lacking or (is_limited and not any(chosen)):
        what = f"a key of the form {lacking[0]}" if lacking else MODEL
        raise IncompleteCheckpointError(f"neither has {what}; '{indexes[0].path}' has {listing(kinds[0])}")
    first, second = indexes
    common = [key for key in first.stored if key in chosen[0] and key in chosen[1]]
    shapes = [FactDifference(key, list(first.global_shape(key)), list(second.global_shape(key))) for key in common]
    shapes = [difference for difference in shapes if difference.one != difference.other]
    incomparable = {difference.what for difference in shapes}
    comparable = [key for key in common if key not in incomparable]
    for index in indexes:
        check_values(index, comparable)
    found = [ValueDifference(key, chosen[0][key], first.whole_piece(key).numel) for key in comparable]
    values = [difference for difference in _compare_values(first, second, found, progress) if difference.differing]
    has_trainer_state = not is_limited and any(kind == TRAINER for some in kinds for kind in some.values())
    return Difference(
        first.path,
        second.path,
        tuple(sorted(chosen[0].keys() - chosen[1].keys())),
        tuple(sorted(chosen[1].keys() - chosen[0].keys())),
        tuple(shapes),
        tuple(FactDifference(key, first.dtypes[key], second.dtypes[key]) for key in common if first.dtypes[key] != second.dtypes[key]),
        () if is_limited else tuple(fact_differences(first, second)),
        tuple(sorted(values, key=lambda difference: difference.order)),
        len(comparable),
        sum(chosen[0][key] == MODEL for key in comparable),
        ("random number generators and rank_state",) if has_trainer_state else (),
    )


def _is_chosen(key: str, kind: str, patterns: Sequence[str], weights_only: bool) -> bool:
    if kind == TRAINER or (weights_only and kind != MODEL):
        return False
    return not patterns or any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _compare_values(
    first: CheckpointIndex, second: CheckpointIndex, found: list[ValueDifference], progress: Callable[[int, int], None] | None
) -> list[ValueDifference]:
    keys = [one.key for one in found]
    parts = (iter_values(index, [index.whole_piece(key) for key in keys]) for index in (first, second))
    done, total = 0, sum(one.numel * DTYPE_NBYTES[first.dtypes[one.key]] for one in found)
    for one, other in zip(*parts, strict=True):
        dtypes = first.dtypes[keys[one.number]], second.dtypes[keys[one.number]]
        found[one.number] = _add(found[one.number], one, other, dtypes)
        done += len(one.values) * DTYPE_NBYTES[dtypes[0]]
        if progress is not None:
            progress(done, total)
    return found


def _add(found: ValueDifference, one: Part, other: Part, dtypes: tuple[str, str]) -> ValueDifference:
    if dtypes[0] == dtypes[1]:
        differ = _bits(one.values) != _bits(other.values)
        if not differ.any():
            return found
        own, others = one.values[differ], other.values[differ]
        a, b = as_float64(own, dtypes[0]), as_float64(others, dtypes[0])
        count = len(a)
    else:
        a, b = (as_float64(part.values, dtype) for part, dtype in zip((one, other), dtypes, strict=True))
        differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
        a, b, count = a[differ], b[differ], int(differ.sum())
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    if dtypes[0] == dtypes[1] == "int64":  # whose differences float64 can't tell beyond 2**53
        absolute = (np.maximum(own, others).view(np.uint64) - np.minimum(own, others).view(np.uint64)).astype(np.float64)
    else:
        with np.errstate(over="ignore"):
            absolute = np.minimum(np.abs(a - b), np.finfo(np.float64).max)
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
