from __future__ import annotations

import logging
import re
import threading

import pytest
from checkpoints import ThreadRendezvous, run_ranks

from paddle_fsdp_ckpt.errors import CheckpointError, MismatchError, RankFailedError
from paddle_fsdp_ckpt.storage import agreement
from paddle_fsdp_ckpt.storage.agreement import Rendezvous, exchange

SOON = 0.2
"""Seconds; for what never comes."""

LONG = 30.0
"""Seconds; for what comes as soon as its thread gets on."""


def agree(ranks: Rendezvous, token: str, problem: str | None, timeout_seconds: float) -> None:
    """Return on every rank where no rank has a problem; raise the same on every rank elsewhere."""

    def report() -> None:
        if problem is not None:
            raise RankFailedError(problem)

    try:
        exchange(ranks, token, report, lambda _: None, timeout_seconds)
    except RankFailedError as error:
        raise error from None


def test_every_rank_gets_what_rank_0_made_of_all_parts() -> None:
    results = run_ranks(
        4, lambda ranks: exchange(ranks, "t", lambda: ranks.rank**2, lambda parts: {"sum": sum(parts), "parts": parts}, LONG)
    )
    assert results == [{"sum": 14, "parts": [0, 1, 4, 9]}] * 4


def test_agreeing_without_a_problem_returns_everywhere() -> None:
    assert run_ranks(3, lambda ranks: agree(ranks, "t", None, LONG)) == [None] * 3
    assert run_ranks(1, lambda ranks: agree(ranks, "t", None, LONG)) == [None]


def test_all_ranks_raise_the_same_where_some_have_a_problem() -> None:
    problems = ["no values for 'w'", None, "disk gone", "no values for 'w'"]
    results = run_ranks(4, lambda ranks: agree(ranks, "t", problems[ranks.rank], LONG))
    assert [type(result) for result in results] == [RankFailedError] * 4
    assert {str(result) for result in results} == {"ranks 0, 3 failed: no values for 'w'; rank 2 failed: disk gone"}
    assert all(result.__cause__ is None for result in results)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_raises_its_own_checkpoint_error_and_the_others_name_it(failing: int) -> None:
    own = MismatchError("shapes differ")

    def work(ranks: ThreadRendezvous) -> None:
        def part() -> None:
            if ranks.rank == failing:
                raise own

        exchange(ranks, "t", part, lambda _: None, LONG)

    results = run_ranks(3, work)
    assert results.pop(failing) is own
    for result in results:
        assert type(result) is RankFailedError
        assert str(result) == f"rank {failing} failed: shapes differ"


@pytest.mark.parametrize("failing", [0, 2])
def test_any_other_error_becomes_a_rank_failure_everywhere(failing: int) -> None:
    own = OSError(28, "No space left on device")

    def work(ranks: ThreadRendezvous) -> None:
        def part() -> None:
            if ranks.rank == failing:
                raise own

        exchange(ranks, "t", part, lambda _: None, LONG)

    results = run_ranks(3, work)
    said = f"rank {failing} failed: OSError: [Errno 28] No space left on device; the disk is full: make room there, or save elsewhere"
    assert {str(result) for result in results} == {said}
    assert results[failing].__cause__ is own


def test_a_decision_that_fails_fails_everywhere() -> None:
    def decide(parts: list[int]) -> None:
        raise ZeroDivisionError("no")

    results = run_ranks(3, lambda ranks: exchange(ranks, "t", lambda: ranks.rank, decide, LONG))
    assert {str(result) for result in results} == {"rank 0 failed: ZeroDivisionError: no"}


@pytest.mark.parametrize("where", ["part of rank 0", "part of rank 2", "decision"])
def test_what_is_no_json_fails_everywhere_and_nobody_waits(where: str) -> None:
    def work(ranks: ThreadRendezvous) -> None:
        part = {1} if where == f"part of rank {ranks.rank}" else 1
        exchange(ranks, "t", lambda: part, lambda _: {2} if where == "decision" else None, LONG)

    for result in run_ranks(3, work):
        assert type(result) is RankFailedError
        assert re.fullmatch(r"rank \d failed: TypeError: Object of type set is not JSON serializable", str(result))


def test_the_decision_is_not_asked_for_where_a_part_failed() -> None:
    asked: list[object] = []

    def work(ranks: ThreadRendezvous) -> None:
        exchange(ranks, "t", lambda: 1 // ranks.rank, asked.append, LONG)

    assert all(isinstance(result, RankFailedError) for result in run_ranks(2, work))
    assert asked == []


def test_a_rank_that_never_answers_is_named_everywhere() -> None:
    class TimePasses(ThreadRendezvous):
        """Waits in no time for what never comes."""

        def get(self, key: str, timeout_seconds: float) -> bytes:
            return super().get(key, 0.0 if key in ("t/report/1", "t/report/3") else timeout_seconds)

    def work(ranks: ThreadRendezvous) -> None:
        if ranks.rank not in (1, 3):
            ranks = TimePasses(ranks.rank, ranks.world_size, ranks._store, ranks._changed)
            agree(ranks, "t", "disk gone" if ranks.rank == 2 else None, LONG)

    results = run_ranks(5, work)
    assert results[1] is None
    for rank in (0, 2, 4):
        assert isinstance(results[rank], RankFailedError)
        assert str(results[rank]).startswith("ranks 1, 3 failed: no answer within 30 s")
        assert "rank 2 failed: disk gone" in str(results[rank])


def test_rank_0_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(agreement, "_FIRST_WORD_SECONDS", SOON / 4)
    may_go_on = threading.Event()

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            may_go_on.set()

    handler = Waits()
    logging.getLogger("paddle_fsdp_ckpt").addHandler(handler)
    try:

        def work(ranks: ThreadRendezvous) -> int:
            def part() -> None:
                if ranks.rank in (2, 3):
                    assert may_go_on.wait(LONG)

            exchange(ranks, "t", part, lambda _: None, LONG)
            return 1

        assert run_ranks(4, work) == [1] * 4
    finally:
        logging.getLogger("paddle_fsdp_ckpt").removeHandler(handler)
    assert re.fullmatch(
        r"rank 0 has waited 0\.05 s for ranks .*2, 3 \(t\), and gives up after 30 s; all ranks must make this call, "
        r"without `if rank == 0`: see whether they do",
        caplog.messages[0],
    )


def test_reports_are_forgotten_once_they_are_read() -> None:
    """A job's store lives as long as the job, and the digests of a large file are not small."""
    stores: list[dict[str, bytes]] = []

    def work(ranks: ThreadRendezvous) -> None:
        exchange(ranks, "t", lambda: "x" * 1000, lambda _: None, LONG)
        stores.append(ranks._store)

    run_ranks(3, work)
    assert max(map(len, stores[0].values())) < 100


def test_a_coordinator_that_never_answers_is_named_by_the_others() -> None:
    results = run_ranks(3, lambda ranks: agree(ranks, "t", None, SOON) if ranks.rank else None)
    for result in results[1:]:
        assert isinstance(result, RankFailedError)
        assert "rank 0, which coordinates, gave no verdict within 0.4 s" in str(result)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_rank_tells_the_others_at_once(interrupted: int) -> None:
    def work(ranks: ThreadRendezvous) -> None:
        def part() -> None:
            if ranks.rank == interrupted:
                raise KeyboardInterrupt

        exchange(ranks, "t", part, lambda _: None, LONG)

    results = run_ranks(3, work)
    assert isinstance(results.pop(interrupted), KeyboardInterrupt)
    for result in results:
        assert isinstance(result, RankFailedError)
        assert f"rank {interrupted} failed: KeyboardInterrupt" in str(result)


def test_an_interrupted_decision_is_told_to_the_others() -> None:
    def decide(_: list[object]) -> None:
        raise KeyboardInterrupt

    results = run_ranks(2, lambda ranks: exchange(ranks, "t", lambda: None, decide, LONG))
    assert isinstance(results[0], KeyboardInterrupt)
    assert "rank 0 failed: KeyboardInterrupt" in str(results[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_breaks_is_a_clear_error(rank: int) -> None:
    class Broken:
        world_size = 2

        def __init__(self) -> None:
            self.rank = rank

        def put(self, key: str, value: bytes) -> None:
            pass

        def get(self, key: str, timeout_seconds: float) -> bytes:
            raise ConnectionResetError("store is gone")

    with pytest.raises(CheckpointError, match=f"rank {1 - rank}.*ConnectionResetError: store is gone"):
        agree(Broken(), "t", None, SOON)
