"""Tables of scenarios, and what many of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import nn
from paddle.optimizer import SGD, AdamW
from training_runs import Run, Scenario


def sgd(model: nn.Layer) -> Any:
    return SGD(0.3, parameters=model.parameters())


def adamw(model: nn.Layer) -> Any:
    clip = nn.ClipGradByGlobalNorm(0.5)
    # Where the true gradient is 0, Adam would amplify the order of summation.
    return AdamW(0.01, epsilon=1e-6, parameters=model.parameters(), weight_decay=0.1, grad_clip=clip)


def raise_error(*_: Any) -> None:
    raise ZeroDivisionError


class Scenarios(dict[str, Scenario]):
    """Scenarios of one subject, by name."""

    def scenario(self, function: Scenario) -> Scenario:
        """Add a function under its name."""
        self[function.__name__] = function
        return function

    def add(self, name: str, build: Callable[[], nn.Layer], make: Callable[[nn.Layer], Any] = sgd, **train: Any) -> None:
        """Add a scenario that is nothing but a model, an optimizer and the plain loop."""

        def run_it(run: Run) -> None:
            model = build()
            run.train(model, run.start(model, make), **train)

        self[name] = run_it
