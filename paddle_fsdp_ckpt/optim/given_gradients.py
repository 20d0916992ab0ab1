"""The gradients that ``apply_gradients`` of a bound optimizer is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import paddle

from ..errors import ShardingError
from ..fsdp import ParameterShard
from ..fsdp.tensors import dtype_name
from .clipping import Pairs


def check_given_gradients(optimizer: Any, given: Iterable[tuple[Any, paddle.Tensor | None]], shards: Sequence[ParameterShard]) -> Pairs:
    """Return those (parameter, gradient) pairs of which this rank keeps a piece, without those that have no gradient.

    Args:
        optimizer: the one that is to step.
        given: what the user gave it.
        shards: its parameters.

    Raises:
        ShardingError: a parameter is not the optimizer's, or a gradient not this rank's piece of it, 1-D, as ``p.grad`` is.
    """
    own = {id(shard.parameter): shard for shard in shards}
    pairs: Pairs = []
    for parameter, gradient in given:
        call = f"{type(optimizer).__name__}.apply_gradients"
        shard = own.get(id(parameter))
        if shard is None:
            raise ShardingError(f"{call}: {parameter.name} is not among the parameters of this optimizer")
        if gradient is None:
            continue
        dtypes = shard.buffer.layout.gradient_dtype, shard.buffer.layout.dtype
        if list(gradient.shape) != [shard.range.numel] or dtype_name(gradient) not in dtypes:
            raise ShardingError(
                f"{call}: {shard.describe()} was given a gradient of shape {list(gradient.shape)} and dtype {dtype_name(gradient)}; "
                f"give this rank's piece, shape [{shard.range.numel}], in {dtypes[0]}, as p.grad and opt.backward(loss) are after "
                "loss.backward(). What paddle.grad returns is whole, and not reduced over the ranks"
            )
        if shard.range.numel:
            pairs.append((parameter, gradient))
    return pairs
