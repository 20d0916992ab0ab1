"""Optimizers on sharded models: what they keep, and how they step."""

from .aliases import check_holds_alike
from .binding import (
    bind_optimizer,
    binding_of,
    bound_optimizers,
    check_optimizer,
    optimizer_shards,
    unbind_optimizer,
)
from .binding_checks import check_is_optimizer
from .catalog import CATALOG, OptimizerEntry, StateKind, entry_of, register_optimizer
from .fused_decay import split_weight_decay
from .fused_others import let_masters_follow
from .fused_repair import PaddleRepair, repair_paddle_runtime
from .given_states import take_up_given_states
from .gradient_norm import clip_grad_norm_
from .hyperparameters import describe_hyperparameters, differences
from .loss_scaling import bind_grad_scaler, describe_grad_scaler, restore_grad_scaler, warn_of_pending_update
from .parameters import SteppedParameter, WholeParameter, optimizer_list, parameter_groups, whole_parameters
from .registry import (
    OptimizerState,
    StateColumn,
    check_bound,
    create_states,
    drop_states,
    init_optimizer_state,
    keeps_states,
    note_states,
    optimizer_states,
    replace_states,
    state_columns,
    states_restored_on_error,
)
from .schedule import (
    describe_learning_rate,
    describe_scheduler,
    restore_learning_rate,
    restore_scheduler,
    say_learning_rate,
    schedule_of,
    takes_learning_rate,
)

__all__ = [
    "CATALOG",
    "OptimizerEntry",
    "OptimizerState",
    "PaddleRepair",
    "StateColumn",
    "StateKind",
    "SteppedParameter",
    "WholeParameter",
    "bind_grad_scaler",
    "bind_optimizer",
    "binding_of",
    "bound_optimizers",
    "check_bound",
    "check_holds_alike",
    "check_is_optimizer",
    "check_optimizer",
    "clip_grad_norm_",
    "create_states",
    "describe_grad_scaler",
    "describe_hyperparameters",
    "describe_learning_rate",
    "describe_scheduler",
    "differences",
    "drop_states",
    "entry_of",
    "init_optimizer_state",
    "keeps_states",
    "let_masters_follow",
    "note_states",
    "optimizer_list",
    "optimizer_shards",
    "optimizer_states",
    "parameter_groups",
    "register_optimizer",
    "repair_paddle_runtime",
    "replace_states",
    "restore_grad_scaler",
    "restore_learning_rate",
    "restore_scheduler",
    "say_learning_rate",
    "schedule_of",
    "split_weight_decay",
    "state_columns",
    "states_restored_on_error",
    "take_up_given_states",
    "takes_learning_rate",
    "unbind_optimizer",
    "warn_of_pending_update",
    "whole_parameters",
]
