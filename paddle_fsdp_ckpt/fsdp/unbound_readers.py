"""Optimizers and scalers that read gradients of a sharded model and are not bound to it: which of them do right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import paddle
from paddle import nn

from ..errors import UnboundOptimizerError

if TYPE_CHECKING:
    from .parameter_shard import ParameterShard


def check_unbound_reader(reader: object, shard: ParameterShard, *, is_shown: bool) -> None:
    """Raise where what reads a parameter's gradient would step parameters that hold no data, or pieces as if they were whole.

    Args:
        reader: who reads it.
        shard: the parameter.
        is_shown: whether it is this rank's piece at the moment.

    Raises:
        UnboundOptimizerError: it says what to bind.
    """
    if isinstance(reader, paddle.optimizer.Optimizer) and not _steps_pieces_right(reader):
        raise UnboundOptimizerError(
            f"{type(reader).__name__}: with its clip or its update it needs norms of whole gradients or parameters, and it is not "
            "bound to the model; call bind_optimizer(opt)"
        )
    if not is_shown:
        raise UnboundOptimizerError(
            f"{shard.describe()}: an optimizer or a GradScaler reads its gradient and is not bound; call bind_optimizer(opt) or "
            "bind_grad_scaler(scaler), or step inside `with paddle_fsdp_ckpt.local_parameters(model):`"
        )


def _steps_pieces_right(optimizer: paddle.optimizer.Optimizer) -> bool:
    """Tell whether an optimizer that is not bound steps pieces of parameters as it would step them whole."""
    groups = [group for group in optimizer._param_groups or [] if isinstance(group, dict)]
    clips = [optimizer._grad_clip, *(group.get("grad_clip") for group in groups)]
    by_value = all(clip is None or isinstance(clip, nn.ClipGradByValue) for clip in clips)
    return by_value and not isinstance(optimizer, (paddle.optimizer.Lamb, paddle.optimizer.LBFGS))
