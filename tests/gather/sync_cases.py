"""A trainer on some ranks that hands changed weights to another process, and the versions that tell what changed."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import paddle
from gather_cases import Net, values_of

import paddle_fsdp_ckpt as ckpt

EXAMPLE = Path(ckpt.__file__).parents[1] / "examples" / "weights_to_engine.py"


def run_the_example(rounds: int) -> list[tuple[list[str], np.ndarray, np.ndarray | None]]:
    """Return for each round the names sent, and the trainer's and the other process's logits."""
    return [(one.sent, one.logits, one.served) for one in runpy.run_path(str(EXAMPLE))["train"](rounds)]


def versions_count() -> None:
    model = Net()
    values_of(model)
    ckpt.fully_shard(model, optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    first = ckpt.parameter_versions(model)
    assert first == ckpt.parameter_versions(model)
    assert "out.weight" in first
    assert len(first) == len({name for name, _ in ckpt.iter_full_parameters(model)})
    model.head.bias.set_value(np.zeros(6, "float32"))
    second = ckpt.parameter_versions(model)
    assert {name for name in second if second[name] != first[name]} == {"head.bias"}
    with ckpt.local_parameters(model):
        pass
    third = ckpt.parameter_versions(model)
    assert all(third[name] > second[name] for name in third)
