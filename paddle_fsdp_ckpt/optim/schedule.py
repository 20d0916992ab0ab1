"""An optimizer's learning rate as data: what a checkpoint holds of it, and how it is restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.optimizer.lr import LRScheduler


def describe_learning_rate(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's learning rate as JSON values: a scheduler's class and state, or the number."""
    rate = optimizer._learning_rate
    if isinstance(rate, LRScheduler):
        return {"scheduler": type(rate).__name__, "state": _plain(rate.state_dict())}
    return {"value": float(optimizer.get_lr())}


def restore_learning_rate(optimizer: Any, saved: dict[str, Any]) -> str | None:
    """Give an optimizer's scheduler the state that :func:`describe_learning_rate` returned.

    A number is never changed, and a scheduler of another class neither, since that is how a run is continued at another rate.

    Returns:
        How the learning rate differs from the saved one, in words; None where it doesn't.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, LRScheduler) and saved.get("scheduler") == type(rate).__name__:
        rate.set_state_dict(saved["state"])
        return None
    now = describe_learning_rate(optimizer)
    return None if now == saved else f"{type(optimizer).__name__}: its learning rate was saved as {saved}, and was left as {now}"


def _plain(value: Any) -> Any:
    """Return numbers of numpy and Paddle as Python's own, all through dicts, lists and tuples."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, (np.generic, np.ndarray, paddle.Tensor)) else value
