"""Cut a model into units: the layers whose parameters are gathered and released together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from ..errors import ShardingError, listing

ROOT = "(model)"
"""Name of the unit of the parameters that the model itself holds; no layer's name."""


@dataclass(slots=True)
class NamedParameter:
    """A parameter and all its structured names, in the order in which the model's layers are walked.

    Attributes:
        parameter: Paddle's.
        names: all of them, those of ``aliases`` among them.
        aliases: other Parameter objects that are exactly its memory, each with its own names; see :mod:`.aliases`.
    """

    parameter: EagerParamBase
    names: list[str]
    aliases: tuple[NamedParameter, ...] = ()


@dataclass
class UnitPlan:
    """The parameters that are gathered and released together, and the name of the layer that brought them in."""

    name: str
    parameters: list[NamedParameter] = field(default_factory=list)


@dataclass
class HookedLayer:
    """A layer during whose forward and backward the parameters of some units must be whole."""

    layer: nn.Layer
    units: list[UnitPlan]


@dataclass
class ModelPlan:
    """A model's units, each with at least one parameter, and the layers that need them."""

    units: list[UnitPlan]
    hooked: list[HookedLayer]


def named_parameters(model: nn.Layer) -> list[NamedParameter]:
    """Return each parameter once, with all its structured names (more than one when tied); running statistics count as buffers."""
    found: list[NamedParameter] = []
    for prefix, layer in walk(model):
        own = layer._parameters
        if own:
            # Not .values(), which makes a sharded model's whole.
            named = [(name, one) for name, one in own.items() if one is not None]
            if isinstance(layer, _NORMS_WITH_STATISTICS):
                named = [(name, one) for name, one in named if not is_statistic(layer, name)]
            beginning = _beginning(prefix)
            found += [NamedParameter(one, [beginning + name]) for name, one in named]
    if len({id(one.parameter) for one in found}) == len(found):
        return found
    by_id: dict[int, NamedParameter] = {}
    for one in found:
        known = by_id.setdefault(id(one.parameter), one)
        if known is not one:
            known.names += one.names
    return list(by_id.values())


def named_buffers(model: nn.Layer) -> Iterator[tuple[str, paddle.Tensor]]:
    """Yield (structured name, tensor) of every persistable buffer, and of running statistics, such as BatchNorm's mean."""
    for prefix, layer in walk(model):
        if isinstance(layer, _NORMS_WITH_STATISTICS):
            for short_name, parameter in layer._parameters.items():
                if parameter is not None and is_statistic(layer, short_name):
                    yield join(prefix, short_name), parameter
        buffers = layer._buffers
        for short_name, buffer in buffers.items() if buffers else ():
            if buffer is not None and short_name not in layer._non_persistable_buffer_names_set:
                yield join(prefix, short_name), buffer


def check_names(parameters: Iterable[NamedParameter], buffers: Iterable[tuple[str, paddle.Tensor]]) -> None:
    """Raise where one structured name of a model stands for several tensors, of which a checkpoint could hold only one.

    Raises:
        ShardingError: naming them.
    """
    names = [name for named in parameters for name in named.names]
    names += [name for name, _ in buffers]
    twice = sorted(name for name, count in Counter(names).items() if count > 1) if len(set(names)) < len(names) else []
    if twice:
        raise ShardingError(
            f"the model has several tensors of one name: {listing(twice)}; is there a dot in a sub-layer's name or a LayerDict's key?"
        )


def is_statistic(layer: nn.Layer, short_name: str) -> bool:
    """Tell whether a layer's parameter is a running statistic: Paddle makes it a Parameter, and writes to it in each forward.

    Each rank takes it of the data that it saw; the ranks' are averaged at each step.
    """
    return isinstance(layer, _NORMS_WITH_STATISTICS) and short_name in ("_mean", "_variance")


def plan_units(
    model: nn.Layer, unit_layers: Sequence[type[nn.Layer] | str] | None, parameters: Sequence[NamedParameter] | None = None
) -> ModelPlan:
    """Find the units of ``model``.

    Each repeated block (or each layer named by ``unit_layers``) is one unit; each remaining layer that has parameters of its
    own is a unit too. A parameter belongs to the innermost unit of the first layer that has it; another layer that is tied to it
    needs that unit as well.

    Args:
        model: the model; not changed.
        unit_layers: layer classes or class names; None to find the repeated blocks.
        parameters: those of the model; by default :func:`named_parameters`, without aliases.

    Raises:
        ShardingError: a class of ``unit_layers`` does not occur in the model.
    """
    blocks = _repeated_blocks(model) if unit_layers is None else _matching_layers(model, unit_layers)
    every = named_parameters(model) if parameters is None else parameters
    known = {id(one.parameter): named for named in every for one in (named, *named.aliases)}
    unit_of: dict[int, UnitPlan] = {}
    plans: dict[int, UnitPlan] = {}
    needed: dict[int, HookedLayer] = {}

    def visit(prefix: str, layer: nn.Layer, block: tuple[str, nn.Layer] | None, above: tuple[int, ...]) -> None:
        block = (prefix, layer) if id(layer) in blocks else block
        name, unit_layer = block or (prefix, layer)
        for short_name, parameter in layer._parameters.items():
            if parameter is None or is_statistic(layer, short_name):
                continue
            named = known[id(parameter)]
            if id(named) not in unit_of:
                plan = plans.setdefault(id(unit_layer), UnitPlan(name or ROOT))
                plan.parameters.append(named)
                unit_of[id(named)] = plan
            hooked = needed.setdefault(id(unit_layer), HookedLayer(unit_layer, []))
            if not any(unit is unit_of[id(named)] for unit in hooked.units):
                hooked.units.append(unit_of[id(named)])
        for child_name, child in _children(layer):
            if id(child) not in above:
                visit(join(prefix, child_name), child, block, (*above, id(layer)))

    visit("", model, None, ())
    return ModelPlan(list(plans.values()), list(needed.values()))


def walk(model: nn.Layer) -> list[tuple[str, nn.Layer]]:
    """Return (structured name, layer) depth first, a layer that hangs in several places once for each."""
    found: list[tuple[str, nn.Layer]] = []

    def visit(prefix: str, layer: nn.Layer, above: tuple[int, ...]) -> None:
        found.append((prefix, layer))
        children = layer._sub_layers
        if children:
            beginning, here = _beginning(prefix), (*above, id(layer))
            for name, child in children.items():
                if child is not None and id(child) not in above:
                    visit(beginning + name, child, here)

    visit("", model, ())
    return found


def _beginning(prefix: str) -> str:
    return f"{prefix}." if prefix else ""


def join(prefix: str, name: str) -> str:
    """Join two parts of a structured name."""
    return _beginning(prefix) + name


_NORMS_WITH_STATISTICS = (nn.BatchNorm, nn.layer.norm._BatchNormBase)
_CONTAINERS = (nn.LayerList, nn.LayerDict, nn.Sequential)


def _children(layer: nn.Layer) -> list[tuple[str, nn.Layer]]:
    return [(name, child) for name, child in layer._sub_layers.items() if child is not None]


def _repeated_blocks(model: nn.Layer) -> set[int]:
    """Return the ids of the outermost layers that look like blocks.

    A block hangs in a LayerList, LayerDict or Sequential, or has sub-layers and a sibling of its own class, or is a container that
    computes by itself.
    """
    found: set[int] = set()

    def visit(parent: nn.Layer) -> None:
        children = [child for _, child in _children(parent)]
        for child in children:
            repeated = bool(child._sub_layers) and sum(type(other) is type(child) for other in children) > 1
            if _runs_own_code(child) and (isinstance(child, _CONTAINERS) or isinstance(parent, _CONTAINERS) or repeated):
                found.add(id(child))
            else:
                visit(child)

    if isinstance(model, _CONTAINERS) and _runs_own_code(model):
        found.add(id(model))
    visit(model)
    return found


def _runs_own_code(layer: nn.Layer) -> bool:
    """Tell whether a layer is more than a container; nn.LSTM, for one, is a LayerList that uses its cells' weights itself."""
    return all(type(layer).forward is not container.forward for container in _CONTAINERS)


def _matching_layers(model: nn.Layer, unit_layers: Sequence[type[nn.Layer] | str]) -> set[int]:
    layers = [layer for _, layer in walk(model)]
    for wanted in unit_layers:
        if not any(_is_a(layer, wanted) for layer in layers):
            name = wanted if isinstance(wanted, str) else wanted.__name__
            there = listing(sorted({type(layer).__name__ for layer in layers}))
            raise ShardingError(f"unit_layers: the model has no layer of class {name}; it has {there}")
    return {id(layer) for layer in layers if any(_is_a(layer, wanted) for wanted in unit_layers)}


def _is_a(layer: nn.Layer, wanted: type[nn.Layer] | str) -> bool:
    return type(layer).__name__ == wanted if isinstance(wanted, str) else isinstance(layer, wanted)
