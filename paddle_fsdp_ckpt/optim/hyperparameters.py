"""An optimizer's hyper-parameters as data: what a checkpoint says of them, and how those of now differ, in words.

They are described for each parameter as they take effect, and parameters with the same ones are listed together. So a description
doesn't depend on how parameters are divided into param groups, nor on the order of these. From Paddle 3.3's
``python/paddle/optimizer/*.py``. Learning rates and their schedulers are in :mod:`.schedule`; of the rate only a parameter's factor is
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.regularizer import L1Decay, L2Decay

from ..errors import counted
from ..fsdp import ShardedParameter
from ..fsdp.paddle_runtime import PaddleShard, paddle_runtime
from ..optimizer_states import MAY_BE_UNKNOWN
from .fused_tensors import real_decay
from .parameters import SteppedParameter, parameter_groups
from .schedule import JsonValue

_IN_OTHER_WORDS = {"weight_decay", "grad_clip", "regularization_method", "regularization_coeff"}
"""What a param group can set and is not described under this name, or not as it stands there."""

_OF_OPTIMIZER: dict[str, dict[str, str]] = {
    "Adam": {"amsgrad": "_amsgrad"},
    "AdamW": {"amsgrad": "_amsgrad", "use_lowprecision_moment": "_use_lowprecision_moment"},
    "ASGD": {"batch_num": "_n"},
}
"""What an optimizer has once for all its groups: its name in Paddle's constructor, and the attribute."""

_ROUNDED: dict[str, dict[str, str]] = {"Rprop": {"learning_rate_range": "_learning_rate_range", "etas": "_etas"}}
"""The same, where a first step rounds it, see :func:`_as_stepped`."""

_NO_ATTRIBUTES: dict[str, Any] = {}

_CLIP_SETTINGS = ("clip_norm", "min", "max", "auto_skip_clip")


def describe_hyperparameters(optimizer: Any, parameters: Sequence[SteppedParameter]) -> list[JsonValue]:
    """Return an optimizer's hyper-parameters as JSON values. Nothing is changed, and no collective is needed.

    Args:
        optimizer: plain, bound, or stepping the fused buffers of Paddle's own ``fully_shard``; of any class.
        parameters: what it holds.

    Returns:
        One dict for each set of parameters with the same settings, in the order of their first: ``{"optimizer": class name,
        "parameters": [structured names], "settings": {name: value}}``. A parameter is in one of them.
    """
    held = [one.parameter for one in parameters]
    groups = parameter_groups(optimizer)
    group_of = {id(parameter): group for group in groups for parameter in group["params"]} if len(groups) > 1 else {}
    without_groups = next(iter(groups), {})
    described: dict[str, dict[str, JsonValue]] = {}
    # By traits; parameters with the same ones mostly follow each other.
    names_of: dict[tuple[object, ...], list[JsonValue]] = {}
    decays = _decays(optimizer, parameters)
    last: tuple[object, ...] | None = None
    names: list[JsonValue] = []
    for one, traits in zip(parameters, _traits(optimizer, parameters, held, group_of, decays), strict=True):
        if traits != last:
            last = traits
            if traits not in names_of:
                settings = dict(sorted(_settings(optimizer, group_of.get(id(one.parameter), without_groups), one, decays).items()))
                new: dict[str, JsonValue] = {"optimizer": type(optimizer).__name__, "parameters": [], "settings": settings}
                names_of[traits] = described.setdefault(json.dumps(settings), new)["parameters"]
            names = names_of[traits]
        names.append(one.slot.names[0])
    return list(described.values())


def own_settings(parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return what single parameters say otherwise than most do: place, learning rate factor, need_clip, and regularizer.

    It is asked at each step, of all parameters, so it looks at no more than these three.
    """
    found: list[tuple[Any, ...]] = []
    for place, parameter in enumerate(parameters):
        factor, needs_clip, regularizer = _own(parameter.__dict__)
        if factor != 1.0 or needs_clip is not True or regularizer is not None:
            kind, coefficient = type(regularizer).__name__, getattr(regularizer, "_coeff", regularizer)
            found.append((place, _json(factor), bool(needs_clip), kind, coefficient))
    return found


def _traits(
    optimizer: Any,
    parameters: Sequence[SteppedParameter],
    held: Sequence[Any],
    group_of: Mapping[int, Mapping[str, Any]],
    decays: Mapping[int, bool],
) -> Iterable[tuple[object, ...]]:
    """Return of each parameter all by which its settings can differ from those of another, in a form that is quick to make."""
    own = [_own(parameter.__dict__) for parameter in held]
    traits: list[Iterable[object]] = [
        [factor if type(factor) is float else repr(factor) for factor, _, _ in own],
        [bool(needs_clip) for _, needs_clip, _ in own],
        [id(regularizer) for _, _, regularizer in own],
        map(type, parameters),
    ]
    if _paddles_class(optimizer) in _ROUNDED:
        traits.append([id(parameter.dtype) for parameter in held])  # there is one object for each, and Paddle takes long to compare them
    if group_of:
        traits.append([id(group_of.get(id(parameter))) for parameter in held])
    if decays:
        traits.append([decays.get(id(parameter), True) for parameter in held])
    reductions = [_gradient_reduction(parameter) for parameter in held]
    if any(reductions):
        traits.append(reductions)
    if getattr(optimizer, "_lr_ratio", None) is not None:
        traits.append([json.dumps(_lr_ratio(optimizer, one)) for one in parameters])
    return zip(*traits, strict=True)


def _own(said: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return what a parameter with these attributes says for itself: learning rate factor, need_clip, and regularizer."""
    return (said.get("optimize_attr") or _NO_ATTRIBUTES).get("learning_rate", 1.0), said.get("need_clip", True), said.get("regularizer")


def differences(saved: Sequence[JsonValue], now: Sequence[JsonValue]) -> list[str]:
    """Return in words how hyper-parameters differ from saved ones, parameter by parameter; parameters that only one has are left out.

    Args:
        saved: what :func:`describe_hyperparameters` returned when the checkpoint was saved; of several optimizers, end to end.
        now: the same of now. A setting that only one of them knows differs from None, save for what is allowed to be unknown.

    Returns:
        A sentence for each difference that parameters share: ``AdamW, 12 parameters (first 'a.weight'): weight_decay was saved as 0.1
        and is 0.0 now``.
    """
    if list(saved) == list(now):
        return []
    before = {name: entry for entry in saved for name in entry["parameters"]}
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for entry in now:
        unequal: dict[int, list[tuple[str, str, str, str]]] = {}
        for name in entry["parameters"]:
            other = before.get(name)
            if other is None:
                continue
            if id(other) not in unequal:
                unequal[id(other)] = [
                    (entry["optimizer"], what, json.dumps(was), json.dumps(is_now)) for what, was, is_now in _unequal(other, entry)
                ]
            for difference in unequal[id(other)]:
                found.setdefault(difference, []).append(name)
    return [
        f"{optimizer}, {counted(len(names), 'parameter')} ({'first ' * (len(names) > 1)}'{names[0]}'): "
        f"{what} was saved as {_shown(was)} and is {_shown(is_now)} now"
        for (optimizer, what, was, is_now), names in found.items()
    ]


def _unequal(saved: JsonValue, now: JsonValue) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    if saved["optimizer"] != now["optimizer"]:
        yield "the optimizer", saved["optimizer"], now["optimizer"]
        return
    yield from unequal_settings(saved["settings"], now["settings"])


def unequal_settings(saved: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    """Yield name and both values of each setting that differs, and is not one that may be unknown."""
    for what in sorted({*saved, *now}):
        was, is_now = saved.get(what), now.get(what)
        if was != is_now and not (what in MAY_BE_UNKNOWN and None in (was, is_now)):
            yield what, was, is_now


def _shown(text: str) -> str:
    value = json.loads(text)
    if isinstance(value, dict) and "kind" in value:
        settings = ", ".join(f"{key}={item!r}" for key, item in value.items() if key != "kind")
        return f"{value['kind']}({settings})"
    return repr(value)


def _settings(optimizer: Any, group: Mapping[str, Any], one: SteppedParameter, decays: Mapping[int, bool]) -> dict[str, JsonValue]:
    cls = _paddles_class(optimizer)
    parameter = one.parameter
    in_groups = bool(optimizer._param_groups) and isinstance(optimizer._param_groups[0], dict)
    settings = {
        key: _json(group[key] if in_groups and key in group else _attribute(optimizer, key, default))
        for key, default in optimizer._default_dict.items()
        if key not in _IN_OTHER_WORDS
    }
    settings.update({key: _json(getattr(optimizer, attribute)) for key, attribute in _OF_OPTIMIZER.get(cls, {}).items()})
    settings.update({key: _as_stepped(getattr(optimizer, attribute), parameter.dtype) for key, attribute in _ROUNDED.get(cls, {}).items()})
    clip = group.get("grad_clip") if in_groups else optimizer._grad_clip
    attributes = getattr(parameter, "optimize_attr", None) or {}
    settings.update(
        {
            "learning_rate_factor": _json(attributes.get("learning_rate", 1.0)),
            "multi_precision": bool(getattr(optimizer, "_multi_precision", False)),
            "grad_clip": _clip(clip),
            "need_clip": clip is None or bool(getattr(parameter, "need_clip", True)),
        }
    )
    reduction = _gradient_reduction(parameter)
    if reduction is not None:
        settings["gradient_reduction"] = reduction
    regularizer = _regularizer(optimizer, group, parameter, cls)
    if cls == "AdamW":
        coefficient = float(group["weight_decay"] if in_groups else optimizer._weight_decay)
        settings["weight_decay"] = coefficient if decays.get(id(parameter), True) else 0.0
        settings["regularizer"] = regularizer
        settings["lr_ratio"] = _lr_ratio(optimizer, one)
    else:
        settings["weight_decay"] = regularizer
    return settings


def _gradient_reduction(parameter: Any) -> str | None:
    """Return what is made of the ranks' gradients; None where our runtime doesn't do it."""
    return parameter._shard.unit.runtime.gradient_reduction if isinstance(parameter, ShardedParameter) else None


def _paddles_class(optimizer: Any) -> str:
    """Return the name of the class of ``paddle.optimizer`` that the optimizer is of, or a subclass of."""
    return next(cls.__name__ for cls in type(optimizer).__mro__ if getattr(paddle.optimizer, cls.__name__, None) is cls)


def _attribute(optimizer: Any, key: str, default: Any) -> Any:
    """Return what an optimizer without groups goes by; with groups, Paddle overwrites these."""
    return getattr(optimizer, f"_{key}", getattr(optimizer, key, default))


def _decays(optimizer: Any, parameters: Sequence[SteppedParameter]) -> dict[int, bool]:
    """Return what AdamW's ``apply_decay_param_fun`` says of each parameter, by id, where there is one."""
    ask = getattr(optimizer, "_apply_decay_param_fun", None)
    if ask is None:
        return {}
    runtime = None if all(_is_held_itself(one) for one in parameters) else paddle_runtime()
    if runtime is not None:
        by_name = real_decay(optimizer, runtime)
        return {id(one.parameter): by_name.get(one.parameter.name, True) for one in parameters}
    return {id(one.parameter): bool(ask(one.parameter.name)) for one in parameters}


def _lr_ratio(optimizer: Any, one: SteppedParameter) -> JsonValue:
    ask = getattr(optimizer, "_lr_ratio", None)
    return None if ask is None or not _is_held_itself(one) else _json(ask(one.parameter))


def _is_held_itself(one: SteppedParameter) -> bool:
    """Tell whether the optimizer holds this very parameter; Paddle's runtime cuts others, of other names."""
    return not isinstance(one, PaddleShard)


def _regularizer(optimizer: Any, group: Mapping[str, Any], parameter: Any, cls: str) -> JsonValue:
    """Return the regularizer that a parameter gets: its own, or else the optimizer's. Momentum fuses L2 decay into its update."""
    own = getattr(parameter, "regularizer", None)
    if own is None and cls == "Momentum":
        method = group.get("regularization_method", optimizer._regularization_method)
        if method == "l2_decay":
            own = L2Decay(group.get("regularization_coeff", optimizer._regularization_coeff))
    effective = own if own is not None else optimizer.regularization
    if isinstance(effective, (float, int)):
        effective = L2Decay(float(effective))
    if isinstance(effective, (L1Decay, L2Decay)):
        coefficient = float(effective._coeff)
        return {"kind": type(effective).__name__, "coefficient": coefficient} if coefficient else None
    return None if effective is None else {"kind": type(effective).__name__}


def _clip(clip: Any) -> JsonValue:
    if clip is None:
        return None
    return {"kind": type(clip).__name__, **{name: _json(getattr(clip, name)) for name in _CLIP_SETTINGS if hasattr(clip, name)}}


def _json(value: Any) -> JsonValue:
    """Return a setting as a JSON value; of what has none, its class."""
    if isinstance(value, (np.generic, np.ndarray, paddle.Tensor)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        items = [_json(item) for item in value]
        return items[0] if len(items) == 1 else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else {"kind": type(value).__name__}


def _as_stepped(value: Any, dtype: Any) -> JsonValue:
    """Return numbers as a first step makes them: Rprop turns its own into a tensor of the parameter's dtype then."""
    rounded = paddle.to_tensor(_json(value), dtype=dtype).astype("float32").numpy()
    return [float(str(number)) for number in rounded.reshape([-1])]
