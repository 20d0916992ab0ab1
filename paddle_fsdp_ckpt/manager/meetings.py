"""Where the ranks of one manager meet, call after call."""

from __future__ import annotations

from collections.abc import Callable

from ..meeting import open_meeting
from ..storage.agreement import Rendezvous, exchange
from ..storage.json_values import JsonValue
from .mailboxes import Mailboxes


class Meetings:
    """The ranks of a manager. All must make one, and call its methods alike.

    Attributes:
        store: what they share.
        token: unique for this manager in the life of the job, the same on all ranks.
        rendezvous: the ranks, in the thread that trains.
        timeout_seconds: how long to wait for the slowest rank at each point where ranks wait for each other.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.store, self.token = open_meeting("CheckpointManager", None, ())
        self.rendezvous: Rendezvous = Mailboxes(self.store, f"{self.token}/main")
        self._background: Rendezvous | None = None
        self._count = 0

    def in_background(self) -> Rendezvous:
        """Return the ranks, over a connection that no other thread than the one that saves uses; made at the first call."""
        if self._background is None:
            self._background = Mailboxes(self.store.with_own_connection(), f"{self.token}/background")
        return self._background

    def next_token(self, what: str) -> str:
        """Return a token for one more thing that the ranks do together."""
        self._count += 1
        return f"{self.token}/{self._count}/{what}"

    def meet(self, what: str, produce: Callable[[], JsonValue], decide: Callable[[list[JsonValue]], JsonValue]) -> JsonValue:
        """Let every rank do its part, and rank 0 decide; see :func:`~paddle_fsdp_ckpt.storage.agreement.exchange`."""
        return exchange(self.rendezvous, self.next_token(what), produce, decide, self.timeout_seconds)
