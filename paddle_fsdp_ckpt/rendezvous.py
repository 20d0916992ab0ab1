"""Where the ranks of a job meet when they save and load: the job's TCPStore, which a dead or slow rank can't block."""

from __future__ import annotations

import itertools
import os
import socket
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import paddle.distributed as dist
from paddle.base import core

from .storage.polling import look_until_there


class StoreRendezvous:
    """A :class:`~paddle_fsdp_ckpt.storage.agreement.Rendezvous` over the TCPStore that Paddle made for the job."""

    def __init__(self, rank: int, world_size: int, store: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = core.create_or_get_global_tcp_store() if store is None else store
        _send_without_delay({address[1] for address in _master_addresses()})

    def with_own_connection(self) -> StoreRendezvous:
        """Return the same ranks' rendezvous over a new connection, for another thread.

        A connection of Paddle 3.3.1's store mixes up the answers of two threads that use it at once, and Paddle itself uses the job's one.

        Raises:
            ConnectionError: the store can't be reached, or its address is not in the environment.
        """
        for host, port in _master_addresses():
            with _named_errors():
                # A world of 0: nobody waits for this connection.
                return StoreRendezvous(self.rank, self.world_size, core.TCPStore(host, port, False, 0))
        raise ConnectionError("PADDLE_MASTER, MASTER_ADDR and PADDLE_TRAINER_ENDPOINTS don't say where the job's store listens; set one")

    def count(self, key: str, amount: int) -> int:
        """Add to the number under ``key``, 0 at first, and return the sum.

        Raises:
            ConnectionError: the store is gone.
        """
        with _named_errors():
            return int(self._store.add(key, amount))

    def write(self, key: str, value: bytes) -> None:
        """Set ``key``, set before or not.

        Raises:
            ConnectionError: the store is gone.
        """
        with _named_errors():
            self._store.set(key, value)

    def read(self, key: str) -> bytes:
        """Return what is under ``key`` now; it must be set.

        Raises:
            ConnectionError: the store is gone.
        """
        with _named_errors():
            return bytes(self._store.get(key))

    def put(self, key: str, value: bytes) -> None:
        """Set ``key``, which is not set yet.

        Raises:
            ConnectionError: the store is gone.
        """
        # The counter is set second, so that whoever sees it finds the value.
        with _named_errors():
            self._store.set(key, value)
            self._store.add(f"{key}/there", 1)

    def get(self, key: str, timeout_seconds: float) -> bytes:
        """Return what some rank put under ``key``, as soon as it is there.

        Raises:
            TimeoutError: it was not there in time.
            ConnectionError: the store is gone.
        """
        if look_until_there(lambda: self._is_there(key) or None, timeout_seconds) is None:
            raise TimeoutError(f"nothing under '{key}' after {timeout_seconds:g} s")
        with _named_errors():
            return bytes(self._store.get(key))

    def forget(self, key: str) -> None:
        """Free the memory of what was put under ``key``; Paddle's store can't forget the key itself."""
        with _named_errors():
            self._store.set(key, b"")

    def _is_there(self, key: str) -> bool:
        with _named_errors():
            return bool(self._store.add(f"{key}/there", 0))


@contextmanager
def _named_errors() -> Iterator[None]:
    """Say what it means where the store is gone: Paddle raises a ValueError with a C++ stack trace as soon as its process is dead."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        last_line = str(error).strip().rpartition("\n")[2].strip()
        raise ConnectionError(
            "the job's store, which lives in the process of the job's first rank, can't be reached: that process was killed or has ended "
            f"({last_line})"
        ) from error


def _master_addresses() -> list[tuple[str, int]]:
    """Return host and port where, by the environment that Paddle's launcher sets, the job's store may listen; the likeliest first."""
    endpoints = [
        f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}",
        os.environ.get("PADDLE_MASTER", ""),
        os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").partition(",")[0],
    ]
    pairs = [endpoint.rpartition(":")[::2] for endpoint in endpoints]
    return [(host, int(port)) for host, port in pairs if host and port.isdigit()]


def _send_without_delay(ports: Collection[int]) -> None:
    """Set TCP_NODELAY on this process's connections to the job's store.

    Paddle 3.3.1's client sends a request in several small parts and does not set it, so that each request waits 40 ms for a delayed
    acknowledgement (measured: 46 ms for an ``add``, 0.09 ms afterwards). Where the connection is not found, it only stays slow.
    """
    with suppress(OSError):  # No /proc, or no access to it.
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # A descriptor closed meanwhile, no socket, or one that is not connected.
                if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] in ports:
                            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class OneRank:
    """The rendezvous of a rank that is alone."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counts: defaultdict[str, int] = defaultdict(int)

    def put(self, key: str, value: bytes) -> None:
        """Set ``key``."""
        self._values[key] = value

    def forget(self, key: str) -> None:
        """Free the memory of what was put under ``key``."""
        self._values.pop(key, None)

    def with_own_connection(self) -> OneRank:
        """Return another one: there is nobody to meet."""
        return OneRank()

    def count(self, key: str, amount: int) -> int:
        """Add to the number under ``key``, 0 at first, and return the sum."""
        self._counts[key] += amount
        return self._counts[key]

    def write(self, key: str, value: bytes) -> None:
        """Set ``key``, set before or not."""
        self._values[key] = value

    def read(self, key: str) -> bytes:
        """Return what is under ``key``; it must be set."""
        return self._values[key]

    def get(self, key: str, timeout_seconds: float) -> bytes:
        """Return what was put under ``key``.

        Raises:
            TimeoutError: nothing was, and nobody else could.
        """
        if key not in self._values:
            raise TimeoutError(f"nothing under '{key}', and no other rank to put it there")
        return self._values[key]


# The store lives as long as the job, so each use of it in a job needs its own keys, the same on all ranks of a group.
_USES: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


def open_rendezvous(ranks: Sequence[int]) -> tuple[StoreRendezvous | OneRank, str]:
    """Return the rendezvous of some of the job's ranks, this one among them, and a token that no other use of it in the job has.

    All of them must call this equally often. Fewer than two are this process alone.
    """
    if len(ranks) < 2:
        return OneRank(), "alone"
    who = "-".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"
    return StoreRendezvous(ranks.index(dist.get_rank()), len(ranks)), f"paddle_fsdp_ckpt/{who}/{next(_USES[who])}"
