"""All ranks save and stop at the same step, whoever got the signal and whatever their clocks say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import voting_cases
from harness import RankPool

from paddle_fsdp_ckpt.errors import CheckpointError, RankFailedError
from paddle_fsdp_ckpt.manager.votes import Ballot, Clock, Signals

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_on_any_rank_stops_all_at_one_step(signalled: int, tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(voting_cases.vote_by_signal, str(tmp_path / "root"), signalled, 6, 50) == [([2, 4, 6], 6)] * 2


def test_signals_work_on_one_rank(tmp_path: Path, single: RankPool) -> None:
    assert single.run(voting_cases.vote_by_signal, str(tmp_path / "root"), 0, 6, 50) == [([2, 4, 6], 6)]


@pytest.mark.parametrize("late", [0, 1])
def test_the_clock_of_rank_0_counts(late: int, tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(voting_cases.vote_by_time, str(tmp_path / "root"), late) == [[False, late == 0, False]] * 2


def test_a_manager_that_never_says_yes_says_so(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(voting_cases.warned_of_no_time_to_save, str(tmp_path / "root"))
    (text,), said = first.pop("nothing")
    assert text.startswith("voting_cases.py: should_save always says no") and "save_every_steps=" in text
    assert second.pop("nothing") == ([], said) == ([], [False] * 3)
    assert first == second == {"steps": ([], [False, True, False]), "stop": ([], [False] * 3)}


def test_many_votes_agree(tmp_path: Path, ranks: Ranks) -> None:
    right = [step for step in range(60) if step % 3 < 2]
    assert ranks(2).run(voting_cases.count_votes, str(tmp_path / "root"), 60) == [right] * 2


def test_signals_break_no_connection(tmp_path: Path, ranks: Ranks) -> None:
    saves = ranks(2).run(voting_cases.vote_while_signalled, str(tmp_path / "root"), 2000)
    assert saves[0] == saves[1] > 10


class Counts:
    """A counter of several threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.Lock()
        self.values: dict[str, int] = {}

    def count(self, key: str, amount: int) -> int:
        with self._lock:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]


def test_a_ballot_needs_two_keys_whatever_it_counts() -> None:
    world_size, times = 5, 400
    counts = Counts(world_size)
    results: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]

    def rank(number: int) -> None:
        ballot = Ballot(counts, "t", 10.0)
        for time in range(times):
            results[number].append(ballot.vote(save=(time + number) % 3 == 0, stop=time * number % 7 == 1))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = [
        (sum((time + number) % 3 == 0 for number in range(5)), sum(time * number % 7 == 1 for number in range(5))) for time in range(times)
    ]
    assert results == [right] * world_size
    assert len(counts.values) == 2


def test_a_rank_that_does_not_vote_is_an_error() -> None:
    with pytest.raises(RankFailedError, match=r"only 1 of 2 ranks called it within 0\.05 s"):
        Ballot(Counts(2), "t", 0.05).vote(save=False, stop=False)


def test_signals_that_can_not_be_listened_to() -> None:
    for number in (9, 12345):
        with pytest.raises(CheckpointError, match=f"signal {number} can't be listened to"):
            Signals([number])


def test_the_clock_starts_anew() -> None:
    now = [0.0]
    clock = Clock(2.0, lambda: now[0])
    now[0] = 119.0
    assert not clock.is_due()
    now[0] = 120.0
    assert clock.is_due()
    clock.restart()
    assert not clock.is_due()
    assert not Clock(None).is_due()
