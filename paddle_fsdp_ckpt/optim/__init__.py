"""Optimizers on sharded models: what they keep, and how they step."""

from .binding import bind_optimizer, binding_of, check_optimizer, optimizer_shards, parameter_groups
from .catalog import CATALOG, OptimizerEntry, StateKind, entry_of

__all__ = [
    "CATALOG",
    "OptimizerEntry",
    "StateKind",
    "bind_optimizer",
    "binding_of",
    "check_optimizer",
    "entry_of",
    "optimizer_shards",
    "parameter_groups",
]
