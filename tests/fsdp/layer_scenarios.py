"""More kinds of layers."""

from __future__ import annotations

import numpy as np
import paddle
from harness import this_rank
from scenario_table import Scenarios, sgd
from training_models import (
    Collections,
    Images,
    Nestedly,
    PartlyWithoutGradient,
    Recurrent,
    Transformer,
)
from training_runs import Run

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario
_add = SCENARIOS.add


_add("recurrent_layers", Recurrent)
_add("paddles_transformer", Transformer)
_add("collections_and_shared_layers", Collections)
_add("recompute_at_two_levels", Nestedly)
_add("partly_without_gradient", PartlyWithoutGradient)


@scenario
def batch_norm_in_training(run: Run) -> None:
    """Each rank normalises its own rows, so the right values come from a forward of each part."""
    model = Images(norm=True)
    optimizer = run.start(model, sgd)
    for step in range(2):
        if run.sharded:
            loss = model(run.images(step, 3, 5, 5)).square().mean()
        else:
            parts = run.images(step, 3, 5, 5).split(this_rank().world_size)
            losses = [model(part).square().mean() for part in parts]
            loss = paddle.add_n(losses) / len(losses)
        run.step(model, optimizer, loss)
    run.note_weights(model)
    if not run.sharded or run.world_size == 1:
        run.losses += [model.norm._mean.numpy().sum().item()] if this_rank().world_size == 1 else []
    assert np.abs(model.norm._mean.numpy()).max() > 0, "the running mean was lost"
