"""How a model and its optimizers are kept: plain on every rank, cut by our runtime, or by Paddle's own.

What differs between these for state dicts, ``save`` and ``load`` is here, and nowhere else.
"""

from .cut_by_us import CutByUs
from .finding import init_states, ranks_of, sharding_of, sharding_of_optimizers, states_of
from .live_places import LivePlaces, SuffixedNames
from .plain import Plain
from .sharding import FlatShard, LiveTables, Sharding, StateLoad

__all__ = [
    "CutByUs",
    "FlatShard",
    "LivePlaces",
    "LiveTables",
    "Plain",
    "Sharding",
    "StateLoad",
    "SuffixedNames",
    "init_states",
    "ranks_of",
    "sharding_of",
    "sharding_of_optimizers",
    "states_of",
]
