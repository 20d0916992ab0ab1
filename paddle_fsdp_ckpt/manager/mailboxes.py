"""A rendezvous that needs a few keys for any number of messages: Paddle's store can't delete keys, and a run saves many times."""

from __future__ import annotations

from typing import Protocol

from ..storage.polling import look_until_there


class Store(Protocol):
    """What the ranks share."""

    @property
    def rank(self) -> int:
        """This rank, from 0 on."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    def count(self, key: str, amount: int) -> int:
        """Add to the number under ``key``, 0 at first, and return the sum."""
        ...

    def write(self, key: str, value: bytes) -> None:
        """Set ``key``, set before or not."""
        ...

    def read(self, key: str) -> bytes:
        """Return what is under ``key`` now; it must be set."""
        ...


class Mailboxes:
    """A :class:`~paddle_fsdp_ckpt.storage.agreement.Rendezvous` for one exchange after another of the same ranks.

    Each sender has one box for each kind of message, and a message takes the place of the one before, with the whole key of it written
    in front. That is safe because of how :func:`~paddle_fsdp_ckpt.storage.agreement.exchange` goes: a rank reports only after it heard the
    verdict before, and rank 0 gives a verdict only after all reports. A rank that comes too late, after the others gave up, finds another
    message, and gives up too.
    """

    def __init__(self, store: Store, name: str) -> None:
        """Make the boxes; ``name`` is unique in the life of the job for these exchanges, and the same on all ranks."""
        self._store = store
        self._name = name
        self._made: set[str] = set()
        self._seen: set[str] = set()

    @property
    def rank(self) -> int:
        """This rank, from 0 on."""
        return self._store.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._store.world_size

    def put(self, key: str, value: bytes) -> None:
        """Put a message into its box."""
        box = self._box(key)
        self._store.write(box, b"%s\n%s" % (key.encode(), value))
        if box not in self._made:
            self._store.count(f"{box}/there", 1)
            self._made.add(box)

    def get(self, key: str, timeout_seconds: float) -> bytes:
        """Return the message of this key, as soon as it is in its box; with a time-out of 0, look once.

        Raises:
            TimeoutError: it was not there in time.
        """
        value = look_until_there(lambda: self._look(key), timeout_seconds)
        if value is None:
            raise TimeoutError(f"nothing under '{key}' after {timeout_seconds:g} s")
        return value

    def _look(self, key: str) -> bytes | None:
        box = self._box(key)
        if box not in self._seen and not self._store.count(f"{box}/there", 0):
            return None
        self._seen.add(box)
        there, _, value = self._store.read(box).partition(b"\n")
        return value if there == key.encode() else None

    def forget(self, key: str) -> None:
        """Do nothing: the next message takes the place of this one."""

    def _box(self, key: str) -> str:
        """Return the store's key for messages of this kind: a sender's, that end in its rank, or the verdicts of rank 0."""
        start, _, last = key.rpartition("/")
        return f"{self._name}/{start.rpartition('/')[2]}/{last}" if last.isdigit() else f"{self._name}/{last}"
