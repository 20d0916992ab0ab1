"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(nbytes: int) -> str:
    """Return a number of bytes in three digits or so, in powers of 1,000."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table; columns whose numbers are in ``right`` are aligned there."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        cells = [cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
