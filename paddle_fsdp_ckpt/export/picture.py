"""A shard map as a picture, by ``matplotlib`` (the extra ``plot``): a row for each flat buffer, a column for each rank."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, counted, size_text
from ..layout import Range
from ..storage.json_values import JsonValue
from .shard_map import BufferMap, ShardMap, pattern_of

SUFFIXES = (".png", ".svg")

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442")
"""Okabe and Ito's, which people with any kind of colour vision tell apart (https://jfly.uni-koeln.de/color/)."""
_DARK = {"#0072B2", "#009E73", "#D55E00"}
_OTHERS = "#BDBDBD"
_INK = "#222222"
_MOST_ROWS = 40
_FEW = 12
_MANY_CUTS = 24
_VISIBLE, _VISIBLE_RANK = 0.002, 0.03
_ROW_INCHES = 0.42
_WIDTH_INCHES = 14.0
_LEGEND_COLUMNS = 3
_MAP_LEFT, _MAP_RIGHT = 0.19, 0.80
_LABEL_CHARACTERS = 34  # of a row's name, about as many as have room at the left of the map
_CHARACTER = 0.0068
"""About how wide a character of a label is, as a part of the map's width."""


@dataclass(frozen=True)
class PictureReport:
    """What was drawn.

    Attributes:
        source: the checkpoint.
        path: the picture.
        world_size: how many ranks it shows.
        buffers: how many rows it has.
        is_exact: whether they are the flat buffers that were saved, or only likely ones.
    """

    source: Path
    path: Path
    world_size: int
    buffers: int
    is_exact: bool

    def to_json(self) -> JsonValue:
        """Return the report as plain JSON data."""
        return {**vars(self), "source": str(self.source), "path": str(self.path)}

    def __str__(self) -> str:
        text = f"'{self.path}': {counted(self.buffers, 'row')}, {counted(self.world_size, 'rank')}"
        return text if self.is_exact else f"{text}\n- {_NOT_EXACT}"


_NOT_EXACT = "not cut as fully_shard does by default: rows are a likely grouping, and padding isn't known"


def draw(shard_map: ShardMap, path: str | os.PathLike[str]) -> PictureReport:
    """Draw a shard map into a file, which appears as a whole, in place of an older one.

    Raises:
        CheckpointError: the file's name is that of no picture, its directory isn't there, or ``matplotlib`` isn't installed.
        OSError: the system refused.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise CheckpointError(f"'{target}': pictures are written as {' or '.join(SUFFIXES)}; give such a name")
    if not target.parent.is_dir():
        raise CheckpointError(f"there is no directory '{target.parent}' for '{target.name}'; make it, or give another path")
    matplotlib = _matplotlib()
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        # Without the time in it, the same map gives the same bytes; and its words stay words in an SVG.
        metadata = {"Software": None} if target.suffix.lower() == ".png" else {"Date": None}
        with matplotlib.rc_context({"svg.hashsalt": "shard map", "svg.fonttype": "none"}):
            _draw(shard_map).savefig(partial, format=target.suffix[1:].lower(), dpi=110, metadata=metadata)
        os.replace(partial, target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):  # which may name the partial file, or none
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
    return PictureReport(shard_map.path, target, shard_map.world_size, len(shard_map.buffers), shard_map.is_exact)


def _matplotlib() -> Any:
    try:
        import matplotlib as mpl
        from matplotlib import figure
    except ImportError as error:
        raise CheckpointError(f"plot needs matplotlib, which can't be imported ({error}): pip install 'paddle_fsdp_ckpt[plot]'") from error
    del figure
    return mpl


@dataclass(frozen=True)
class _Run:
    """Neighbours in a buffer that are drawn as one."""

    label: str
    range: Range
    parameters: int = 1

    @property
    def text(self) -> str:
        return self.label if self.parameters == 1 else f"{self.label}  ({counted(self.parameters, 'parameter')})"


def _draw(shard_map: ShardMap) -> Any:
    from matplotlib.figure import Figure

    rows = sorted(shard_map.buffers, key=_total, reverse=True)[:_MOST_ROWS]
    rows = [one for one in shard_map.buffers if one in rows]
    runs = [list(_runs(one)) for one in rows]
    sizes: Counter[str] = Counter()
    for row, some in zip(rows, runs, strict=True):
        for run in some:
            sizes[run.label] += run.range.numel * len(row.copies) * (row.nbytes // row.numel)
    colors = dict(zip((label for label, _ in sizes.most_common(len(_COLORS))), _COLORS, strict=False))
    top, bottom = 1.0, 0.3 + 0.2 * math.ceil((len(colors) + 2) / _LEGEND_COLUMNS)
    height = top + bottom + _ROW_INCHES * len(rows)
    figure = Figure(figsize=(_WIDTH_INCHES, height))
    box = (_MAP_LEFT, bottom / height, _MAP_RIGHT - _MAP_LEFT, 1 - (top + bottom) / height)
    axes = figure.add_axes(box)
    for number, (row, some) in enumerate(zip(rows, runs, strict=True)):
        _draw_row(axes, number, row, some, colors)
        _describe_row(axes, number, row, len({one.dtype for one in shard_map.buffers}) > 1, _total(row) / max(map(_total, rows)))
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.axis("off")
    if shard_map.is_exact:
        _draw_ranks(axes, shard_map.world_size)
    _draw_title(figure, shard_map, len(rows), height)
    _draw_legend(figure, colors, sizes, shard_map.is_exact)
    return figure


def _runs(row: BufferMap) -> Iterator[_Run]:
    """Yield what is drawn as one: each parameter, or many that differ in a number only, such as experts."""
    patterns = [pattern_of(row.name, place.name) for place in row.places]
    shortened = [_up_to_number(pattern) for pattern in patterns]
    counts = Counter(shortened)
    run: _Run | None = None
    for place, pattern, short in zip(row.places, patterns, shortened, strict=True):
        label = short if counts[short] > _FEW else pattern
        if run is not None and run.label == label:
            run = _Run(label, Range(run.range.start, place.range.stop), run.parameters + 1)
            continue
        if run is not None:
            yield run
        run = _Run(label, place.range)
    if run is not None:
        yield run


def _up_to_number(pattern: str) -> str:
    head, star, _ = pattern.partition("*")
    return f"{head}*" if star else pattern


def _draw_row(axes: Any, number: int, row: BufferMap, runs: list[_Run], colors: dict[str, str]) -> None:
    from matplotlib.patches import Rectangle

    low, high = number - 0.34, 0.68
    axes.add_patch(Rectangle((0, low), 1, high, facecolor="white", edgecolor="#777777", hatch="//////", linewidth=0.6))
    for run in runs:
        start, width = run.range.start / row.numel, run.range.numel / row.numel
        color = colors.get(run.label, _OTHERS)
        axes.add_patch(Rectangle((start, low), width, high, facecolor=color, edgecolor="white", linewidth=0.4 if width > _VISIBLE else 0))
        text = next((text for text in (run.text, run.label) if len(text) * _CHARACTER < width), None)
        if text is not None:
            ink = "white" if color in _DARK else _INK
            # Its background keeps the lines of the cuts out of it.
            around = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
            axes.text(start + width / 2, number, text, ha="center", va="center", fontsize=8, color=ink, bbox=around, zorder=5)
    cuts = _cuts(row)
    for cut in cuts:
        width = 0.8 if len(cuts) < _MANY_CUTS else 0.4
        axes.plot([cut / row.numel] * 2, [low, low + high], color=_INK, linewidth=width, solid_capstyle="butt")
    axes.add_patch(Rectangle((0, low), 1, high, fill=False, edgecolor=_INK, linewidth=0.8))
    if row.shard_numel is None:
        for rank, part in _parts_of_ranks(row):
            if part.numel / row.numel > _VISIBLE_RANK:
                axes.text(
                    (part.start + part.stop) / 2 / row.numel, low - 0.02, f"rank {rank}", ha="center", va="bottom", fontsize=6.5, color=_INK
                )


def _parts_of_ranks(row: BufferMap) -> Iterator[tuple[int, Range]]:
    """Yield which rank keeps what of a buffer, in ascending order, neighbours of one rank together."""
    parts = sorted(
        (part.shift(place.range.start).start, part.shift(place.range.start).stop, rank)
        for place in row.places
        for rank, part in place.parts.items()
    )
    for rank, several in itertools.groupby(parts, key=lambda part: part[2]):
        all_of_them = list(several)
        yield rank, Range(all_of_them[0][0], all_of_them[-1][1])


def _cuts(row: BufferMap) -> set[int]:
    """Return where another rank's part begins."""
    if row.shard_numel is not None:
        return set(range(row.shard_numel, row.numel, row.shard_numel))
    return {place.range.start + part.start for place in row.places for part in place.parts.values() if part.start}


def _describe_row(axes: Any, number: int, row: BufferMap, with_dtype: bool, size: float) -> None:
    """Say beside a row what it is, with a bar as long as all buffers like it are large, compared with the largest."""
    from matplotlib.patches import Rectangle

    label = "\n".join(_in_lines(_row_label(row.copies)))
    axes.text(-0.008, number - 0.02, label, ha="right", va="center", fontsize=9, color=_INK)
    several = f"{len(row.copies)} x " if len(row.copies) > 1 else ""
    dtype = f" {row.dtype}" if with_dtype else ""
    padding = f"\npadding {_percent(row.padding / row.numel)}" if row.shard_numel is not None else ""
    text = f"{several}{size_text(row.nbytes)}{dtype}, {counted(len(row.places), 'parameter')}{padding}"
    axes.text(1.01, number - 0.06, text, ha="left", va="center", fontsize=7.5, color=_INK, linespacing=1.25)
    axes.add_patch(Rectangle((1.01, number + 0.29), 0.22 * size, 0.05, facecolor="#777777", edgecolor="none", clip_on=False))


def _row_label(names: Sequence[str]) -> str:
    """Return one name for units that differ in their numbers; a number alone, as in a ``Sequential``, would be taken for a rank's."""
    name = _common_name(names)
    return name if any(character.isalpha() for character in name) else f"layer {name}"


def _in_lines(label: str) -> list[str]:
    """Return a label in one line, or in two where it is long; of a line that is too long even so, the end."""
    dots = [place for place, character in enumerate(label) if character == "." and ".." not in label[place - 1 : place + 2]]
    if len(label) <= _LABEL_CHARACTERS or not dots:
        lines = [label]
    else:
        middle = min(dots, key=lambda place: abs(2 * place - len(label)))
        lines = [label[: middle + 1], label[middle + 1 :]]
    return [line if len(line) <= _LABEL_CHARACTERS else f"\N{HORIZONTAL ELLIPSIS}{line[1 - _LABEL_CHARACTERS :]}" for line in lines]


def _common_name(names: Sequence[str]) -> str:
    parts = list(zip(*(name.split(".") for name in names), strict=True))
    if len([part for part in parts if len(set(part)) > 1]) > 1:
        return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
    return ".".join(part[0] if len(set(part)) == 1 else f"{part[0]} ... {part[-1]}" for part in parts)


def _draw_ranks(axes: Any, world_size: int) -> None:
    """Draw a ruler above the rows: one field a rank."""
    from matplotlib.patches import Rectangle

    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, world_size) if world_size / step <= 32)
    for rank in range(world_size):
        shade = "#DDDDDD" if rank % 2 else "#F4F4F4"
        axes.add_patch(Rectangle((rank / world_size, -0.83), 1 / world_size, 0.3, facecolor=shade, edgecolor="none", clip_on=False))
        if rank % every == 0:
            axes.text((rank + 0.5) / world_size, -0.68, str(rank), ha="center", va="center", fontsize=8, color=_INK)
    axes.text(-0.008, -0.68, "rank", ha="right", va="center", fontsize=9, color=_INK)


def _draw_title(figure: Any, shard_map: ShardMap, shown: int, height: float) -> None:
    ranks = counted(shard_map.world_size, "rank")
    step = "" if shard_map.step is None else f", step {shard_map.step}"
    figure.text(0.015, 1 - 0.28 / height, f"{shard_map.path.name}: parameters on {ranks}{step}", fontsize=13, va="center", color=_INK)
    if shard_map.is_exact:
        text = (
            "One row is a flat buffer, end to end. Black lines are where it is cut: each rank keeps the part below its number. "
            "The bars at the right compare the rows' sizes."
        )
    else:
        text = _NOT_EXACT[0].upper() + _NOT_EXACT[1:] + ". Black lines are where another rank's part begins."
    left_out = len(shard_map.buffers) - shown
    text += f" {counted(left_out, 'smaller row is', 'smaller rows are')} left out." if left_out else ""
    figure.text(0.015, 1 - 0.56 / height, text, fontsize=9, va="center", color="#555555")


def _draw_legend(figure: Any, colors: dict[str, str], sizes: Counter[str], with_padding: bool) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=color, label=f"{label}  ({size_text(sizes[label])})") for label, color in colors.items()]
    rest = [size for label, size in sizes.items() if label not in colors]
    if rest:
        entries.append(Patch(facecolor=_OTHERS, label=f"{counted(len(rest), 'other')}  ({size_text(sum(rest))})"))
    if with_padding:
        entries.append(Patch(facecolor="white", edgecolor="#777777", hatch="//////", label="padding"))
    figure.legend(handles=entries, loc="lower left", bbox_to_anchor=(0.01, 0.01), ncols=_LEGEND_COLUMNS, fontsize=8.5, frameon=False)


def _total(row: BufferMap) -> int:
    return row.nbytes * len(row.copies)


def _percent(part: float) -> str:
    return "none" if part == 0 else f"{100 * part:.2g} %" if part >= 1e-4 else "below 0.01 %"
