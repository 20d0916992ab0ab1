"""The harness itself: results come back in order, and no failure of a rank is lost or hangs the session."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy
import pytest
from harness import RankPool, RanksFailed, this_rank

Ranks = Callable[[int], RankPool]


def reduce_sum(values: numpy.ndarray) -> numpy.ndarray:
    import paddle

    tensor = paddle.to_tensor(values * (this_rank().rank + 1))
    paddle.distributed.all_reduce(tensor)
    return tensor.numpy()


def where() -> tuple[int, int, bool]:
    import paddle.distributed as dist

    return dist.get_rank(), dist.get_world_size(), dist.is_initialized()


def process_id() -> int:
    return os.getpid()


def hang_on_rank_1() -> None:
    import paddle.distributed as dist

    print(f"rank {dist.get_rank()} prints this")
    if dist.get_rank() == 1:
        sleep_long()


def sleep_long() -> None:
    time.sleep(1000)


def fail_on(failing: int, message: str) -> int:
    rank = this_rank().rank
    print(f"rank {rank} of {message}")
    if rank == failing:
        raise KeyError(message)
    return rank


def fail_before_collective() -> None:
    import paddle

    if this_rank().rank == 0:
        raise ValueError("rank 0 leaves")
    paddle.distributed.all_reduce(paddle.ones([1]))


def fail_everywhere() -> None:
    raise LookupError("the same on every rank")


def die_on(dying: int) -> str:
    if this_rank().rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(2,), name="straggler").start()


def return_lambda() -> object:
    return lambda: None


def make_a_mess() -> str:
    import paddle

    os.environ["PADDLE_FSDP_CKPT_MESS"] = "1"
    os.chdir("/")
    paddle.set_default_dtype("float64")
    (this_rank().scratch / "file").write_text("left behind")
    return str(this_rank().scratch)


def look_for_mess(scratch: str) -> tuple[bool, bool, str, bool, str]:
    import paddle

    return (
        "PADDLE_FSDP_CKPT_MESS" in os.environ,
        os.getcwd() == "/",
        paddle.get_default_dtype(),
        os.path.exists(scratch),
        paddle.nn.Linear(1, 1).weight.name,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_a_job(ranks: Ranks, world_size: int) -> None:
    values = numpy.arange(5, dtype="float32")
    results = ranks(world_size).run(reduce_sum, values)
    assert len(results) == world_size
    for result in results:
        numpy.testing.assert_array_equal(result, values * sum(range(1, world_size + 1)))
    assert ranks(world_size).run(where) == [(rank, world_size, True) for rank in range(world_size)]


def test_one_rank_in_and_outside_a_job(ranks: Ranks, single: RankPool) -> None:
    # Paddle makes no process group for a job of one rank.
    assert ranks(1).run(where) == single.run(where) == [(0, 1, False)]
    assert ranks(1).run(process_id) != single.run(process_id)


def test_processes_are_kept_between_runs_and_fresh_ones_are_not(ranks: Ranks, fresh_ranks: Ranks) -> None:
    kept = ranks(2).run(process_id)
    assert ranks(2).run(process_id) == kept
    fresh = fresh_ranks(2).run(process_id)
    assert not set(fresh) & set(kept)


def test_time_out_shows_every_log_and_stack(fresh_ranks: Ranks) -> None:
    pool = fresh_ranks(2)
    before = pool.run(process_id)
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(hang_on_rank_1, timeout=1.5)
    assert time.monotonic() - started < 6
    message = str(caught.value)
    assert "no answer from rank 1 within 1.5 s" in message
    assert "rank 0 prints this" in message
    assert "rank 1 prints this" in message
    assert "in sleep_long" in message
    assert not set(pool.run(process_id)) & set(before)


def test_exception_on_one_rank_is_reported_and_the_ranks_stay_usable(ranks: Ranks) -> None:
    before = ranks(2).run(process_id)
    with pytest.raises(RanksFailed, match="KeyError: 'first'") as caught:
        ranks(2).run(fail_on, 1, "first")
    message = str(caught.value)
    assert "===== rank 0: returned" in message
    assert "in fail_on" in message
    assert "failing = 1" in message
    assert "rank 0 of first" in message
    assert ranks(2).run(fail_on, -1, "second") == [0, 1]
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(fail_on, 0, "third")
    assert "first" not in str(caught.value), "an earlier run's log is shown"
    assert ranks(2).run(process_id) == before


def test_ranks_that_wait_for_a_failed_one_are_not_waited_for(fresh_ranks: Ranks) -> None:
    pool = fresh_ranks(2)
    pool.run(process_id)
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="within 1 s of another rank's failure") as caught:
        pool.outcomes(fail_before_collective, timeout=60, grace=1)
    assert time.monotonic() - started < 10
    assert "rank 0 leaves" in str(caught.value)
    assert "in fail_before_collective" in str(caught.value).split("log of rank 1")[1]
    assert pool.run(reduce_sum, numpy.ones(1))[0] == 3


def test_errors_are_equal_across_ranks(ranks: Ranks) -> None:
    first, second = ranks(2).errors(fail_everywhere)
    assert first == second
    assert (first.type, first.message) == ("LookupError", "the same on every rank")
    assert "Exception" in first.bases
    with pytest.raises(RanksFailed, match="did not raise on every rank"):
        ranks(2).errors(fail_on, 0, "only here")


def test_outcomes_tell_values_and_errors_apart(ranks: Ranks) -> None:
    good, bad = ranks(2).outcomes(fail_on, 1, "half")
    assert good.ok
    assert good.value == 0
    assert not bad.ok
    assert bad.error is not None
    assert bad.error.type == "KeyError"


def test_death_of_a_rank_is_reported_and_the_ranks_start_anew(fresh_ranks: Ranks) -> None:
    pool = fresh_ranks(2)
    with pytest.raises(RanksFailed, match="a rank died") as caught:
        pool.run(die_on, 1)
    assert "rank 1: its process ended with exit status -9" in str(caught.value)
    assert pool.run(reduce_sum, numpy.ones(1))[0] == 3
    alive, dead = pool.outcomes(die_on, 1, may_die=[1])
    assert alive.value == "alive"
    assert dead.exit_code == -signal.SIGKILL
    assert pool.run(die_on, -1) == ["alive", "alive"]


def test_rank_that_was_killed_between_runs_is_replaced(fresh_ranks: Ranks) -> None:
    pool = fresh_ranks(2)
    victim = pool.run(process_id)[1]
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.2)
    assert victim not in pool.run(process_id)


def test_left_over_thread_is_an_error(single: RankPool) -> None:
    (error,) = single.errors(leave_thread)
    assert error.type == "LeftoverThreadError"
    assert "straggler" in error.message


def test_result_that_does_not_pickle_is_an_error(single: RankPool) -> None:
    (error,) = single.errors(return_lambda)
    assert "can't be pickled" in error.message


def test_functions_that_can_not_be_sent_are_refused(single: RankPool) -> None:
    with pytest.raises(ValueError, match="module-level"):
        single.run(lambda: None)


def test_runs_do_not_see_each_other(single: RankPool) -> None:
    (scratch,) = single.run(make_a_mess)
    assert single.run(look_for_mess, scratch) == [(False, False, "float32", False, "linear_0.w_0")]
