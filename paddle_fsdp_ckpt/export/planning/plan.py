"""``plan``: what a run on so many ranks will need, before there is one. Pure arithmetic: no weights, no Paddle."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from ...errors import CheckpointError, counted, size_text
from ...layout import ITEM_SIZES, Layout
from ...optimizer_states import StateKind
from ...storage.format import DTYPE_NBYTES
from ...storage.header import encode_header, in_file_order
from ...storage.json_values import JsonValue
from ..config import TIED, ModelConfig, read_config
from ..text import Block, BlockReport, Table
from .architecture import PlannedUnit, planned_units
from .pieces import PlannedLayout, planned_layout, rank_pieces
from .states import PlannedState, planned_states

DEFAULT_OPTIMIZER = "AdamW"

_MOST_RANKS = 1 << 16
_MOST_ELEMENTS = 1 << 50
_SAMPLED_RANKS = 4
"""Headers are made of no more ranks than this; those of the others are taken to be as long as their mean."""

# Bytes of host memory in a first save and a load, rounded up from what was measured with CPython 3.11 at 113,000 keys.
_INDEX_KEY_NBYTES = 220
"""Of one key in the index of a whole checkpoint, which each rank reads to load, and the first rank to commit a save."""
_INDEX_PIECE_NBYTES = 110
"""Of each of its pieces there, of several ranks; measured at 1,024 ranks."""
_SAVED_PIECE_NBYTES = 500
"""Of a rank's own piece in a save: its name, its address, and what the header says of it."""
_LOADED_PIECE_NBYTES = 300
"""The same in a load, with its place in the file."""
_READ_NBYTES = 8 << 20
"""What reading takes beside: scratch memory for two chunks, and the system's own."""


@dataclass(frozen=True)
class WorldPlan:
    """What a run on so many ranks will need; bytes, where nothing else is said.

    Attributes:
        world_size: how many ranks.
        parameters: what each rank keeps of them, with padding.
        gradients: the same of the gradients; those of 16-bit floats are float32.
        states: what the fullest rank keeps of the optimizer's states, master weights not among them.
        master_weights: the same of these.
        padding: of all ranks' parameters together, what is padding.
        whole_unit: the largest unit whole, with its gradients, as it is on each rank during its backward.
        keys: how many a checkpoint has.
        pieces: how many it has of them in all files.
        values: of all its values.
        headers: of all its files' headers; where there are more than 4 ranks, about.
        largest_file: of the largest of its files; where there are more than 4 ranks, about.
        rank_values: values of the fullest rank: what a save in the background copies, and any save or load where they are on a device.
        save: more host memory in a save, on the first rank; values in host memory are written from where they are.
        save_others: the same on the other ranks.
        load: more host memory in a load, on each rank.
    """

    world_size: int
    parameters: int
    gradients: int
    states: int
    master_weights: int
    padding: int
    whole_unit: int
    keys: int
    pieces: int
    values: int
    headers: int
    largest_file: int
    rank_values: int
    save: int
    save_others: int
    load: int

    @property
    def kept(self) -> int:
        """What the fullest rank keeps of everything."""
        return self.parameters + self.gradients + self.states + self.master_weights

    @property
    def checkpoint(self) -> int:
        """How large a checkpoint is, without its small files."""
        return self.values + self.headers


@dataclass(frozen=True)
class RunPlan(BlockReport):
    """What a run will need, at several numbers of ranks.

    Attributes:
        path: of the configuration.
        family: what it says the model is.
        parameters: how many there are, a tied one counted once.
        elements: of all of them.
        units: how many are gathered and released one by one.
        dtype: of the parameters.
        optimizer: its class.
        has_master_weights: whether there are any.
        worlds: one for each number of ranks.
        notes: what the reader should know, in sentences.
    """

    path: Path
    family: str
    parameters: int
    elements: int
    units: int
    dtype: str
    optimizer: str
    has_master_weights: bool
    worlds: tuple[WorldPlan, ...]
    notes: tuple[str, ...]

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        worlds = [asdict(one) | {"kept": one.kept, "checkpoint": one.checkpoint} for one in self.worlds]
        return asdict(self) | {"path": str(self.path), "worlds": worlds}

    def blocks(self) -> Iterator[Block]:
        """Yield a table with a column for each number of ranks."""
        masters = " with float32 master weights" if self.has_master_weights else ""
        yield (
            f"'{self.path}': {self.family}, {counted(self.parameters, 'parameter')} of {counted(self.elements, 'element')} in "
            f"{counted(self.units, 'unit')}, "
            f"{self.dtype}{masters}, {self.optimizer}"
        )
        yield ""
        titles = ["", *(counted(one.world_size, "rank") for one in self.worlds)]
        rows = [[label, *(cell(one) for one in self.worlds)] for label, cell in _ROWS]
        yield Table(titles, rows, right=range(1, len(titles)))
        yield from (f"- {note}" for note in self.notes)


def _bytes_of(attribute: str) -> Callable[[WorldPlan], str]:
    return lambda one: size_text(getattr(one, attribute))


def _nothing(_: WorldPlan) -> str:
    return ""


_ROWS: tuple[tuple[str, Callable[[WorldPlan], str]], ...] = (
    ("each rank keeps (the fullest)", _bytes_of("kept")),
    ("  parameters", _bytes_of("parameters")),
    ("  gradients", _bytes_of("gradients")),
    ("  optimizer states", _bytes_of("states")),
    ("  master weights", _bytes_of("master_weights")),
    ("padding of all parameters", _bytes_of("padding")),
    ("largest unit whole, with gradients", _bytes_of("whole_unit")),
    ("a checkpoint", _bytes_of("checkpoint")),
    ("  files of ranks", lambda one: f"{one.world_size:,}"),
    ("  keys", lambda one: f"{one.keys:,}"),
    ("  pieces", lambda one: f"{one.pieces:,}"),
    ("  largest file", _bytes_of("largest_file")),
    ("more host memory", _nothing),
    ("  in a save, first rank", _bytes_of("save")),
    ("  in a save, other ranks", _bytes_of("save_others")),
    ("  in a load", _bytes_of("load")),
    ("  in a save in the background, besides", _bytes_of("rank_values")),
)

_NOTES = (
    "values on a GPU are copied to the host to be saved, and before they are loaded: add a rank's own, as for a save in the background",
    "activations, what Paddle's allocator holds in reserve, random number generators and your own state are not counted",
)


def plan_run(
    config: str | os.PathLike[str],
    world_sizes: Sequence[int],
    *,
    optimizer: str = DEFAULT_OPTIMIZER,
    dtype: str | None = None,
    master_weights: bool = True,
) -> RunPlan:
    """Compute what a run will need at several numbers of ranks, from the ``config.json`` of its model.

    The layout is the one that ``fully_shard`` makes of PaddleFormers' model with separate projections, where all of it trains.

    Args:
        config: the file, or the directory in which it lies.
        world_sizes: numbers of ranks, from 1 on.
        optimizer: a class of ``paddle.optimizer``, with its default settings.
        dtype: Paddle's name of the parameters' type; by default what the configuration says, else float32.
        master_weights: whether parameters of low precision have them.

    Raises:
        CheckpointError: the configuration can't be read, the family or the dtype is not known, or a number of ranks is below 1.
        UnsupportedOptimizerError: the class is none that steps sharded models.
    """
    found = read_config(Path(config))
    wrong = [one for one in world_sizes if not 1 <= one <= _MOST_RANKS]
    if wrong or not world_sizes:
        raise CheckpointError(f"a run can't have {wrong[0] if wrong else 'no'} ranks; give numbers from 1 to {_MOST_RANKS}")
    chosen = _dtype(found, dtype)
    units = planned_units(found, chosen)
    states_of = lru_cache(lambda one: tuple(planned_states(optimizer, one, master_weights=master_weights)))
    parameters = [parameter for unit in units for parameter in unit.parameters]
    numel = sum(math.prod(parameter.shape) for parameter in parameters)
    if numel > _MOST_ELEMENTS:
        raise CheckpointError(f"'{found.path}' makes no model: it would have {numel:.3g} elements")
    try:
        layouts = [planned_layout(units, world_size) for world_size in world_sizes]
    except ValueError as error:
        raise CheckpointError(f"'{found.path}' makes no model: {error}") from error
    return RunPlan(
        found.path,
        str(found.model_type),
        len(parameters),
        sum(slot.numel for buffer in layouts[0].buffers for slot in buffer.slots),
        len(units),
        chosen,
        optimizer,
        any(state.is_master for state in states_of(chosen)),
        tuple(_plan_world(layout, units, states_of) for layout in layouts),
        (*_ties(found, units), *_NOTES),
    )


def _ties(config: ModelConfig, units: Sequence[PlannedUnit]) -> list[str]:
    is_tied = any(len(parameter.names) > 1 for unit in units for parameter in unit.parameters)
    if config.flag(TIED, False) and not is_tied:
        return [f"the configuration says {TIED}, and PaddleFormers' models with experts don't tie: the head is counted by itself"]
    return []


def _dtype(config: ModelConfig, wanted: str | None) -> str:
    dtype = wanted or config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"the parameters can't be {dtype!r:.100}; give a dtype, one of {', '.join(ITEM_SIZES)}")
    return str(dtype)


@dataclass
class _RankTotal:
    """What one rank keeps, besides padding, and saves."""

    parameters: int = 0
    states: int = 0
    master_weights: int = 0
    pieces: int = 0

    @property
    def values(self) -> int:
        return self.parameters + self.states + self.master_weights


def _plan_world(layout: PlannedLayout, units: Sequence[PlannedUnit], states_of: Callable[[str], Sequence[PlannedState]]) -> WorldPlan:
    totals = [_total(layout, rank, states_of) for rank in range(layout.world_size)]
    fullest = max(totals, key=lambda total: total.values)
    pieces, most = sum(total.pieces for total in totals), max(total.pieces for total in totals)
    headers = _header_sizes(layout, states_of)
    mean_header = sum(headers.values()) // len(headers)
    shards = sum(buffer.nbytes for buffer in layout.buffers) // layout.world_size
    filled = sum(slot.numel * ITEM_SIZES[buffer.dtype] for buffer in layout.buffers for slot in buffer.slots)
    keys = sum(len(slot.names) + len(states_of(buffer.dtype)) for buffer in layout.buffers for slot in buffer.slots)
    index = keys * _INDEX_KEY_NBYTES + pieces * _INDEX_PIECE_NBYTES
    saved = most * _SAVED_PIECE_NBYTES
    return WorldPlan(
        world_size=layout.world_size,
        parameters=shards,
        gradients=sum(buffer.gradient_nbytes for buffer in layout.buffers) // layout.world_size,
        states=fullest.states,
        master_weights=fullest.master_weights,
        padding=shards * layout.world_size - filled,
        whole_unit=_largest_unit(layout, units),
        keys=keys,
        pieces=pieces,
        values=sum(total.values for total in totals),
        headers=sum(headers.values()) * layout.world_size // len(headers),
        largest_file=max(total.values + headers.get(rank, mean_header) for rank, total in enumerate(totals)),
        rank_values=fullest.values,
        save=saved + index,
        save_others=saved,
        load=most * _LOADED_PIECE_NBYTES + index + _READ_NBYTES,
    )


def _total(layout: Layout, rank: int, states_of: Callable[[str], Sequence[PlannedState]]) -> _RankTotal:
    total = _RankTotal()
    for buffer in layout.buffers:
        states = states_of(buffer.dtype)
        for slot, part in buffer.local_pieces(rank):
            total.parameters += len(slot.names) * part.numel * ITEM_SIZES[buffer.dtype]
            total.pieces += len(slot.names)
            for state in states:
                if state.kind is StateKind.SCALAR and part.start:
                    continue
                nbytes = DTYPE_NBYTES[state.dtype] * (1 if state.kind is StateKind.SCALAR else part.numel)
                total.pieces += 1
                if state.is_master:
                    total.master_weights += nbytes
                else:
                    total.states += nbytes
    return total


def _header_sizes(layout: PlannedLayout, states_of: Callable[[str], Sequence[PlannedState]]) -> dict[int, int]:
    """Return how long the headers are of the files of some ranks, evenly spread."""
    count = min(layout.world_size, _SAMPLED_RANKS)
    sizes = {}
    for rank in (i * layout.world_size // count for i in range(count)):
        pieces = list(rank_pieces(layout, rank, states_of))
        sizes[rank] = len(encode_header([pieces[i] for i in in_file_order(pieces)]))
    return sizes


def _largest_unit(layout: Layout, units: Sequence[PlannedUnit]) -> int:
    """Return how large the largest unit is whole, with its gradients."""
    nbytes = dict.fromkeys((unit.name for unit in units), 0)
    for buffer in layout.buffers:
        nbytes[buffer.name.rpartition("/")[0]] += buffer.nbytes + buffer.gradient_nbytes
    return max(nbytes.values())
