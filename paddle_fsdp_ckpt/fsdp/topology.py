"""Over which ranks a model is cut, and over which it is replicated, where the caller or fleet says so."""

from __future__ import annotations

import os
from typing import Any

import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from ..errors import ShardingError
from .communication import Communicator


def open_communicator(group: Group | None, replicate_group: Group | None) -> Communicator:
    """Return the ranks that train a model.

    Args:
        group: as for ``fully_shard``.
        replicate_group: as for ``fully_shard``.

    Raises:
        ShardingError: as :func:`default_group` and :class:`~.communication.Communicator`; or ranks of fleet would be left out.
    """
    check_fleet()
    hybrid = _fleet_topology()
    replicas = 1 if hybrid is None else hybrid.get_data_parallel_world_size()
    if replicas > 1 and replicate_group is None:
        sharding_group = hybrid.get_sharding_parallel_group()
        if group is None and sharding_group.nranks == 1:
            raise ShardingError(
                f"fleet was set up with dp_degree={replicas} and sharding_degree=1, so nothing would be sharded; give ranks to "
                "sharding_degree, or say group= and replicate_group="
            )
        if group is None or list(group.ranks) == list(sharding_group.ranks):
            return Communicator(sharding_group, hybrid.get_data_parallel_group())
        if group.nranks < dist.get_world_size():
            raise ShardingError(
                f"fleet was set up with dp_degree={replicas}, and ranks {list(group.ranks)} are neither its sharding group nor all ranks; "
                "say which ranks are to keep the same shards by replicate_group="
            )
    if group is None and replicate_group is not None:
        raise ShardingError("replicate_group needs group, which says over which ranks each replica is sharded")
    return Communicator(default_group() if group is None else group, replicate_group)


def default_group() -> Group | None:
    """Return fleet's sharding group where fleet shards, else the group of all ranks; None without a process group.

    Raises:
        ShardingError: fleet was set up with another kind of parallelism, see :func:`check_fleet`; or the process is one of several that
            ``paddle.distributed.launch`` started, and doesn't know of the others.
    """
    check_fleet()
    if not dist.is_initialized():
        started = os.environ.get("PADDLE_TRAINERS_NUM", "1")
        if started not in ("", "0", "1"):
            raise ShardingError(
                f"this is one of {started} processes (PADDLE_TRAINERS_NUM), and has no process group, so each would train and save a model "
                "of its own; call paddle.distributed.init_parallel_env() first"
            )
        return None
    hybrid = _fleet_topology()
    if hybrid is not None and hybrid.get_sharding_parallel_world_size() > 1:
        return hybrid.get_sharding_parallel_group()
    return dist.get_group(0)


def default_ranks() -> tuple[int, ...]:
    """Return the ranks that save or load together what is not sharded: all of the job; none without a process group.

    Raises:
        ShardingError: as :func:`default_group`.
    """
    return () if default_group() is None else tuple(dist.get_group(0).ranks)


def check_fleet() -> None:
    """Raise where fleet was set up with another kind of parallelism than sharding and data parallelism.

    Raises:
        ShardingError: ranks outside the sharding group would hold other parameters under the same names, or other parts of a sample.
    """
    hybrid = _fleet_topology()
    if hybrid is None:
        return
    degrees = {
        "mp_degree": hybrid.get_model_parallel_world_size(),
        "pp_degree": hybrid.get_pipe_parallel_world_size(),
        "sep_degree": hybrid.get_sep_parallel_world_size(),
    }
    for name, degree in degrees.items():
        if degree > 1:
            raise ShardingError(
                f"fleet was set up with {name}={degree}, which is not supported together with fully_shard yet; "
                "give all ranks to sharding_degree and dp_degree"
            )


def _fleet_topology() -> Any:
    from paddle.distributed import fleet

    return getattr(fleet.fleet, "_hcg", None)
