"""The norm of all gradients of sharded models, and clipping by it between backward and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import paddle
from paddle import nn

from ..errors import CheckpointError, ShardingError, counted
from ..fsdp import ParameterShard, Runtime, ShardedParameter
from ..warn import warn_caller


def clip_grad_norm_(
    parameters: nn.Layer | paddle.Tensor | Iterable[paddle.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> paddle.Tensor:
    """Scale the gradients of a sharded model in place, so that their norm is at most ``max_norm``.

    As ``paddle.nn.utils.clip_grad_norm_`` does it of whole gradients. A collective operation: every rank must call it, between backward and
    step, with the same parameters. Scaled losses are unscaled before, by ``scaler.unscale_(opt)``. ``max_norm=math.inf`` only measures.

    Args:
        parameters: a model that our ``fully_shard`` sharded, or parameters of such models. Those without gradient don't count.
        max_norm: at most this.
        norm_type: p of the p-norm, above 0, or ``math.inf``.
        error_if_nonfinite: whether a norm that is infinite or no number is an error; else gradients are scaled by it.

    Returns:
        The norm of all gradients before, as one vector: float32 (float64 where a parameter is), shape [], the same on every rank.

    Raises:
        ShardingError: a parameter that our runtime didn't shard, or none at all.
        CheckpointError: the norm is not finite, and shall be. Nothing was changed.
        ValueError: a ``norm_type`` of 0 or below.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type!r}; give a number above 0, or math.inf")
    shards = _shards_of(parameters)
    if not shards:
        raise ShardingError("clip_grad_norm_: no parameters were given; give the model, or model.parameters()")
    for runtime in dict.fromkeys(shard.unit.runtime for shard in shards):
        runtime.settle_gradients()
    gradients = [(shard, gradient) for shard in shards if (gradient := shard.gradient()) is not None]
    warn_without_gradients("clip_grad_norm_", shards)
    with paddle.no_grad():
        norm = _norm(shards, gradients, norm_type)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise CheckpointError(
                f"clip_grad_norm_: the norm of the gradients is {norm.item()}; nothing was clipped. See which loss is not finite, or let "
                "error_if_nonfinite be False"
            )
        factor = paddle.clip(max_norm / (norm + 1e-6), max=1.0)
        for _, gradient in gradients:
            gradient.multiply_(factor.astype(gradient.dtype))
    return norm


def measure_gradients(
    shards: Sequence[ParameterShard],
    gradients: Iterable[tuple[ParameterShard, paddle.Tensor]],
    measure: Callable[[paddle.Tensor], paddle.Tensor],
) -> dict[Runtime, paddle.Tensor]:
    """Return one number of each parameter's gradient, as far as this rank has it, in one tensor for each runtime; 0 where there is none.

    One a parameter, so that what ranks make of them together doesn't depend on how pieces are cut into buffers.

    Args:
        shards: all parameters that may have gradients, on any rank.
        gradients: this rank's pieces.
        measure: called with a piece in float32, or in float64 where some parameter is; returns one number.
    """
    dtype = "float64" if any(shard.buffer.layout.dtype == "float64" for shard in shards) else "float32"
    runtimes = dict.fromkeys(shard.unit.runtime for shard in shards)
    measured = {runtime: paddle.zeros([len(runtime.shards)], dtype=dtype) for runtime in runtimes}
    for shard, gradient in gradients:
        measured[shard.unit.runtime][shard.index] = measure(gradient.astype(dtype))
    return measured


def warn_without_gradients(call: str, shards: Sequence[ParameterShard]) -> None:
    """Warn, once a model and on its first rank, where none of these parameters has a gradient on any rank.

    Args:
        call: what was called, and has reduced the gradients that were pending.
        shards: of which parameters.
    """
    if any(shard.has_gradient for shard in shards):
        return
    for runtime in dict.fromkeys(shard.unit.runtime for shard in shards):
        if not runtime.was_without_gradients and runtime.communicator.overall_rank == 0:
            warn_caller(
                f"{call}: none of its {counted(len(shards), 'parameter')} has a gradient on any rank, so it does nothing; is there a "
                "backward before it, of a loss that comes from this model, with parameters that are not frozen?"
            )
        runtime.was_without_gradients = True


def _shards_of(parameters: nn.Layer | paddle.Tensor | Iterable[paddle.Tensor]) -> list[ParameterShard]:
    """Return each shard once, in the order that is given."""
    if isinstance(parameters, nn.Layer):
        parameters = parameters.parameters()
    shards: dict[int, ParameterShard] = {}
    for one in [parameters] if isinstance(parameters, paddle.Tensor) else parameters:
        if hasattr(one, "_stays_whole"):  # a running statistic, which Paddle's layers keep among their parameters
            continue
        if not isinstance(one, ShardedParameter):
            raise ShardingError(
                f"clip_grad_norm_: '{getattr(one, 'name', one)}' is no parameter that fully_shard of this package sharded; for "
                "others there are paddle.nn.utils.clip_grad_norm_, and grad_clip= of the optimizer"
            )
        shards.setdefault(id(one._shard), one._shard)
    return list(shards.values())


def _norm(shards: Sequence[ParameterShard], gradients: Iterable[tuple[ParameterShard, paddle.Tensor]], norm_type: float) -> paddle.Tensor:
    if norm_type == math.inf:
        measured = measure_gradients(shards, gradients, lambda gradient: _largest(gradient.abs()))
        return _largest(paddle.concat([runtime.communicator.all_gather(parts) for runtime, parts in measured.items()]))
    measured = measure_gradients(shards, gradients, lambda gradient: gradient.abs().pow(norm_type).sum())
    sums = [runtime.communicator.sum_over_shards(parts).sum() for runtime, parts in measured.items()]
    return paddle.add_n(sums).pow(1.0 / norm_type)


def _largest(sizes: paddle.Tensor) -> paddle.Tensor:
    # Neither Paddle's max nor gloo's is sure to keep what is no number.
    return paddle.where(sizes.isnan().any(), paddle.full([], math.nan, sizes.dtype), sizes.max())
