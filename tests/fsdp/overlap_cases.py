"""Training with collectives that are not over when they have begun, as on GPUs; gloo's are, so they are put off here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
from harness import hybrid_groups
from scenario_table import sgd
from training_models import Net
from training_runs import Run, compare, language_loss
from training_scenarios import FLOAT32, SCENARIOS

from paddle_fsdp_ckpt.fsdp import Communicator
from paddle_fsdp_ckpt.training import fully_shard


class _PutOff:
    """A collective that runs when it is finished, on what its input is then."""

    def __init__(self, run: Callable[[], paddle.Tensor], counts: list[int]) -> None:
        self._run = run
        self._counts = counts
        counts[0] += 1

    def finish(self) -> paddle.Tensor:
        self._counts[1] += 1
        return self._run()


@contextmanager
def late_collectives() -> Iterator[list[int]]:
    """Let collectives that are begun run when they are finished; gives how many began, and how many were finished."""
    gather, reduce = Communicator.start_all_gather, Communicator.start_reduce_scatter
    counts = [0, 0]

    def put_off(start: Any) -> Any:
        def late(self: Communicator, tensor: paddle.Tensor, *, sync_op: bool = False) -> Any:
            run = lambda: start(self, tensor, sync_op=True).finish()  # noqa: E731
            return start(self, tensor, sync_op=True) if sync_op else _PutOff(run, counts)

        return late

    Communicator.start_all_gather = put_off(gather)  # type: ignore[method-assign]
    Communicator.start_reduce_scatter = put_off(reduce)  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Communicator.start_all_gather = gather  # type: ignore[method-assign]
        Communicator.start_reduce_scatter = reduce  # type: ignore[method-assign]


def train(names: Sequence[str], **options: Any) -> list[int]:
    """Run scenarios with late collectives; return how many began, and how many were finished."""
    with late_collectives() as counts:
        for name in names:
            try:
                compare(SCENARIOS[name], "float32" if name in FLOAT32 else "float64", **options)
            except BaseException as error:
                error.add_note(f"in scenario {name}")
                raise
    return counts


def train_ahead(names: Sequence[str], prefetch: int) -> list[int]:
    return train(names, prefetch=prefetch)


def train_replicas(name: str) -> list[int]:
    return train([name], prefetch=1, **hybrid_groups(2))


def gathers_of_a_step(prefetch: int) -> tuple[int, int]:
    """Return how many gathers of a step are waited for at once, and how many began before they were needed."""
    model = Net(6)
    optimizer = sgd(model)
    fully_shard(model, optimizer=optimizer, prefetch=prefetch)
    seen: list[bool] = []
    gather = Communicator.start_all_gather

    def count(self: Communicator, shard: paddle.Tensor, *, sync_op: bool = False) -> Any:
        seen.append(sync_op)
        return gather(self, shard, sync_op=sync_op)

    Communicator.start_all_gather = count  # type: ignore[method-assign]
    try:
        for step in range(3):
            seen.clear()
            language_loss(Run(True), model, step).backward()
            optimizer.step()
            optimizer.clear_grad()
    finally:
        Communicator.start_all_gather = gather  # type: ignore[method-assign]
    return seen.count(True), seen.count(False)
