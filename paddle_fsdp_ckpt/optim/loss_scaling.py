"""``paddle.amp.GradScaler`` with sharded models: every rank unscales its pieces of the gradients, and all skip a step or none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import _legacy_C_ops
from paddle.amp.grad_scaler import AmpScaler, OptimizerState

from ..errors import ShardingError
from ..fsdp import ParameterShard
from ..warn import warn_caller
from .binding import binding_of
from .schedule import JsonValue

_BOUND_ATTRIBUTE = "_fully_shard_unscale"

_SETTINGS = ("incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf", "use_dynamic_loss_scaling")


def bind_grad_scaler(scaler: Any) -> None:
    """Let a ``paddle.amp.GradScaler`` work with optimizers that are bound to sharded models. Binding twice does nothing.

    Afterwards ``scaler.step(opt)``, ``scaler.minimize(opt, loss)`` and ``scaler.unscale_(opt)`` divide this rank's reduced gradients by
    the scale, once; where any rank finds an infinity or NaN, all skip the step and lower the scale alike. These three are collective
    operations. Only this object is changed, and for other optimizers it works as before.

    A scaler that is not bound is refused by bound optimizers.

    Args:
        scaler: a ``GradScaler`` or ``AmpScaler``.

    Raises:
        ShardingError: it is something else, such as fleet's ``MixPrecisionScaler`` around one.
    """
    _check_scaler(scaler)
    if _BOUND_ATTRIBUTE in scaler.__dict__:
        return
    unscale = _Unscale(scaler)
    scaler.__dict__[_BOUND_ATTRIBUTE] = unscale
    # GradScaler.unscale_ passes over an object's own _unscale.
    scaler.__dict__.update({name: unscale for name in ("_unscale", "unscale_") if hasattr(scaler, name)})


def warn_of_pending_update(scaler: Any) -> None:
    """Warn where a scaler's ``step()`` has run and its ``update()`` has not: a save now would lose what that does to the scale.

    Raises:
        ShardingError: it is not a ``GradScaler`` or ``AmpScaler``.
    """
    _check_scaler(scaler)
    if not (scaler._enable and scaler._use_dynamic_loss_scaling):  # a disabled one has no states
        return
    if any(states["state"] is OptimizerState.STEPPED for states in scaler._optimizer_states.values()):
        warn_caller(f"save between step() and update() of a {type(scaler).__name__}: a resumed run lacks that update; save after update()")


def describe_grad_scaler(scaler: Any) -> dict[str, JsonValue]:
    """Return a scaler's state and settings as JSON values.

    Returns:
        ``{"enabled": False}``, or with ``"enabled": True`` also ``"scale"``, ``"incr_count"``, ``"decr_count"`` and ``"settings"``.

    Raises:
        ShardingError: it is not a ``GradScaler`` or ``AmpScaler``.
    """
    _check_scaler(scaler)
    if not scaler._enable:
        return {"enabled": False}
    return {
        "enabled": True,
        "scale": float(scaler._scale.item()),
        "incr_count": int(scaler._incr_count),
        "decr_count": int(scaler._decr_count),
        "settings": {name: getattr(scaler, f"_{name}") for name in _SETTINGS},
    }


def restore_grad_scaler(scaler: Any, saved: dict[str, JsonValue]) -> str | None:
    """Give a scaler the scale and the counters that :func:`describe_grad_scaler` returned; its settings stay, and a fixed scale too.

    Returns:
        How the scaler differs from the saved one, in words; None where it doesn't.

    Raises:
        ShardingError: it is not a ``GradScaler`` or ``AmpScaler``.
    """
    now = describe_grad_scaler(scaler)
    if now["enabled"] != saved["enabled"]:
        words = {True: "enabled", False: "disabled"}
        return f"{type(scaler).__name__} was saved {words[saved['enabled']]} and is {words[now['enabled']]} now"
    if not now["enabled"]:
        return None
    if scaler._use_dynamic_loss_scaling and saved["settings"]["use_dynamic_loss_scaling"]:
        scaler._scale = paddle.to_tensor(np.array([saved["scale"]], dtype=np.float32))
        scaler._incr_count, scaler._decr_count = saved["incr_count"], saved["decr_count"]
        scaler._optimizer_states = defaultdict(lambda: {"state": OptimizerState.INIT})
        now["scale"] = saved["scale"]
    pairs = [("scale", saved["scale"], now["scale"])]
    pairs += [(name, saved["settings"][name], now["settings"][name]) for name in _SETTINGS]
    changed = [f"{name} was saved as {was} and is {is_now} now" for name, was, is_now in pairs if was != is_now]
    return f"{type(scaler).__name__}: {'; '.join(changed)}" if changed else None


def _check_scaler(scaler: Any) -> None:
    if not isinstance(scaler, AmpScaler):
        inner = "; give the scaler that it wraps" if hasattr(scaler, "_inner_scaler") else ""
        raise ShardingError(f"{type(scaler).__name__} is not a paddle.amp.GradScaler{inner}")


class _Unscale:
    """What a bound scaler does instead of its own ``_unscale`` and ``unscale_``."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._original: Callable[[Any], None] = scaler._unscale

    def __call__(self, optimizer: Any) -> None:
        scaler, binding = self._scaler, binding_of(optimizer)
        if binding is None:
            self._original(optimizer)
        if binding is None or not scaler._enable:
            return
        states = scaler._optimizer_states[id(optimizer)]
        if states["state"] is OptimizerState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if states["state"] is OptimizerState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        found = binding.unscale(lambda shards: _divide(shards, scaler._scale))
        scaler._found_inf = paddle.to_tensor([found])
        states["state"] = OptimizerState.UNSCALED


def _divide(shards: Sequence[ParameterShard], scale: paddle.Tensor) -> bool:
    """Divide this rank's pieces of the gradients by ``scale``, shape [1] float32, in place; tell whether any is infinite or NaN."""
    gradients: dict[Any, list[paddle.Tensor]] = defaultdict(list)
    for shard in shards:
        gradient = shard.gradient()
        if gradient is not None:
            gradients[gradient.dtype].append(gradient)
    found = paddle.zeros([1], dtype="bool")
    any_found = False
    for dtype, tensors in gradients.items():
        in_float64 = dtype == paddle.float64
        _legacy_C_ops.check_finite_and_unscale(tensors, scale.astype("float64") if in_float64 else scale, tensors, found)
        any_found = any_found or bool(found)
    return any_found
