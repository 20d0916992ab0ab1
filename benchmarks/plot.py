"""A plot of what was measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .results import Results


def plot(path: Path, results: Results) -> bool:
    """Draw seconds by operation and contender, from the least to the most; tell whether there was something to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return False
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "results"  # the same plot is the same file
    from matplotlib import pyplot

    good = [(f"{case.name}: {row.operation}", row) for case in results.cases.values() for row in case.rows if row.error is None]
    operations = list(dict.fromkeys(operation for operation, _ in good))
    contenders = list(dict.fromkeys(row.contender for _, row in good))
    figure, axes = pyplot.subplots(figsize=(10, 0.7 + 0.5 * len(operations)), layout="constrained")
    height = 0.8 / max(1, len(contenders))
    for number, contender in enumerate(contenders):
        places = [operations.index(operation) + number * height for operation, row in good if row.contender == contender]
        seconds = [row.seconds for _, row in good if row.contender == contender]
        axes.barh(places, [one.value for one in seconds], height, label=contender)
        spreads = [one.spread or (one.value, one.value) for one in seconds]
        axes.hlines(places, [least for least, _ in spreads], [most for _, most in spreads], "black", linewidth=0.7)
    axes.set_yticks([place + 0.4 for place in range(len(operations))], operations, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("seconds (logarithmic): median, least and most")
    axes.invert_yaxis()
    axes.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    return True
