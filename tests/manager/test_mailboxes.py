"""Any number of exchanges needs the same few keys, and nobody takes an old message for a new one."""

from __future__ import annotations

import threading

import pytest

from paddle_fsdp_ckpt.errors import RankFailedError
from paddle_fsdp_ckpt.manager.mailboxes import Mailboxes
from paddle_fsdp_ckpt.storage.agreement import exchange


class Memory:
    """A store in memory, of several threads, as one rank sees it."""

    def __init__(self, rank: int, world_size: int, values: dict[str, bytes], counts: dict[str, int], lock: threading.Lock) -> None:
        self.rank = rank
        self.world_size = world_size
        self.values, self.counts, self.lock = values, counts, lock

    def count(self, key: str, amount: int) -> int:
        with self.lock:
            self.counts[key] = self.counts.get(key, 0) + amount
            return self.counts[key]

    def write(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def read(self, key: str) -> bytes:
        return self.values[key]


def stores(world_size: int) -> list[Memory]:
    values: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    lock = threading.Lock()
    return [Memory(rank, world_size, values, counts, lock) for rank in range(world_size)]


def test_many_exchanges_take_few_keys() -> None:
    shared = stores(3)
    results: list[list[int]] = [[], [], []]

    def rank(number: int) -> None:
        boxes = Mailboxes(shared[number], "t")
        for turn in range(200):
            try:
                results[number].append(
                    exchange(boxes, f"t/{turn}/x", lambda turn=turn: number * turn if turn % 7 else 1 // number, sum, 10.0)
                )
            except RankFailedError:
                results[number].append(-1)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[3 * turn if turn % 7 else -1 for turn in range(200)]] * 3
    assert sorted(shared[0].values) == ["t/report/1", "t/report/2", "t/verdict"]


def test_an_old_message_is_no_answer() -> None:
    shared = stores(2)
    sender, reader = Mailboxes(shared[1], "t"), Mailboxes(shared[0], "t")
    with pytest.raises(TimeoutError):
        reader.get("t/1/report/1", 0.0)
    sender.put("t/1/report/1", b"one\ntwo")
    assert reader.get("t/1/report/1", 0.0) == b"one\ntwo"
    with pytest.raises(TimeoutError, match="nothing under 't/2/report/1' after 0.01 s"):
        reader.get("t/2/report/1", 0.01)
    sender.put("t/2/report/1", b"")
    assert reader.get("t/2/report/1", 0.0) == b""
