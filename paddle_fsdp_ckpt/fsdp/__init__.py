"""Our runtime: how a model's parameters become flat buffers, cut over the ranks, and stay trainable."""

from .communication import Communicator, default_group
from .parameter import ShardedParameter
from .runtime import GradientReduction, Runtime, runtime_of
from .sharding import check_model, local_parameters, shard_model
from .unit import LiveBuffer, ParameterShard, Unit, dtype_name
from .units import named_buffers, named_parameters

__all__ = [
    "Communicator",
    "GradientReduction",
    "LiveBuffer",
    "ParameterShard",
    "Runtime",
    "ShardedParameter",
    "Unit",
    "check_model",
    "default_group",
    "dtype_name",
    "local_parameters",
    "named_buffers",
    "named_parameters",
    "runtime_of",
    "shard_model",
]
