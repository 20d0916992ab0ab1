"""Optimizers on sharded models: what they keep, and how they step."""

from .binding import bind_optimizer, binding_of, check_optimizer, optimizer_list, optimizer_shards, parameter_groups
from .catalog import CATALOG, OptimizerEntry, StateKind, entry_of
from .fused import split_weight_decay
from .registry import (
    OptimizerState,
    SteppedParameter,
    WholeParameter,
    check_bound,
    create_states,
    drop_states,
    init_optimizer_state,
    optimizer_states,
    states_restored_on_error,
)
from .schedule import describe_learning_rate, restore_learning_rate

__all__ = [
    "CATALOG",
    "OptimizerEntry",
    "OptimizerState",
    "StateKind",
    "SteppedParameter",
    "WholeParameter",
    "bind_optimizer",
    "binding_of",
    "check_bound",
    "check_optimizer",
    "create_states",
    "describe_learning_rate",
    "drop_states",
    "entry_of",
    "init_optimizer_state",
    "optimizer_list",
    "optimizer_shards",
    "optimizer_states",
    "parameter_groups",
    "restore_learning_rate",
    "split_weight_decay",
    "states_restored_on_error",
]
