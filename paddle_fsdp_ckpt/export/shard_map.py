"""Which rank holds what of each flat buffer, found out from a checkpoint's files, which don't say it themselves.

Files say which range of each parameter each rank saved, and in which order. Which parameters share a flat buffer is guessed from their
names, and the guess is right where placing them anew gives every range that the files have. Then padding is known too.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError
from ..layout import ITEM_SIZES, Range, build_flat_buffer
from ..storage.format import DTYPE_NBYTES
from ..storage.index import CheckpointIndex
from ..storage.read_lock import while_reading
from ..storage.stock import open_index
from .contents import Contents, contents_of

_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)")
_STATISTICS = ("_mean", "_variance")
"""What Paddle calls running statistics, which are stored whole."""


@dataclass(frozen=True)
class Place:
    """A parameter's place in a flat buffer, and which rank holds what of it.

    Attributes:
        name: of the parameter, the first where it has several.
        range: in the flat buffer.
        parts: rank -> its part, counted from the parameter's first element; none of them empty.
    """

    name: str
    range: Range
    parts: dict[int, Range]


@dataclass(frozen=True)
class BufferMap:
    """One flat buffer.

    Attributes:
        name: of the unit.
        dtype: of its parameters.
        places: in ascending order.
        numel: of the whole buffer, padding included where that is known.
        shard_numel: how many elements each rank keeps; None where the ranks don't cut it equally.
        copies: the names of units that look just the same, this one among them.
    """

    name: str
    dtype: str
    places: tuple[Place, ...]
    numel: int
    shard_numel: int | None
    copies: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.numel * DTYPE_NBYTES[self.dtype]

    @property
    def padding(self) -> int:
        """Elements that are padding."""
        return self.numel - sum(place.range.numel for place in self.places)


@dataclass(frozen=True)
class ShardMap:
    """The flat buffers of a checkpoint.

    Attributes:
        path: of the checkpoint.
        step: the training step, where it says so.
        world_size: how many ranks saved it.
        buffers: in the order of the model; such as look the same and follow each other only once.
        is_exact: whether these are the buffers that were saved; else those of a likely grouping, without padding.
    """

    path: Path
    step: int | None
    world_size: int
    buffers: tuple[BufferMap, ...]
    is_exact: bool


@while_reading("path")
def read_shard_map(path: Path) -> ShardMap:
    """Find out from a checkpoint's headers which rank holds what; of ours or of stock Paddle's.

    Raises:
        CheckpointError: there is no checkpoint, its headers can't be read, or it holds no parameters, or such as are cut along their axes.
    """
    index = open_index(path)
    contents = contents_of(index)
    parameters = list(_parameters(index, contents))
    if not parameters:
        raise CheckpointError(f"'{path}' holds no parameters that could be drawn")
    world_size = len(index.files)
    with_states = {*contents.states, *contents.masters}
    for unit_of, is_split in itertools.product((_block, _layer, _innermost_block, _whole_model), (False, True)):
        groups = _group(parameters, unit_of, with_states if is_split else None)
        buffers = [_placed(unit, dtype, members, world_size) for (unit, dtype, _), members in groups.items()]
        exact = [one for one in buffers if one is not None]
        if len(exact) == len(buffers):
            return ShardMap(index.path, _step(index), world_size, tuple(_without_copies(exact)), True)
    groups = _group(parameters, _block, None)
    likely = [_end_to_end(unit, dtype, members) for (unit, dtype, _), members in groups.items()]
    return ShardMap(index.path, _step(index), world_size, tuple(_without_copies(likely)), False)


def pattern_of(unit: str, name: str) -> str:
    """Return a parameter's name within its unit, with ``*`` for numbers; together with the unit's own, where that is no numbered block."""
    inner = name.removeprefix(f"{unit}.")
    last = unit.rpartition(".")[2]
    return _NUMBER.sub("*", inner if last.isdigit() or inner == name else f"{last}.{inner}")


@dataclass(frozen=True)
class _Parameter:
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    parts: dict[int, Range]
    order: tuple[int, int]

    @property
    def name(self) -> str:
        return self.names[0]


def _step(index: CheckpointIndex) -> int | None:
    return None if index.manifest is None else index.manifest.step


def _parameters(index: CheckpointIndex, contents: Contents) -> Iterator[_Parameter]:
    names_of = {name: names for names in contents.tied or () for name in names}
    for key in contents.model:
        names = names_of.get(key, (key,))
        if key != names[0] or index.dtypes[key] not in ITEM_SIZES or key.rpartition(".")[2] in _STATISTICS:
            continue
        parts: dict[int, Range] = {}
        for file, box, start, stop, _ in index.stored[key]:
            if box.local_shape != box.global_shape:
                raise CheckpointError(f"'{index.path}': '{key}' is cut along its axes, not into flat ranges, and can't be drawn")
            parts.setdefault(file, Range(start, stop))
        # A file has its parameters in the order of the buffers; what begins on a later rank comes later.
        first = index.stored[key][0]
        yield _Parameter(names, index.global_shape(key), index.dtypes[key], parts, (first[0], first[4]))


def _group(
    parameters: Sequence[_Parameter], unit_of: Callable[[str], str], with_states: set[str] | None
) -> dict[tuple[str, str, bool], list[_Parameter]]:
    """Return the parameters of each buffer that there would be, in order; frozen ones apart, where it is told which have states."""
    groups: dict[tuple[str, str, bool], list[_Parameter]] = {}
    for one in sorted(parameters, key=lambda one: one.order):
        groups.setdefault((unit_of(one.name), one.dtype, with_states is not None and one.name in with_states), []).append(one)
    # A file has wide dtypes first, and so the order of the model only among the parameters of one.
    (common, _), *_ = Counter(one.dtype for one in parameters).most_common(1)
    order: dict[str, tuple[bool, tuple[int, int]]] = {}
    for (unit, dtype, _), members in groups.items():
        here = dtype != common, members[0].order
        order[unit] = min(order.get(unit, here), here)
    return dict(sorted(groups.items(), key=lambda item: (order[item[0][0]], item[0][0])))


def _block(name: str) -> str:
    found = _NUMBER.search(name)
    return _layer(name) if found is None else name[: found.end()]


def _innermost_block(name: str) -> str:
    found = list(_NUMBER.finditer(name))
    return _layer(name) if not found else name[: found[-1].end()]


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or "(model)"


def _whole_model(name: str) -> str:
    del name
    return "(model)"


def _placed(unit: str, dtype: str, members: Sequence[_Parameter], world_size: int) -> BufferMap | None:
    """Return the buffer that the runtime makes of these parameters; None where ranks hold other ranges than in it."""
    buffer = build_flat_buffer(unit, dtype, [(one.names, one.shape) for one in members], world_size)
    places = []
    for slot, one in zip(buffer.slots, members, strict=True):
        ranks = range(slot.range.start // buffer.shard_numel, (slot.range.stop - 1) // buffer.shard_numel + 1)
        if {rank: buffer.local_range(slot, rank) for rank in ranks} != one.parts:
            return None
        places.append(Place(one.name, slot.range, one.parts))
    return BufferMap(unit, dtype, tuple(places), buffer.numel, buffer.shard_numel)


def _end_to_end(unit: str, dtype: str, members: Sequence[_Parameter]) -> BufferMap:
    places = []
    end = 0
    for one in members:
        numel = max(part.stop for part in one.parts.values())
        places.append(Place(one.name, Range(end, end + numel), one.parts))
        end += numel
    return BufferMap(unit, dtype, tuple(places), end, None)


def _without_copies(buffers: Iterable[BufferMap]) -> Iterator[BufferMap]:
    """Yield each buffer with the names of those that are alike; routers, which lie between the layers in a dtype of their own, too."""
    alike: dict[object, list[BufferMap]] = {}
    for one in buffers:
        looks = tuple((pattern_of(one.name, place.name), place.range, tuple(place.parts.items())) for place in one.places)
        alike.setdefault((_NUMBER.sub("*", one.name), one.dtype, one.numel, looks), []).append(one)
    for several in alike.values():
        yield replace(several[0], copies=tuple(one.name for one in several))
