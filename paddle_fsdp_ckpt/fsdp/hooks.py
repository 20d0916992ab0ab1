"""What is put on the layers of a sharded model, one object at a time, and taken off again on close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.jit.dy2static.program_translator import StaticFunction

from ..errors import ShardingError
from .parameter import ShardedParameter
from .runtime import Runtime
from .tensors import tensors_in
from .unit import Unit


class WatchedDict(dict[str, Any], ABC):
    """What a layer holds by name. Nothing that has parameters may come or go, as the flat buffers, and the names in checkpoints, stay."""

    _what: str

    @abstractmethod
    def _has_parameters(self, value: Any) -> bool:
        """Tell whether a value is a parameter, or has some."""

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not self.get(name):
            self._check_free_of_parameters(name, value)
            self._check_free_of_parameters(name, self.get(name))
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._check_free_of_parameters(name, self.get(name))
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """As that of a dict."""
        self._check_free_of_parameters(name, self.get(name))
        return super().pop(name, *default)

    def clear(self) -> None:
        """As that of a dict."""
        for name in list(self):
            del self[name]

    def _check_free_of_parameters(self, name: str, value: Any) -> None:
        if self._has_parameters(value):
            raise ShardingError(
                f"{self._what} '{name}' can't be added, replaced or removed after fully_shard; change the model first, as by "
                "paddle_fsdp_ckpt.drop_submodules, then shard it"
            )


class WatchedParameters(WatchedDict):
    """A layer's parameters by name; looking one up while a forward or backward runs makes it whole, replacing one is refused."""

    _what = "parameter"

    def __init__(self, runtime: Runtime, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self._runtime = runtime

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if isinstance(parameter, ShardedParameter):
            self._runtime.use_outside_unit(parameter._shard)
        return parameter

    def values(self) -> Any:
        """The parameters themselves, made whole as by a look-up: what iterating over an ``nn.ParameterList`` reads."""
        return (self[name] for name in self)

    def _has_parameters(self, value: Any) -> bool:
        return isinstance(value, EagerParamBase)


class WatchedLayers(WatchedDict):
    """A layer's sub-layers by name."""

    _what = "layer"

    def _has_parameters(self, value: Any) -> bool:
        return value is not None and bool(value.parameters())


class ModelHooks:
    """Hooks and replaced attributes of a sharded model's layers, and how to take them off again."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._undo: list[Callable[[], Any]] = []

    def close(self) -> None:
        """Leave the layers as they were found."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def watch_model(self, model: nn.Layer) -> None:
        """Notice when the whole model's forward begins and ends."""
        self.watch_layer(model, [])

        def before(_layer: nn.Layer, _inputs: Any) -> None:
            self._runtime.forget_aborted_forward()

        pre = model.register_forward_pre_hook(before)
        model._forward_pre_hooks.move_to_end(pre._hook_id, last=False)
        self._undo.append(pre.remove)

    def watch_layer(self, layer: nn.Layer, units: Sequence[Unit]) -> None:
        """Make ``units`` whole during the layer's forward and backward."""
        runtime = self._runtime

        def before(layer: nn.Layer, _inputs: Any) -> None:
            if isinstance(layer.forward, StaticFunction):
                raise ShardingError(
                    f"{type(layer).__name__} was made static by paddle.jit.to_static, which can't run sharded parameters; leave it dynamic"
                )
            runtime.begin_forward(units)

        def after(_layer: nn.Layer, _inputs: Any, outputs: Any) -> None:
            tensors = list(tensors_in(outputs))
            # A parameter that is an output itself is used elsewhere.
            parameters = [tensor._shard for tensor in tensors if isinstance(tensor, ShardedParameter)]
            runtime.end_forward(units, parameters)
            if paddle.is_grad_enabled():
                runtime.expect_backward(units, [tensor for tensor in tensors if not isinstance(tensor, ShardedParameter)])

        pre = layer.register_forward_pre_hook(before)
        # Hooks of the user, such as weight_norm's, may need the weights whole.
        layer._forward_pre_hooks.move_to_end(pre._hook_id, last=False)
        self._undo += [pre.remove, layer.register_forward_post_hook(after).remove]

    def watch_parameters(self, layer: nn.Layer) -> None:
        """Notice when a parameter of the layer is used outside its unit's forward, and what is put into the layer."""
        for name, watched in (
            ("_parameters", WatchedParameters(self._runtime, layer._parameters)),
            ("_sub_layers", WatchedLayers(layer._sub_layers)),
        ):
            self._undo.append(partial(_restore_contents, layer, name, layer.__dict__[name], watched))
            layer.__dict__[name] = watched

    def refuse_copies(self, layer: nn.Layer) -> None:
        """Make what would copy dataless parameters out of the layer, or data into them, an error that says what to use."""
        for names, message in _REFUSED.items():
            for name in names:
                layer.__dict__[name] = _Refusal(message)
                self._undo.append(partial(layer.__dict__.pop, name))


def _restore_contents(layer: nn.Layer, name: str, before: dict[str, Any], watched: dict[str, Any]) -> None:
    """Put back the dict that an attribute was, with what it holds now."""
    before.clear()
    before.update(dict(watched.items()))
    layer.__dict__[name] = before


class _Refusal:
    """Stands in for a method that a sharded layer can't have."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ShardingError(self._message)


# A layer around a sharded one asks it for its _state_dict_impl, not for its state_dict.
_REFUSED = {
    ("state_dict", "to_static_state_dict", "_state_dict_impl"): (
        "state_dict() of a sharded model would hold no data: use paddle_fsdp_ckpt.save, paddle_fsdp_ckpt.full_state_dict(model), or "
        "paddle_fsdp_ckpt.sharded_state_dict(model) with paddle.distributed.save_state_dict"
    ),
    ("set_state_dict", "set_dict", "load_dict"): (
        "set_state_dict() can't fill a sharded model: fill it before fully_shard, use paddle_fsdp_ckpt.load or load_full_state_dict, or "
        "parameter.set_value(whole value) for each parameter"
    ),
    # What Layer.to, float, bfloat16 and such, and amp.decorate call.
    ("_to_impl", "astype"): (
        "a sharded model can't be moved or converted to another dtype (to, astype, float, amp.decorate): do it before fully_shard, or "
        "load a checkpoint of it into a model of that dtype with cast=True"
    ),
    ("__deepcopy__", "__reduce_ex__"): (
        "a sharded model can't be copied or pickled: copy it before fully_shard, or use paddle_fsdp_ckpt.save and load"
    ),
}
