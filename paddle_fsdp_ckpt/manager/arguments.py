"""What a manager's arguments must be, and be alike on all ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ..differing_values import raise_difference
from ..errors import CheckpointError, listing
from ..meeting import check_same
from ..optim import optimizer_list
from ..shardings import ranks_of
from ..storage.json_values import JsonValue
from .retention import KeepAll, KeepLast, Retention, missing_metrics
from .steps import MAX_STEP


def retention_of(max_to_keep: int | None, keep: Sequence[Retention]) -> list[Retention]:
    """Return the policies that two arguments stand for; at least one.

    Raises:
        CheckpointError: they are something else.
    """
    if not isinstance(keep, (list, tuple)) or not all(hasattr(policy, "kept") for policy in keep):
        raise CheckpointError("keep: give a list of policies such as KeepLast(3) and KeepEvery(1000)")
    if max_to_keep is None:
        return list(keep) or [KeepAll()]
    try:
        return [*keep, KeepLast(max_to_keep)]
    except CheckpointError:
        raise CheckpointError(f"max_to_keep is {max_to_keep!r:.100}, not a whole number from 1 on; None keeps all steps") from None


def step_number(value: Any) -> int:
    """Return a step as an int.

    Raises:
        CheckpointError: it is none, or larger than those that a root holds.
    """
    number = whole_number(value, "step", 0)
    if number > MAX_STEP:  # it would be saved, and never found again
        raise CheckpointError(
            f"step is {number}, and a root holds steps up to {MAX_STEP}; give the number of steps that were taken, not a time"
        )
    return number


def whole_number(value: Any, what: str, least: int) -> int:
    """Return ``value`` as an int; ``what`` names it for the messages.

    Raises:
        CheckpointError: it is no whole number, or less than ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise CheckpointError(f"{what} is {value!r:.100}, not a whole number") from None
    if number < least:
        raise CheckpointError(f"{what} is {number}, and must be at least {least}")
    return number


def positive_number(value: Any, what: str) -> float:
    """Return ``value`` as a float; ``what`` names it for the message.

    Raises:
        CheckpointError: it is no number above 0.
    """
    if not isinstance(value, (int, float)) or not value > 0:
        raise CheckpointError(f"{what} is {value!r:.100}, not a number above 0")
    return float(value)


def check_can_be_compared(policies: Sequence[Retention], metrics: Mapping[str, float]) -> None:
    """Raise where a policy compares steps by a metric that a save doesn't give.

    Raises:
        CheckpointError: it doesn't.
    """
    missing = missing_metrics(policies, metrics)
    if missing:
        raise CheckpointError(
            f"KeepBest compares steps by {listing(missing)}, and this save has no such metric; nothing was saved. Give "
            f"metrics={{{missing[0]!r}: ...}}, float('nan') where it wasn't measured at this step"
        )


def check_group(model: Any, optimizer: Any, world_size: int) -> None:
    """Raise unless a model is sharded over all ranks of a manager.

    Raises:
        CheckpointError: it is over others.
    """
    ranks = max(1, len(ranks_of(model, optimizer_list(optimizer))))
    if ranks != world_size:
        raise CheckpointError(
            f"the model is sharded over {ranks} ranks and this manager is of {world_size}; a manager saves models of all ranks of the job. "
            "Use save() for others"
        )


def check_same_restore(ranks: list[JsonValue]) -> None:
    """Raise unless all ranks gave the same step, fall_back, discard_later and random_state.

    Raises:
        RankFailedError: they did not.
    """
    for what, values in zip(("step", "fall_back", "discard_later", "random_state"), zip(*ranks, strict=True), strict=True):
        check_same("restore", what, values, "nothing was changed", shown=True)


def is_same_save(ranks: list[JsonValue]) -> bool:
    """Tell whether all ranks gave the same digest of what is common to them; see :func:`check_same_values`.

    Raises:
        RankFailedError: they did not give the same step.
    """
    steps, digests = zip(*ranks, strict=True)
    check_same("save", "step", steps, "nothing was written", shown=True)
    return len({*digests}) == 1


def check_same_values(ranks: list[JsonValue]) -> None:
    """Raise, of what all ranks should have given alike to a save, and did not.

    Args:
        ranks: what each described by :func:`~.differing_values.describe_values`.

    Raises:
        RankFailedError: naming the first value that differs.
    """
    raise_difference("save", ranks, _WAYS_OUT)


_WAYS_OUT = {
    "extra_state": "Give all ranks the same; what is a rank's own goes into rank_state=",
    "lr_scheduler": "Step schedulers alike on all ranks",
    "grad_scaler": "bind_grad_scaler lets all ranks scale alike",
    "metrics": "Give all ranks one number, such as the mean (paddle.distributed.all_reduce); what is a rank's own goes into rank_state=",
}
