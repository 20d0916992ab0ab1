"""Plan a load of just what was saved, which nearly all loads are, without a judgement of each key for itself.

What this looks for is that nothing needs one: the same keys, shapes and dtypes, each element once. Where anything is otherwise, it leaves
all to :mod:`.plan`, which says what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..optim import create_states, drop_states, entry_of
from ..optim.registry import MASTER_WEIGHT_KEY
from ..saved_run import SavedRun, class_differences
from ..shardings import LivePlaces
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex, Stored
from ..storage.problems import ReadProblems
from ..storage.reader import FileRange
from ..subjects import Stepper, Subjects
from .options import LoadOptions
from .planned import LoadPlan, RangeReading


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
    tied = subjects.tied()
    if not _is_usual(run, subjects, options, tied):
        return None
    run = run.with_tied_names()
    if any(class_differences(run, index, one) or not one.names <= run.names for one in subjects.steppers):
        return None
    stored = [_stored_names(index, stepper) for stepper in subjects.steppers]
    for stepper, names in zip(subjects.steppers, stored, strict=True):
        drop_states(stepper.optimizer, [one for one in stepper.parameters if one.slot.name not in names])
        create_states(stepper.optimizer, [one for one in stepper.parameters if one.slot.name in names])
    places = subjects.live_places()
    if places is None or not _has_just(index, subjects, places):
        return None
    ranges: dict[int, list[FileRange]] = {}
    # The values under the other names of a tied parameter are the same, and go to the same memory.
    passed_over = {name for names in tied for name in names[1:]}
    if not all(find_ranges(index, column, passed_over, ranges) for column in places):
        return None
    count = sum(len(column.keys) - len(passed_over.intersection(column.keys)) for column in places)
    reading = RangeReading(count, ranges, [tensor for column in places for tensor in column.tensors])
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
        and not (options.allow_missing or options.allow_unexpected or options.verify_first or options.salvage)
        and options.key_map is None
        and run.tied is not None
        and run.tied == {tuple(names) for names in tied}
        and not run.base
    )


def _stored_names(index: CheckpointIndex, stepper: Stepper) -> set[str]:
    """Return the names of an optimizer's parameters of which the checkpoint has states."""
    suffixes = [f".{suffix}" for suffix in _suffixes(stepper)]
    return {name for name in stepper.names if any(name + suffix in index.stored for suffix in suffixes)}


def _suffixes(stepper: Stepper) -> list[str]:
    return [*(f"{state}_0" for state in entry_of(stepper.optimizer).states), MASTER_WEIGHT_KEY]


def _has_just(index: CheckpointIndex, subjects: Subjects, places: Sequence[LivePlaces]) -> bool:
    """Tell whether the checkpoint's keys are those of the objects, as far as this rank knows them."""
    expected = subjects.model_keys()
    for column in places:
        expected.update(column.keys)
    # Of the parameters of which this rank keeps nothing it has no states; those ranks judge that do.
    for stepper in subjects.steppers:
        elsewhere = [one.slot.name for one in stepper.parameters if not one.range.numel]
        expected.update(key for suffix in _suffixes(stepper) for name in elsewhere if (key := f"{name}.{suffix}") in index.stored)
    return expected == index.keys()


def find_ranges(index: CheckpointIndex, wanted: LivePlaces, passed_over: set[str], ranges: dict[int, list[FileRange]]) -> bool:
    """Add where the values of some keys lie to ``ranges``, by file; tell whether all are there, just once, in the shape that is wanted."""
    stored, dtypes = index.stored, index.dtypes
    for key, dtype, shape, start, stop, address in zip(
        wanted.keys, wanted.dtypes, wanted.shapes, wanted.starts, wanted.stops, wanted.addresses, strict=True
    ):
        if dtypes[key] != dtype or stored[key][0][1].global_shape != shape:
            return False
        if key in passed_over:
            continue
        itemsize = DTYPE_NBYTES[dtype]
        done = start
        for file, box, box_start, box_stop, file_offset in _in_order(stored[key]):
            if box.local_shape != shape:
                return False
            if box_stop <= start or box_start >= stop:
                continue
            if box_start > done or (box_start < done and done > start):  # there is a hole, or it is stored twice
                return False
            end = min(box_stop, stop)
            offset = file_offset + (done - box_start) * itemsize
            ranges.setdefault(file, []).append(FileRange(offset, address + (done - start) * itemsize, (end - done) * itemsize, key))
            done = end
        if done != stop:
            return False
    return True


def _in_order(stored: Sequence[Stored]) -> Iterable[Stored]:
    return sorted(stored, key=_first) if len(stored) > 1 else stored


def _first(stored: Stored) -> int:
    return stored[2]
