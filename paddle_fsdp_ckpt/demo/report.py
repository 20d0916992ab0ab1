"""What the jobs gave, how they compare, and how that is said."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .job import Event, Job
from .state import Array, identical, largest_difference, read_whole

_TOLERANCE, _TOLERANCE_MOE = 1e-4, 1e-2
"""How far a loss may be off at another number of ranks, where sums run in another order. With experts, a near tie in a router may
fall the other way, which shows at once. A lost optimizer state shows as about 0.1."""

_COLUMN = 16
_SHOWN_STEPS = 30


@dataclass
class Outcome:
    """What a job gave.

    Attributes:
        job: the job.
        losses: the loss of each step that it trained.
        parameter_count: the number of elements of its parameters; tied ones count once.
        seconds: how long loading and saving took, by the event that reported it.
        parameters: its parameters after the last step.
        optimizer: its optimizer's states after the last step.
    """

    job: Job
    losses: dict[int, float] = field(default_factory=dict)
    parameter_count: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, Array] = field(default_factory=dict)
    optimizer: dict[str, Array] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take in an event of rank 0."""
        if event["kind"] == "step":
            self.losses[event["step"]] = event["loss"]
        elif event["kind"] == "started":
            self.parameter_count = event["parameters"]
        else:
            self.seconds[event["kind"]] = event["seconds"]

    def read_state(self) -> None:
        """Read what the ranks wrote at their end."""
        ranks = range(self.job.world_size)
        self.parameters = read_whole(self.job.state("parameters", rank) for rank in ranks)
        self.optimizer = read_whole(self.job.state("optimizer", rank) for rank in ranks)


@dataclass(frozen=True)
class Comparison:
    """How a resumed job compares with the uninterrupted one, from the checkpoint on.

    Attributes:
        job: the resumed job.
        same_ranks: whether both ran on the same number of ranks.
        bitwise: whether all losses, final parameters and final optimizer states are equal in every bit.
        loss: the largest absolute difference of a loss.
        parameter: the largest absolute difference of an element of the final parameters.
    """

    job: Job
    same_ranks: bool
    bitwise: bool
    loss: float
    parameter: float

    @property
    def good(self) -> bool:
        """Whether the job kept what is promised: the same bits on as many ranks, the same losses up to rounding on others."""
        tolerance = _TOLERANCE_MOE if self.job.moe else _TOLERANCE
        return self.bitwise or (not self.same_ranks and self.loss <= tolerance)

    def __str__(self) -> str:
        if self.bitwise:
            return f"on {self.job.ranks}: bit for bit. Each loss, parameter and optimizer state has the bits of the uninterrupted run."
        why = "which must not be" if self.same_ranks else "as the ranks' sums run in another order" if self.good else "which is too far"
        return (
            f"on {self.job.ranks}: not bit for bit, {why}. "
            f"The largest difference of a loss is {self.loss:.1e}, of a parameter after the last step {self.parameter:.1e}."
        )


def compare(reference: Outcome, resumed: Outcome) -> Comparison:
    """Compare a resumed job with the uninterrupted one over the steps after the checkpoint."""
    save_at = reference.job.save_at or 0
    expected = {step: loss for step, loss in reference.losses.items() if step > save_at}
    return Comparison(
        job=resumed.job,
        same_ranks=resumed.job.world_size == reference.job.world_size,
        bitwise=expected == resumed.losses
        and identical(reference.parameters, resumed.parameters)
        and identical(reference.optimizer, resumed.optimizer),
        loss=_loss_difference(expected, resumed.losses),
        parameter=largest_difference(reference.parameters, resumed.parameters),
    )


def _loss_difference(expected: dict[int, float], losses: dict[int, float]) -> float:
    if expected.keys() != losses.keys():
        return math.inf
    return max(abs(expected[step] - losses[step]) for step in expected)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return the lines of a table of losses, a column a job; long runs are thinned out, except around the checkpoint."""
    reference = outcomes[0].job
    save_at = reference.save_at or 0
    stride = math.ceil(reference.steps / _SHOWN_STEPS)
    yield "step" + "".join(f"{outcome.job.title:>{_COLUMN}}" for outcome in outcomes)
    for step in range(1, reference.steps + 1):
        if step % stride and step not in (1, save_at, save_at + 1, reference.steps):
            continue
        cells = (f"{outcome.losses[step]:.9f}" if step in outcome.losses else "" for outcome in outcomes)
        yield (f"{step:4}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)).rstrip()
        if step == save_at:
            yield "---- saved here; below, every column but the first was trained by fresh processes"
