"""What must train like one unfused process on the same global batch: one function a scenario."""

from __future__ import annotations

import backward_scenarios
import layer_scenarios
import loop_scenarios
import model_scenarios
import odd_use_scenarios
import optimizer_scenarios
import several_model_scenarios
from training_runs import Scenario

SCENARIOS: dict[str, Scenario] = {
    **model_scenarios.SCENARIOS,
    **odd_use_scenarios.SCENARIOS,
    **loop_scenarios.SCENARIOS,
    **several_model_scenarios.SCENARIOS,
    **optimizer_scenarios.SCENARIOS,
    **layer_scenarios.SCENARIOS,
    **backward_scenarios.SCENARIOS,
}
"""By name."""

FLOAT32 = {"optimizer_clip_by_norm", "clip_set_later", "blocks_5", "gradient_accumulation"}
"""Run in float32, as Paddle has no float64 kernel for them on CPU, or to have tried it; the others in float64, where differences show."""
