"""Parameter objects that are the same memory: one parameter, as when layers hold the same object.

Paddle lets several Parameter objects be one memory, for instance after ``one._share_buffer_to(other)``, ``other.data = one``, or by a
DLPack view of the first. In flat buffers each would have a place of its own, and they would stop following each other. So those that
are the same memory exactly are made one object before.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.regularizer import L1Decay, L2Decay

from ..errors import ShardingError
from .units import NamedParameter, join, walk

_JOINED_ATTRIBUTE = "_joined_to"

_WITHOUT_EFFECT = {"do_model_average"}
"""What a Parameter says and nothing of Paddle's dynamic mode reads; ``EagerParamBase.from_tensor`` sets it otherwise than a layer does."""


@dataclass(frozen=True)
class Joined:
    """Two Parameter objects that were one memory, and are one parameter in a sharded model.

    Attributes:
        name: a structured name of ``parameter``.
        parameter: the object that stays.
        alias_name: a structured name that ``alias`` had.
        alias: the object that goes.
    """

    name: str
    parameter: Any
    alias_name: str
    alias: Any


def collect_aliases(parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Return the same parameters, those that are the same memory (place in it, shape, strides and dtype) as one.

    The object that is first stays, and has the others as its aliases. Parameters without memory are nobody's aliases.

    Raises:
        ShardingError: some are the same memory and differ in settings.
    """
    first: dict[object, NamedParameter] = {}
    found: list[NamedParameter] = []
    for named in parameters:
        memory = _memory(named.parameter)
        kept = first.get(memory)
        if memory is None or kept is None:
            first[memory] = NamedParameter(named.parameter, list(named.names))
            found.append(first[memory])
        else:
            _check_alike(kept, named)
            kept.names += named.names
            kept.aliases += (named,)
    return found


def joined_pairs(parameters: Iterable[NamedParameter]) -> list[Joined]:
    """Return each alias with the object that stays."""
    return [Joined(named.names[0], named.parameter, one.names[0], one.parameter) for named in parameters for one in named.aliases]


def join_aliases(model: nn.Layer, parameters: Iterable[NamedParameter]) -> None:
    """Let every layer hold the first of the objects that are one memory, and take their data away from the others."""
    pairs = {id(pair.alias): pair for pair in joined_pairs(parameters)}
    for _, layer in walk(model) if pairs else ():
        for name, parameter in layer._parameters.items():
            if id(parameter) in pairs:
                layer._parameters[name] = pairs[id(parameter)].parameter
    for pair in pairs.values():
        pair.alias.clear_gradient(False)
        # So that whoever still computes with it gets an error, not old values. After `alias.data = kept` both are one tensor inside Paddle.
        pair.alias._set_impl(EagerParamBase(shape=pair.alias.shape, dtype=pair.alias.dtype))
        # Paddle's tensors take no part in garbage collection: a strong reference would keep the model alive.
        setattr(pair.alias, _JOINED_ATTRIBUTE, (pair.name, weakref.ref(pair.parameter), pair.alias_name))


def joined_to(parameter: Any) -> Joined | None:
    """Return what :func:`join_aliases` made of a Parameter object that went; None for any other."""
    name, kept, alias_name = getattr(parameter, _JOINED_ATTRIBUTE, None) or ("", lambda: None, "")
    return None if kept() is None else Joined(name, kept(), alias_name, parameter)


def other_tensors(model: nn.Layer, parameters: Sequence[NamedParameter]) -> Iterator[tuple[str, paddle.Tensor]]:
    """Yield all tensors with memory that a model's layers hold beside ``parameters``: buffers, statistics, and plain attributes."""
    own = {id(named.parameter) for named in parameters}
    every = own | {id(one.parameter) for named in parameters for one in named.aliases}
    seen: set[int] = set()
    for prefix, layer in walk(model):
        attributes = {name: value for name, value in vars(layer).items() if isinstance(value, paddle.Tensor)}
        for held, known in ((layer._parameters, every), (layer._buffers, set()), (attributes, own)):
            for name, tensor in held.items():
                if tensor is None or id(tensor) in known or id(tensor) in seen:
                    continue
                if tensor.is_dense() and tensor._is_initialized():
                    seen.add(id(tensor))
                    yield join(prefix, name), tensor


def check_memory(parameters: Sequence[NamedParameter], others: Iterable[tuple[str, paddle.Tensor]]) -> None:
    """Refuse tensors that share a part of a parameter's memory, or all of it in another form: they would stop following it.

    Args:
        parameters: as :func:`collect_aliases` returned them.
        others: what else the model holds, by name.

    Raises:
        ShardingError: naming two of them.
    """
    own = {id(named.parameter) for named in parameters}
    tensors = [(named.names[0], named.parameter) for named in parameters if named.parameter._is_initialized()]
    places = sorted(((int(one.data_ptr()), _extent(one), name, one) for name, one in [*tensors, *others]), key=lambda place: place[:3])
    end, before, tensor_before = 0, "", None
    for start, nbytes, name, tensor in places:
        if start < end and not own.isdisjoint((id(tensor), id(tensor_before))):
            raise ShardingError(
                f"'{before}' and '{name}' are different objects that share memory, and would stop following each other: "
                f"{_why_not_one(tensor_before, tensor, own)}; to tie parameters, let both layers hold the same one, and compute what is a "
                "view of one in the forward"
            )
        if start + nbytes > end:
            end, before, tensor_before = start + nbytes, name, tensor


def _memory(parameter: EagerParamBase) -> tuple[object, ...] | None:
    if not parameter._is_initialized() or 0 in parameter.shape:
        return None
    return str(parameter.place), parameter.data_ptr(), tuple(parameter.shape), tuple(parameter.strides), str(parameter.dtype)


def _extent(tensor: paddle.Tensor) -> int:
    """Return over how many bytes a tensor's elements lie."""
    if 0 in tensor.shape:
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
    return (int(last) + 1) * int(tensor.element_size())


def _why_not_one(one: Any, other: Any, parameters: Collection[int]) -> str:
    if one is other or not {id(one), id(other)}.issubset(parameters):
        return "one of them is no parameter, but a buffer or an attribute"
    facts = {
        "place in the memory": (one.data_ptr(), other.data_ptr()),
        "shape": (list(one.shape), list(other.shape)),
        "strides": (list(one.strides), list(other.strides)),
        "dtype": (str(one.dtype), str(other.dtype)),
    }
    differ = [name for name, (mine, its) in facts.items() if mine != its]
    return f"only parameters that are the same memory exactly can be made one, and these differ in {', '.join(differ)}"


def _check_alike(kept: NamedParameter, alias: NamedParameter) -> None:
    one, other = _settings(kept.parameter), _settings(alias.parameter)
    for name in sorted({*one, *other}):
        mine, its = one.get(name), other.get(name)
        if not _is_same(mine, its):
            raise ShardingError(
                f"'{kept.names[0]}' and '{alias.names[0]}' are different Parameter objects over one memory, of which fully_shard makes "
                f"one parameter, and their {name} differs: {_shown(mine)} and {_shown(its)}; set it alike, or give each a memory of its own"
            )


def _settings(parameter: EagerParamBase) -> dict[str, Any]:
    attributes = {name: value for name, value in vars(parameter).items() if not name.startswith("_") and name not in _WITHOUT_EFFECT}
    return {"stop_gradient": bool(parameter.stop_gradient), **attributes}


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (paddle.Tensor, np.ndarray)):
        return False
    return bool(vars(one) == vars(other) if isinstance(one, (L1Decay, L2Decay)) else one == other)


def _shown(value: Any) -> str:
    return f"{type(value).__name__}({value._coeff})" if isinstance(value, (L1Decay, L2Decay)) else f"{value!r:.100}"
