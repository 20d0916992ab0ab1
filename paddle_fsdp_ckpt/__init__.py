"""Save, resume, reshard and export PaddlePaddle FullyShard training.

Public names are imported at their first use, so that what works without Paddle does not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .errors import (
        CheckpointError,
        CorruptCheckpointError,
        IncompleteCheckpointError,
        MismatchError,
        NewerFormatError,
        RankFailedError,
        ShardingError,
        TargetExistsError,
        UnboundOptimizerError,
        UnsafeCheckpointError,
        UnsupportedOptimizerError,
    )
    from .fsdp import local_parameters
    from .loading import LoadReport, load
    from .optim import bind_optimizer, split_weight_decay
    from .requirements import PaddleRequiredError
    from .saving import save
    from .state_dict import init_optimizer_state, optimizer_sharded_state_dict, sharded_state_dict
    from .training import fully_shard

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "IncompleteCheckpointError",
    "LoadReport",
    "MismatchError",
    "NewerFormatError",
    "PaddleRequiredError",
    "RankFailedError",
    "ShardingError",
    "TargetExistsError",
    "UnboundOptimizerError",
    "UnsafeCheckpointError",
    "UnsupportedOptimizerError",
    "__version__",
    "bind_optimizer",
    "fully_shard",
    "init_optimizer_state",
    "load",
    "local_parameters",
    "optimizer_sharded_state_dict",
    "save",
    "sharded_state_dict",
    "split_weight_decay",
]

_MODULES = {
    "CheckpointError": "errors",
    "CorruptCheckpointError": "errors",
    "IncompleteCheckpointError": "errors",
    "LoadReport": "loading",
    "MismatchError": "errors",
    "TargetExistsError": "errors",
    "NewerFormatError": "errors",
    "PaddleRequiredError": "requirements",
    "RankFailedError": "errors",
    "ShardingError": "errors",
    "UnboundOptimizerError": "errors",
    "UnsafeCheckpointError": "errors",
    "UnsupportedOptimizerError": "errors",
    "bind_optimizer": "optim",
    "fully_shard": "training",
    "init_optimizer_state": "state_dict",
    "load": "loading",
    "local_parameters": "fsdp",
    "optimizer_sharded_state_dict": "state_dict",
    "save": "saving",
    "sharded_state_dict": "state_dict",
    "split_weight_decay": "optim",
}
"""Where each public name lives."""

_NEED_PADDLE = {"fsdp", "loading", "optim", "saving", "state_dict", "training"}


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
