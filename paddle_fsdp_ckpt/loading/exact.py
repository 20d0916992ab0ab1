"""Plan a load of just what was saved, which nearly all loads are, without a judgement of each key for itself.

What this looks for is that nothing needs one: the same keys, shapes and dtypes, each element once. Where anything is otherwise, it leaves
all to :mod:`.plan`, which says what.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..optim import entry_of, replace_states
from ..optimizer_states import MASTER_WEIGHT_KEY
from ..saved_run import SavedRun, class_differences
from ..shardings import LivePlaces
from ..storage.columns import Integers, looked_up, numbered, numbers_of
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.problems import ReadProblems
from ..storage.ranges import FileRanges, end_to_end
from ..storage.table import PieceTable
from ..subjects import Stepper, Subjects
from .options import PATTERNS, LoadOptions
from .planned import LoadPlan, RangeReading

_KEYS_AT_A_TIME = 1 << 14  # to find where their values lie, so that it takes little memory


def plan_exact_load(index: CheckpointIndex, run: SavedRun, subjects: Subjects, options: LoadOptions) -> LoadPlan | None:
    """Plan how this rank loads a checkpoint that is of just these objects. Optimizers get the states that are stored.

    Args:
        index: of the checkpoint, of which nothing is known to be damaged.
        run: what it says about its run.
        subjects: what was given to ``load``, with the names that the checkpoint has.
        options: what may differ.

    Returns:
        The plan; None where it isn't of just these objects, or where that can't be told so.
    """
    tied, table = subjects.tied(), index.table
    if table is None or not _is_usual(run, subjects, options, tied):
        return None
    run = run.with_tied_names()
    if any(class_differences(run, index, one) or not one.names <= run.names for one in subjects.steppers):
        return None
    stored = [_stored_names(index, stepper) for stepper in subjects.steppers]
    for stepper, names in zip(subjects.steppers, stored, strict=True):
        replace_states(stepper.optimizer, stepper.parameters, names)
    places = subjects.live_places()
    if places is None:
        return None
    numbers = looked_up(table.numbers, places.keys)
    if not _has_just(table, subjects, numbers):
        return None
    # The values under the other names of a tied parameter are the same, and go to the same memory.
    is_read = ~np.isin(numbers, looked_up(table.numbers, [name for names in tied for name in names[1:]]))
    ranges = find_ranges(table, places, numbers, is_read)
    if ranges is None:
        return None
    reading = RangeReading(int(is_read.sum()), ranges, places.tensors)
    without_state = [
        one.slot.name
        for stepper, names in zip(subjects.steppers, stored, strict=True)
        for one in stepper.parameters
        if one.slot.name not in names and not one.parameter.stop_gradient
    ]
    return LoadPlan(index, run, options, subjects, reading, ReadProblems(index.path), without_state=without_state)


def _is_usual(run: SavedRun, subjects: Subjects, options: LoadOptions, tied: list[list[str]]) -> bool:
    """Tell whether model and optimizers are loaded as they were saved, and no option allows for anything else."""
    return (
        subjects.sharding.tells_places
        and subjects.model is not None
        and bool(subjects.steppers)
        and {"model", "optimizer"} <= options.parts
        and not any(getattr(options, name) for name in (*PATTERNS, "verify_first", "salvage"))
        and options.key_map is None
        and run.tied is not None
        and run.tied == {tuple(names) for names in tied}
        and not run.base
    )


def _stored_names(index: CheckpointIndex, stepper: Stepper) -> set[str]:
    """Return the names of an optimizer's parameters of which the checkpoint has states."""
    suffixes, keys = [f".{suffix}" for suffix in _suffixes(stepper)], index.keys()
    return {name for name in stepper.names if any(name + suffix in keys for suffix in suffixes)}


def _suffixes(stepper: Stepper) -> list[str]:
    return [*(f"{state}_0" for state in entry_of(stepper.optimizer).states), MASTER_WEIGHT_KEY]


def _has_just(table: PieceTable, subjects: Subjects, kept: Integers) -> bool:
    """Tell whether the checkpoint's keys, of which this rank keeps some, are those of the objects, as far as it knows them."""
    numbers = [kept, looked_up(table.numbers, list(subjects.model_keys()))]
    if any((some < 0).any() for some in numbers):
        return False
    # Of the parameters of which this rank keeps nothing it has no states; those ranks judge that do.
    for stepper in subjects.steppers:
        elsewhere = [one.slot.name for one in stepper.parameters if not one.range.numel]
        numbers += [looked_up(table.numbers, [f"{name}.{suffix}" for name in elsewhere]) for suffix in _suffixes(stepper)]
    is_expected = np.zeros(len(table.numbers), np.bool_)
    for some in numbers:
        is_expected[some[some >= 0]] = True
    return bool(is_expected.all())


def find_ranges(table: PieceTable, wanted: LivePlaces, numbers: Integers, is_read: NDArray[np.bool_]) -> dict[int, FileRanges] | None:
    """Return where the values of some keys lie, by file; None where not all are there, just once, in the dtype and shape that is wanted.

    Args:
        table: what is stored.
        wanted: places of at least one element.
        numbers: of their keys in the table.
        is_read: whether each is to be read; what is not must be there like the others.
    """
    if not table.is_whole.all():
        return None
    dtypes, dtype_names = numbered(wanted.dtypes)
    shapes, distinct_shapes = numbered(wanted.shapes)
    # What no key has is -1 here, and no key's number.
    as_stored = looked_up(numbers_of(table.dtypes), dtype_names)[dtypes], looked_up(numbers_of(table.shapes), distinct_shapes)[shapes]
    if (table.key_dtypes[numbers] != as_stored[0]).any() or (table.key_shapes[numbers] != as_stored[1]).any():
        return None
    starts, stops, addresses = wanted.starts, wanted.stops, wanted.addresses
    itemsizes = np.array([DTYPE_NBYTES[name] for name in dtype_names], np.int64)
    which = np.flatnonzero(is_read)
    found: dict[int, list[FileRanges]] = {}
    for first in range(0, len(which), _KEYS_AT_A_TIME):
        some = which[first : first + _KEYS_AT_A_TIME]
        parts = _find_parts(table, numbers[some], starts[some], stops[some])
        if parts is None:
            return None
        owners, sizes = some[parts.owners], itemsizes[dtypes[some[parts.owners]]]
        ranges = FileRanges(
            table.offsets[parts.pieces] + (parts.starts - table.starts[parts.pieces]) * sizes,
            addresses[owners] + (parts.starts - starts[owners]) * sizes,
            (parts.stops - parts.starts) * sizes,
            wanted.keys,
            owners,
        )
        files = table.files[parts.pieces]
        for file in np.unique(files).tolist():
            found.setdefault(file, []).append(ranges[files == file])
    return {file: end_to_end(some) for file, some in found.items()}


class _Parts(NamedTuple):
    """Parts of pieces, in the order of the keys that want them, and of their elements.

    Attributes:
        owners: which key of those asked for each is of.
        pieces: the piece in the table.
        starts: first element of the key's whole tensor.
        stops: past-the-last element.
    """

    owners: Integers
    pieces: Integers
    starts: Integers
    stops: Integers


def _find_parts(table: PieceTable, numbers: Integers, starts: Integers, stops: Integers) -> _Parts | None:
    """Return the parts of pieces that are some keys' elements from ``starts`` to ``stops``; None where they have holes, or some twice."""
    counts = np.diff(table.first)[numbers]
    owners = np.repeat(np.arange(len(numbers)), counts)
    pieces = np.arange(len(owners)) + np.repeat(table.first[numbers] - (np.cumsum(counts) - counts), counts)
    begins, ends = np.maximum(table.starts[pieces], starts[owners]), np.minimum(table.stops[pieces], stops[owners])
    some = begins < ends
    owners, pieces, begins, ends = owners[some], pieces[some], begins[some], ends[some]
    is_first = np.diff(owners, prepend=-1) != 0
    is_last = np.diff(owners, append=-1) != 0
    expected = np.where(is_first, starts[owners], np.concatenate([[0], ends[:-1]]))
    if is_first.sum() != len(numbers) or (begins != expected).any() or (ends != stops[owners])[is_last].any():
        return None
    return _Parts(owners, pieces, begins, ends)
