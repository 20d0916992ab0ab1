"""Our runtime: how a model's parameters become flat buffers, cut over the ranks, and stay trainable; and a reader of Paddle's own."""

from .aliases import Joined, joined_to
from .communication import AllToAllRoom, Communicator
from .known_sums import KnownSums
from .live_buffer import LiveBuffer
from .paddle_runtime import PaddleRuntime, paddle_group, paddle_runtime, paddle_runtime_of
from .parameter import ShardedParameter, is_elementwise_regularizer
from .parameter_shard import ParameterShard
from .runtime import GradientReduction, Runtime, runtime_of
from .sharded_weights import elementwise, replicated
from .sharding import check_model, local_parameters, shard_model, unshard_model
from .tensors import (
    TensorFacts,
    dtype_name,
    dtype_names,
    facts_of,
    few_at_a_time,
    is_lazy,
    lie_on_host,
    names_of_dtypes,
    row_by_row,
    why_without_values,
)
from .topology import default_ranks
from .unit import Unit
from .units import check_names, named_buffers, named_parameters, walk

__all__ = [
    "AllToAllRoom",
    "Communicator",
    "GradientReduction",
    "Joined",
    "KnownSums",
    "LiveBuffer",
    "PaddleRuntime",
    "ParameterShard",
    "Runtime",
    "ShardedParameter",
    "TensorFacts",
    "Unit",
    "check_model",
    "check_names",
    "default_ranks",
    "dtype_name",
    "dtype_names",
    "elementwise",
    "facts_of",
    "few_at_a_time",
    "is_elementwise_regularizer",
    "is_lazy",
    "joined_to",
    "lie_on_host",
    "local_parameters",
    "named_buffers",
    "named_parameters",
    "names_of_dtypes",
    "paddle_group",
    "paddle_runtime",
    "paddle_runtime_of",
    "replicated",
    "row_by_row",
    "runtime_of",
    "shard_model",
    "unshard_model",
    "walk",
    "why_without_values",
]
