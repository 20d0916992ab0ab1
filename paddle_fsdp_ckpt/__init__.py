"""Save, resume, reshard and export PaddlePaddle FullyShard training.

Public names are imported at their first use, so that what works without Paddle does not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .averaging import update_average
    from .errors import (
        CheckpointError,
        CorruptCheckpointError,
        IncompleteCheckpointError,
        MismatchError,
        NewerFormatError,
        RankFailedError,
        ReplacedCheckpointError,
        ShardingError,
        TargetExistsError,
        UnboundOptimizerError,
        UnsafeCheckpointError,
        UnsupportedOptimizerError,
    )
    from .fsdp import local_parameters
    from .gather import full_state_dict, iter_full_parameters, parameter_versions
    from .gather_states import full_optimizer_state_dict
    from .huggingface_loading import load_huggingface
    from .huggingface_report import HuggingFaceLoadReport
    from .loading import LoadReport, load
    from .manager import CheckpointEvent, CheckpointManager, KeepBest, KeepEvery, KeepLast, KeepNewestOfEach, RestoreReport
    from .optim import bind_grad_scaler, bind_optimizer, clip_grad_norm_, register_optimizer, repair_paddle_runtime, split_weight_decay
    from .requirements import PaddleRequiredError
    from .saving import save
    from .scatter import load_full_state_dict
    from .state_dict import init_optimizer_state, optimizer_sharded_state_dict, sharded_state_dict
    from .storage.salvage import SalvageReport, salvage
    from .storage.verify import VerifyReport, verify
    from .training import drop_submodules, fully_shard
    from .unsharding import unshard

__all__ = [
    "CheckpointError",
    "CheckpointEvent",
    "CheckpointManager",
    "CorruptCheckpointError",
    "HuggingFaceLoadReport",
    "IncompleteCheckpointError",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNewestOfEach",
    "LoadReport",
    "MismatchError",
    "NewerFormatError",
    "PaddleRequiredError",
    "RankFailedError",
    "ReplacedCheckpointError",
    "RestoreReport",
    "SalvageReport",
    "ShardingError",
    "TargetExistsError",
    "UnboundOptimizerError",
    "UnsafeCheckpointError",
    "UnsupportedOptimizerError",
    "VerifyReport",
    "__version__",
    "bind_grad_scaler",
    "bind_optimizer",
    "clip_grad_norm_",
    "drop_submodules",
    "full_optimizer_state_dict",
    "full_state_dict",
    "fully_shard",
    "init_optimizer_state",
    "iter_full_parameters",
    "load",
    "load_full_state_dict",
    "load_huggingface",
    "local_parameters",
    "optimizer_sharded_state_dict",
    "parameter_versions",
    "register_optimizer",
    "repair_paddle_runtime",
    "salvage",
    "save",
    "sharded_state_dict",
    "split_weight_decay",
    "unshard",
    "update_average",
    "verify",
]

_MODULES = {
    "CheckpointEvent": "manager",
    "CheckpointManager": "manager",
    "KeepBest": "manager",
    "KeepEvery": "manager",
    "KeepLast": "manager",
    "KeepNewestOfEach": "manager",
    "RestoreReport": "manager",
    "CheckpointError": "errors",
    "CorruptCheckpointError": "errors",
    "HuggingFaceLoadReport": "huggingface_report",
    "IncompleteCheckpointError": "errors",
    "LoadReport": "loading",
    "MismatchError": "errors",
    "TargetExistsError": "errors",
    "NewerFormatError": "errors",
    "PaddleRequiredError": "requirements",
    "RankFailedError": "errors",
    "ReplacedCheckpointError": "errors",
    "ShardingError": "errors",
    "UnboundOptimizerError": "errors",
    "UnsafeCheckpointError": "errors",
    "UnsupportedOptimizerError": "errors",
    "bind_grad_scaler": "optim",
    "bind_optimizer": "optim",
    "clip_grad_norm_": "optim",
    "drop_submodules": "training",
    "fully_shard": "training",
    "load_full_state_dict": "scatter",
    "load_huggingface": "huggingface_loading",
    "iter_full_parameters": "gather",
    "parameter_versions": "gather",
    "full_state_dict": "gather",
    "full_optimizer_state_dict": "gather_states",
    "init_optimizer_state": "state_dict",
    "load": "loading",
    "local_parameters": "fsdp",
    "optimizer_sharded_state_dict": "state_dict",
    "repair_paddle_runtime": "optim",
    "register_optimizer": "optim",
    "SalvageReport": "storage.salvage",
    "VerifyReport": "storage.verify",
    "salvage": "storage.salvage",
    "save": "saving",
    "sharded_state_dict": "state_dict",
    "split_weight_decay": "optim",
    "unshard": "unsharding",
    "update_average": "averaging",
    "verify": "storage.verify",
}
"""Where each public name lives."""

_NEED_PADDLE = {
    "averaging",
    "fsdp",
    "gather",
    "gather_states",
    "huggingface_loading",
    "loading",
    "manager",
    "optim",
    "saving",
    "scatter",
    "state_dict",
    "training",
    "unsharding",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module = _MODULES[name]
    if module in _NEED_PADDLE:
        from .requirements import require_paddle

        require_paddle(f"{__name__}.{name}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
