"""The layout that ``fully_shard`` will make of a model, and the pieces that each rank will save of it; in the runtime's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...layout import FlatBuffer, Layout, Range, Slot, build_flat_buffer
from ...optimizer_states import StateKind
from ...pieces import Piece, whole_piece
from .architecture import PlannedUnit
from .states import PlannedState


@dataclass(frozen=True)
class PlannedLayout(Layout):
    """A layout that ``fully_shard`` will make.

    Attributes:
        order: name of each parameter, the first where it has several -> its position among the parameters of the model.
    """

    order: Mapping[str, int]


def planned_layout(units: Sequence[PlannedUnit], world_size: int) -> PlannedLayout:
    """Place the parameters of a model, none of them frozen, as ``fully_shard`` does: one flat buffer for each unit and dtype.

    Raises:
        ValueError: as :func:`~paddle_fsdp_ckpt.layout.build_flat_buffer`.
    """
    # The layers of a model are alike, and placing one of thousands of parameters takes a while.
    placed: dict[tuple[str, tuple[tuple[int, ...], ...]], FlatBuffer] = {}
    buffers = []
    for unit in units:
        for dtype in dict.fromkeys(parameter.dtype for parameter in unit.parameters):
            members = [(parameter.names, parameter.shape) for parameter in unit.parameters if parameter.dtype == dtype]
            kind = dtype, tuple(shape for _, shape in members)
            if kind not in placed:
                placed[kind] = build_flat_buffer(unit.name, dtype, members, world_size)
            slots = zip(placed[kind].slots, members, strict=True)
            named = tuple(Slot(tuple(sorted(names)), slot.shape, slot.offset) for slot, (names, _) in slots)
            buffers.append(replace(placed[kind], name=f"{unit.name}/{dtype}", slots=named))
    names = [min(parameter.names) for unit in units for parameter in unit.parameters]
    return PlannedLayout(tuple(buffers), world_size, {name: number for number, name in enumerate(names)})


def rank_pieces(layout: PlannedLayout, rank: int, states_of: Callable[[str], Sequence[PlannedState]]) -> Iterator[Piece]:
    """Yield what a rank's file will hold, in the order in which a save describes it.

    Args:
        layout: of the model.
        rank: which one.
        states_of: what the optimizer keeps of a parameter of a dtype.
    """
    local = [(slot, part, buffer.dtype) for buffer in layout.buffers for slot, part in buffer.local_pieces(rank)]
    for slot, part, dtype in local:
        for name in slot.names:
            yield _elementwise(name, dtype, slot, part)
    by_suffix: dict[str, list[tuple[Slot, Range, PlannedState]]] = {}
    # An optimizer has parameters of all dtypes in the order of the model.
    local.sort(key=lambda one: layout.order[one[0].name])
    for slot, part, dtype in local:
        for state in states_of(dtype):
            by_suffix.setdefault(state.suffix, []).append((slot, part, state))
    # Master weights come last, and parameters of other dtypes may have none.
    for several in sorted(by_suffix.values(), key=lambda several: several[0][2].is_master):
        for slot, part, state in several:
            key = f"{slot.name}.{state.suffix}"
            if state.kind is StateKind.ELEMENTWISE:
                yield _elementwise(key, state.dtype, slot, part)
            elif state.kind is StateKind.STACKED:
                yield Piece(key, state.dtype, (1, slot.numel), (0, part.start), (1, part.numel))
            elif part.start == 0:
                yield whole_piece(key, state.dtype, (1,))


def _elementwise(key: str, dtype: str, slot: Slot, part: Range) -> Piece:
    return Piece(key, dtype, slot.shape, (0,) * len(slot.shape), slot.shape, None if part.numel == slot.numel else part)
