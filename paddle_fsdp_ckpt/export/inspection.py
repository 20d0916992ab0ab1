"""``inspect``: what a checkpoint directory holds, from its manifest and headers; values are read only where statistics are asked for."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from ..errors import FEW, CheckpointError, IncompleteCheckpointError, counted, listing, size_text
from ..storage.base_parameter import BaseParameter
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue
from ..storage.plan import plan_whole
from ..storage.read_lock import while_reading
from ..storage.reserved_keys import METRICS_KEY
from ..storage.stock import open_index
from ..storage.survey import look_at
from ..storage.verify import ONLY_STOCK_READS
from .contents import MASTERS, MODEL, SHARDED, TRAINER, contents_of, kinds_of, patterns_of
from .facts import read_metrics
from .optimizer_description import Optimizer, described_optimizer
from .roots import checkpoints_counted, entries_of, say_given_up
from .statistics import Statistics, statistics_of
from .text import Block, BlockReport, Table, value_text

_LONGEST = 1000
_MOST_METRICS = 6
"""Of how many metrics a table of checkpoints has columns."""
_TEXT_AND_DIGITS = re.compile(r"([^0-9]*)([0-9]*)")


@dataclass(frozen=True)
class Amount:
    """How much of one kind and dtype there is; elements and bytes are of whole tensors, each counted once."""

    kind: str
    dtype: str
    keys: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class KeyDescription:
    """One key.

    Attributes:
        key: its name.
        kind: what it is.
        dtype: Paddle's dtype name.
        shape: of the whole tensor.
        ranges: which rank saved what of it, in words.
        statistics: of its values, where they were asked for.
    """

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[str, ...]
    statistics: Statistics | None


@dataclass(frozen=True)
class Inspection(BlockReport):
    """What a checkpoint directory holds.

    Attributes:
        path: the directory.
        kind: what kind of checkpoint it is, in words.
        step: the training step, where it says so.
        world_size: how many ranks saved it.
        created: when, UTC, where it says so.
        versions: of what wrote it.
        files: how many, with ``0.metadata`` where the checkpoint's own description knows it.
        nbytes: of the files, as ``verify`` counts them.
        amounts: what they hold.
        tied: the names of each tensor that has several.
        base: the parameters that were left out since they don't train, by their first names.
        optimizers: what is said of them; none in stock Paddle's.
        keys: those that were asked for.
        problems: keys that are not whole, in words.
        has_digests: whether the values can be checked.
        extra_state: the caller's own, where it is plain JSON.
        metrics: what a manager was given as such, by name.
        faults: what is wrong besides, in words.
    """

    path: Path
    kind: str
    step: int | None
    world_size: int
    created: str | None
    versions: dict[str, str]
    files: int
    nbytes: int
    amounts: tuple[Amount, ...]
    tied: tuple[tuple[str, ...], ...]
    base: dict[str, BaseParameter]
    optimizers: tuple[Optimizer, ...]
    keys: tuple[KeyDescription, ...]
    problems: tuple[str, ...]
    has_digests: bool
    extra_state: JsonValue
    metrics: dict[str, float]
    faults: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether every key is whole, and nothing else is wrong."""
        return not (self.problems or self.faults)

    @property
    def health(self) -> str:
        """What is wrong, in a few words."""
        if self.problems:
            return counted(len(self.problems), "key is not whole", "keys are not whole")
        return "whole" if self.is_good else counted(len(self.faults), "thing is wrong", "things are wrong")

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        return asdict(self) | {"path": str(self.path), "is_good": self.is_good}

    def blocks(self) -> Iterator[Block]:
        """Yield what there is to know, the most important first."""
        yield f"'{self.path}': {self.kind}"
        facts = [("step", "not noted" if self.step is None else str(self.step)), ("saved by", counted(self.world_size, "rank"))]
        facts += [("saved at", _say_time(self.created))] if self.created is not None else []
        facts += [("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items()))] if self.versions else []
        facts.append(("files", f"{self.files}, {size_text(self.nbytes)}"))
        facts += [("tied", listing(" = ".join(names) for names in self.tied))] if self.tied else []
        if self.base:
            elements = sum(math.prod(one.shape) for one in self.base.values())
            facts.append(
                ("holds", f"what trains, without its base, {counted(len(self.base), 'parameter')} of {counted(elements, 'element')}")
            )
        facts += [("metrics", value_text(self.metrics, _LONGEST))] if self.metrics else []
        facts += [("extra_state", value_text(self.extra_state, _LONGEST))] if self.extra_state is not None else []
        facts.append(("health", self._health()))
        width = max(len(name) for name, _ in facts)
        yield from (f"  {name:<{width}}  {value}" for name, value in facts)
        rows = [[one.kind, one.dtype, f"{one.keys:,}", f"{one.elements:,}", size_text(one.nbytes)] for one in self.amounts]
        yield ""
        yield Table(["what", "dtype", "keys", "elements", "size"], rows, right={2, 3, 4})
        for optimizer in self.optimizers:
            yield ""
            yield from optimizer.lines()
        if self.keys:
            yield ""
            yield self._key_table()

    def _health(self) -> str:
        if not self.is_good:
            keys = [f"{self.health}: {listing(self.problems)}"] if self.problems else []
            return "; ".join([*keys, *self.faults])
        values = "values are checked by `paddle-fsdp-ckpt verify`" if self.has_digests else "stock Paddle keeps no digests of values"
        return f"sizes and headers are right and every key is whole; {values}"

    def _key_table(self) -> Table:
        titles = ["key", "dtype", "shape", "saved by rank"]
        rows = [[one.key, one.dtype, str(list(one.shape)), "; ".join(one.ranges)] for one in self.keys]
        if any(one.statistics is not None for one in self.keys):
            titles[3:] = ["min", "max", "mean", "NaN", "infinite"]
            for row, one in zip(rows, self.keys, strict=True):
                row[3:] = _statistics_cells(one.statistics)
            return Table(titles, rows, right=range(3, 8))
        return Table(titles, rows)


@dataclass(frozen=True)
class Steps(BlockReport):
    """The checkpoints in a directory.

    Attributes:
        path: the directory.
        checkpoints: those that can be read, by step.
        problems: why others can't, in words.
        given_up: name of a step of a history that was given up -> that of the step that says so; no harm.
    """

    path: Path
    checkpoints: tuple[Inspection, ...]
    problems: tuple[str, ...]
    given_up: dict[str, str]

    @property
    def is_good(self) -> bool:
        """Whether all can be read and are whole."""
        return not self.problems and all(one.is_good for one in self.checkpoints)

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        return {
            "path": str(self.path),
            "checkpoints": [one.to_json() for one in self.checkpoints],
            "problems": list(self.problems),
            "given_up": self.given_up,
            "is_good": self.is_good,
        }

    def blocks(self) -> Iterator[Block]:
        """Yield a table of the checkpoints, and what is wrong with others."""
        names = list(dict.fromkeys(name for one in self.checkpoints for name in one.metrics))
        shown = names[:_MOST_METRICS]
        rows = [
            [
                "-" if one.step is None else str(one.step),
                one.path.name,
                str(one.world_size),
                "-" if one.created is None else _say_time(one.created),
                size_text(one.nbytes),
                *(_number(one.metrics.get(name)) for name in shown),
                one.health + ", given up" * (one.path.name in self.given_up),
            ]
            for one in self.checkpoints
        ]
        yield checkpoints_counted(self.path, [one.is_good for one in self.checkpoints], self.problems)
        yield ""
        titles = ["step", "name", "ranks", "saved at", "size", *shown, "health"]
        yield Table(titles, rows, right={0, 2, *range(4, 5 + len(shown))})
        if len(names) > len(shown):
            yield f"(and {counted(len(names) - len(shown), 'metric')} more: inspect one checkpoint)"
        yield from (f"- {problem}" for problem in self.problems)
        yield from say_given_up(self.given_up)


def inspect(
    path: str | os.PathLike[str],
    *,
    keys: str | Sequence[str] | None = None,
    statistics: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection | Steps:
    """Say what a checkpoint directory holds, or which checkpoints lie in a directory that is none itself.

    Args:
        path: the directory; of ours or of stock Paddle's.
        keys: describe the keys of this form too, or of one of these, with ``*``, ``?`` and ``[...]`` as in file names.
        statistics: read the values of those keys, of all by default, and say what they are like.
        progress: called now and then with the number of bytes of those values that were read so far, and of all.

    Raises:
        CheckpointError: there is no checkpoint, or its headers can't be read.
    """
    directory = Path(path)
    entries = entries_of(directory)
    inside = entries.checkpoints
    if not inside:
        patterns = patterns_of(keys)
        return _inspect(directory, patterns or ("*",) * statistics, statistics=statistics, progress=progress)
    if keys is not None or statistics:
        raise CheckpointError(
            f"'{directory}' holds {counted(len(inside), 'checkpoint')}; keys can be listed of one of them: {listing(_names(inside))}"
        )
    found, problems = [], []
    for one in inside:
        try:
            found.append(_inspect(one))
        except CheckpointError as error:
            problems.append(f"{one.name}: {error}")
    found.sort(key=lambda one: (one.step is None, one.step, one.path.name))
    return Steps(directory, tuple(found), (*problems, *entries.problems()), entries.given_up())


def _say_time(created: str) -> str:
    """Return when a checkpoint was saved, as its manifest says, to the second."""
    return datetime.fromisoformat(created).isoformat(timespec="seconds")


def _names(paths: Sequence[Path]) -> list[str]:
    return [path.name for path in paths]


@while_reading("path")
def _inspect(
    path: Path, patterns: Sequence[str] = (), *, statistics: bool = False, progress: Callable[[int, int], None] | None = None
) -> Inspection:
    index = open_index(path, reserved=True)
    contents = contents_of(index)
    kinds = kinds_of(index, contents)
    manifest = index.manifest
    listed = sorted((key for key in index.stored if kinds[key] != TRAINER), key=_with_numbers)
    like = {pattern: set(fnmatch.filter(listed, pattern)) for pattern in patterns}
    for pattern, some in like.items():
        if not some:
            raise IncompleteCheckpointError(f"'{path}' has no key of the form {pattern!r}; it has {listing(listed, FEW)}")
    chosen = [key for key in listed if any(key in some for some in like.values())]
    uncovered = plan_whole(index, index.keys()).problems.uncovered
    faults = []
    broken = {problem.key for problem in uncovered}
    metrics: dict[str, float] = {}
    if METRICS_KEY not in broken:
        try:
            metrics = read_metrics(index)
        except CheckpointError as error:
            faults.append(str(error))
    readable = [key for key in chosen if statistics and key not in broken]
    of_values = dict(zip(readable, statistics_of(index, [index.whole_piece(key) for key in readable], progress), strict=True))
    if manifest is not None and manifest.paddle_metadata is not None:
        _, fault = look_at(path, manifest.paddle_metadata)
        faults += [] if fault is None else [f"{fault}. {ONLY_STOCK_READS}"]
    records = [*index.files, *([manifest.paddle_metadata] if manifest is not None and manifest.paddle_metadata else [])]
    return Inspection(
        path,
        "a checkpoint of stock Paddle" if manifest is None else f"a checkpoint of format version {manifest.format_version}",
        None if manifest is None else manifest.step,
        len(index.files) if manifest is None else manifest.world_size,
        None if manifest is None else manifest.created,
        {} if manifest is None else dict(manifest.versions),
        len(records),
        sum(record.size for record in records),
        tuple(_amounts(index, kinds)),
        contents.tied or (),
        {} if manifest is None else manifest.base or {},
        () if manifest is None else tuple(described_optimizer(one) for one in manifest.optimizers),
        tuple(_describe(index, key, kinds[key], of_values.get(key)) for key in chosen),
        tuple(map(str, uncovered)),
        manifest is not None,
        None if manifest is None else manifest.extra_state,
        metrics,
        tuple(faults),
    )


def _with_numbers(key: str) -> list[tuple[str, int, str]]:
    """Return what sorts keys as people do: ``layers.2`` before ``layers.10``."""
    pairs = ((text, digits.lstrip("0")) for text, digits in _TEXT_AND_DIGITS.findall(key))
    return [(text, len(digits), digits) for text, digits in pairs]


def _amounts(index: CheckpointIndex, kinds: dict[str, str]) -> Iterator[Amount]:
    keys: Counter[tuple[str, str]] = Counter()
    elements: Counter[tuple[str, str]] = Counter()
    for key, kind in kinds.items():
        group = kind, index.dtypes[key]
        keys[group] += 1
        elements[group] += index.whole_piece(key).numel
    order = {MODEL: 0, MASTERS: 1, SHARDED: 3, TRAINER: 4}
    for kind, dtype in sorted(keys, key=lambda group: (order.get(group[0], 2), group)):
        count = elements[kind, dtype]
        yield Amount(kind, dtype, keys[kind, dtype], count, count * DTYPE_NBYTES[dtype])


def _describe(index: CheckpointIndex, key: str, kind: str, statistics: Statistics | None) -> KeyDescription:
    return KeyDescription(key, kind, index.dtypes[key], index.global_shape(key), tuple(_ranges(index, key)), statistics)


def _ranges(index: CheckpointIndex, key: str) -> Iterator[str]:
    for piece, file_name, _ in index.pieces(key):
        part = "all" if piece.flat_range is None else f"[{piece.flat_range.start}, {piece.flat_range.stop})"
        if piece.local_shape != piece.global_shape:
            box = f"{list(piece.local_shape)} at {list(piece.global_offset)}"
            part = box if piece.flat_range is None else f"{part} of {box}"
        yield f"{file_name.split('_')[0]}: {part}"


def _statistics_cells(found: Statistics | None) -> list[str]:
    if found is None:
        return ["not whole", "-", "-", "-", "-"]
    return [*map(_number, (found.minimum, found.maximum, found.mean)), str(found.nan), str(found.infinite)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
