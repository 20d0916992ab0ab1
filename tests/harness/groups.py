"""Further groups of ranks on gloo, which Paddle 3.3.1 can't make by itself without failing now and then."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from .rank import this_rank

_STORES: list[Any] = []
"""Kept, as their groups use them."""


@contextmanager
def separate_stores() -> Iterator[None]:
    """Let each group of several ranks that is made inside the block meet at a store of its own.

    All gloo groups of a job use the same keys of the job's store (``"0"``, ``"1"``, ... for their ranks), so that one reads what an
    earlier one, or one that is made at the same time, wrote: connection refused, or ``136 vs 408`` bytes.
    """
    from paddle.base import core
    from paddle.distributed import collective

    make = collective._new_process_group_impl

    def make_apart(backend: str, store: Any, rank: int, world_size: int, group_name: str, *args: Any, **options: Any) -> Any:
        key = f"separate_stores/{group_name}"
        if rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            own = core.TCPStore("127.0.0.1", port, True, 1)
            store.set(key, str(port).encode())
        else:
            own = core.TCPStore("127.0.0.1", int(store.get(key)), False, 1)
        _STORES.append(own)
        return make(backend, own, rank, world_size, group_name, *args, **options)

    collective._new_process_group_impl = make_apart
    try:
        yield
    finally:
        collective._new_process_group_impl = make


@cache
def hybrid_groups(shards: int) -> dict[str, Any]:
    """Return this rank's groups as options of ``fully_shard``: ``shards`` neighbours share a model, and as many such groups train it."""
    import paddle.distributed as dist

    place = this_rank()
    replicas = place.world_size // shards
    with separate_stores():
        sharding = [dist.new_group([replica * shards + shard for shard in range(shards)]) for replica in range(replicas)]
        replicating = [dist.new_group([replica * shards + shard for replica in range(replicas)]) for shard in range(shards)]
    return {"group": sharding[place.rank // shards], "replicate_group": replicating[place.rank % shards]}
