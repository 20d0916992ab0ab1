"""An optimizer's learning rate as data: what a checkpoint holds of it, and how it is restored."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle.optimizer import lr
from paddle.optimizer.lr import LRScheduler

JsonValue = Any
"""None, bool, int, float, str, a list of these, or a dict of them with str keys."""

_LEFT_OUT: dict[type, tuple[str, ...]] = {lr.CosineAnnealingWarmRestarts: ("T_cur", "T_i")}
"""What changes with a scheduler's steps and is not in its ``state_dict`` (Paddle 3.3)."""

_NO_SETTINGS = {"keys", "verbose", "_var_name"}
"""Attributes of Paddle's base class that say nothing about the rate."""


def describe_learning_rate(optimizer: Any) -> dict[str, JsonValue]:
    """Return an optimizer's learning rate as JSON values: a scheduler's class, state and settings, or the number."""
    rate = optimizer._learning_rate
    return _describe(rate) if isinstance(rate, LRScheduler) else {"value": float(optimizer.get_lr())}


def schedule_of(optimizer: Any) -> LRScheduler | None:
    """Return an optimizer's scheduler, which others may share; None where its learning rate is a number."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, LRScheduler) else None


def restore_learning_rate(optimizer: Any, saved: dict[str, JsonValue]) -> str | None:
    """Give an optimizer's scheduler the state that :func:`describe_learning_rate` returned; see :func:`restore_scheduler`.

    A number is never changed, since that is how a run is continued at another rate.

    Returns:
        How the learning rate differs from the saved one, in words; None where it doesn't.
    """
    rate, cls = optimizer._learning_rate, type(optimizer).__name__
    if takes_learning_rate(optimizer, saved):
        difference = restore_scheduler(rate, saved) if isinstance(rate, LRScheduler) else None
        return None if difference is None else f"{cls}: {difference}"
    way_out = (
        ': make the optimizer with that schedule, or leave the rate out by parts={"model", "optimizer"}' if "scheduler" in saved else ""
    )
    return f"{cls}: {_say_left(saved, describe_learning_rate(optimizer))}{way_out}"


def takes_learning_rate(optimizer: Any, saved: dict[str, JsonValue]) -> bool:
    """Tell whether an optimizer's learning rate goes on from what :func:`describe_learning_rate` returned: a like schedule or number."""
    rate = optimizer._learning_rate
    return _is_alike(rate, saved) if isinstance(rate, LRScheduler) else describe_learning_rate(optimizer) == saved


def describe_scheduler(scheduler: LRScheduler) -> dict[str, JsonValue]:
    """Return a scheduler's class, state and settings as JSON values."""
    return _describe(scheduler)


def restore_scheduler(scheduler: LRScheduler, saved: dict[str, JsonValue]) -> str | None:
    """Give a scheduler the state that :func:`describe_scheduler` returned, and those that it holds theirs.

    A scheduler of another class is never changed, nor are a scheduler's settings, since that is how a run is continued at another
    rate. Functions, such as LambdaDecay's, are not saved.

    Returns:
        How it differs from the saved one, in words; None where it doesn't.
    """
    if not _is_alike(scheduler, saved):
        return _say_left(saved, _describe(scheduler))
    _restore(scheduler, saved)
    changed = [f"{what} was saved as {was!r} and is {is_now!r} now" for what, was, is_now in _other_settings(_describe(scheduler), saved)]
    return f"the schedule of its learning rate goes on, but {'; '.join(changed)}" if changed else None


def say_learning_rate(described: dict[str, JsonValue]) -> str:
    """Return in short words what :func:`describe_learning_rate` or :func:`describe_scheduler` returned."""
    if "scheduler" not in described:
        return f"a fixed {described['value']:.6g}"
    inner = ", ".join(one["scheduler"] for one in described.get("nested", {}).values())
    rate = _decoded(described["state"].get("last_lr"))
    rate = rate.item() if hasattr(rate, "item") else rate
    return f"a {described['scheduler']}{f' of {inner}' if inner else ''}{f' (at {rate:.6g})' if isinstance(rate, float) else ''}"


def _say_left(saved: dict[str, JsonValue], now: dict[str, JsonValue]) -> str:
    classes = [(one.get("scheduler"), [inner["scheduler"] for inner in one.get("nested", {}).values()]) for one in (saved, now)]
    other = " with other entries in its state" if classes[0] == classes[1] and "scheduler" in saved else ""
    return f"the run had {say_learning_rate(saved)}, and this has {say_learning_rate(now)}{other}, which was left as it is"


def _describe(scheduler: LRScheduler) -> dict[str, JsonValue]:
    attributes = vars(scheduler)
    state = _state_of(scheduler)
    state.update({key: attributes[key] for key in _left_out(scheduler)})
    nested = _nested(scheduler)
    settings = {
        key: value
        for key, value in attributes.items()
        if key not in state and key not in nested and key not in _NO_SETTINGS and _is_data(value)
    }
    return {
        "scheduler": type(scheduler).__name__,
        "state": _encoded(state),
        "settings": _encoded(settings),
        "nested": {key: _describe(one) for key, one in nested.items()},
    }


def _state_of(scheduler: LRScheduler) -> dict[str, Any]:
    if type(scheduler).state_dict is not LRScheduler.state_dict:
        return dict(scheduler.state_dict())
    # Paddle's own makes a Python number of a tensor, with which a plateau would be compared in another precision; of one of shape [1] it
    # can't, with numpy 2.4.
    scheduler.state_keys()
    return {key: vars(scheduler)[key] for key in scheduler.keys if key in vars(scheduler)}


def _restore(scheduler: LRScheduler, saved: dict[str, JsonValue]) -> None:
    state = _decoded(saved["state"])
    left_out = {key: state.pop(key) for key in _left_out(scheduler) if key in state}
    with warnings.catch_warnings():
        # LinearWarmup's own says that the state of the scheduler that it holds is not used, before it uses it.
        warnings.filterwarnings("ignore", "There are some unused values in state_dict")
        scheduler.set_state_dict(state)
    vars(scheduler).update(left_out)
    for key, one in _nested(scheduler).items():
        if key in saved.get("nested", {}):
            _restore(one, saved["nested"][key])


def _is_alike(scheduler: LRScheduler, saved: dict[str, JsonValue]) -> bool:
    """Tell whether a scheduler, and those that it holds, are of the classes that were saved, with all that is in their state."""
    if saved.get("scheduler") != type(scheduler).__name__ or not _state_of(scheduler).keys() <= saved["state"].keys():
        return False
    nested = _nested(scheduler)
    if "nested" not in saved:
        return not nested or "LinearWarmup_LR" in saved["state"]
    return nested.keys() == saved["nested"].keys() and all(_is_alike(one, saved["nested"][key]) for key, one in nested.items())


def _other_settings(now: dict[str, JsonValue], saved: dict[str, JsonValue], within: str = "") -> Iterator[tuple[str, JsonValue, JsonValue]]:
    """Yield name, saved and present value of each setting that differs."""
    if "settings" in saved:
        for key in sorted({*now["settings"], *saved["settings"]}):
            was, is_now = saved["settings"].get(key), now["settings"].get(key)
            if was != is_now:
                yield f"{within}{key}", was, is_now
        for key, one in now["nested"].items():
            yield from _other_settings(one, saved["nested"][key], f"{within}{key}.")


def _left_out(scheduler: LRScheduler) -> list[str]:
    return [key for cls, keys in _LEFT_OUT.items() if isinstance(scheduler, cls) for key in keys]


def _nested(scheduler: LRScheduler) -> dict[str, LRScheduler]:
    """Return the schedulers that a scheduler holds, by attribute; those in a list with their place."""
    found: dict[str, LRScheduler] = {}
    for key, value in vars(scheduler).items():
        if isinstance(value, LRScheduler):
            found[key] = value
        elif isinstance(value, (list, tuple)):
            found.update({f"{key}[{number}]": one for number, one in enumerate(value) if isinstance(one, LRScheduler)})
    return found


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_data(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_data(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, np.generic, np.ndarray, paddle.Tensor))


def _encoded(value: Any) -> JsonValue:
    """Return a value as JSON that :func:`_decoded` turns back into the same, but for tuples, which become lists."""
    if isinstance(value, dict):
        return {str(key): _encoded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(item) for item in value]
    if isinstance(value, paddle.Tensor):
        wide = value.astype("float64") if value.dtype in (paddle.float16, paddle.bfloat16) else value
        return {"paddle": str(value.dtype).removeprefix("paddle."), "values": _encoded(wide.tolist())}
    if isinstance(value, np.float64):  # a Python float computes the same
        value = float(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return {"numpy": value.dtype.name, "values": _encoded(value.tolist())}
    if isinstance(value, float) and not math.isfinite(value):
        return {"not_finite": repr(value)}
    return value


def _decoded(value: JsonValue) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    decoded = {key: _decoded(item) for key, item in value.items()}
    if value.keys() == {"not_finite"}:
        return float(value["not_finite"])
    if value.keys() == {"paddle", "values"}:
        return paddle.to_tensor(decoded["values"], dtype=value["paddle"])
    if value.keys() == {"numpy", "values"}:
        return np.array(decoded["values"], dtype=value["numpy"])[()]
    return decoded
