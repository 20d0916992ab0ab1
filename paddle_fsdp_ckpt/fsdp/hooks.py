"""What is put on the layers of a sharded model, one object at a time, and taken off again on close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from ..errors import ShardingError
from .parameter import ShardedParameter
from .runtime import Runtime, tensors_in
from .unit import Unit


class WatchedParameters(dict[str, Any]):
    """A layer's parameters by name; looking one up while a forward or backward runs makes it whole, replacing one is refused."""

    def __init__(self, runtime: Runtime, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self._runtime = runtime

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if isinstance(parameter, ShardedParameter):
            self._runtime.use_outside_unit(parameter._shard)
        return parameter

    def __setitem__(self, name: str, parameter: EagerParamBase | None) -> None:
        if parameter is not None and parameter is not self.get(name):
            raise ShardingError(f"parameter '{name}' can't be added or replaced after fully_shard; change the model first, then shard it")
        super().__setitem__(name, parameter)


class ModelHooks:
    """Hooks and replaced attributes of a sharded model's layers.

    Layers are not kept alive by this.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._undo: list[Callable[[], None]] = []

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

        def before(_layer: nn.Layer, _inputs: Any) -> None:
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
        post = layer.register_forward_post_hook(after)
        self._undo += [pre.remove, post.remove]

    def watch_parameters(self, layer: nn.Layer) -> None:
        """Notice when a parameter of the layer is used outside its unit's forward."""
        layer.__dict__["_parameters"] = WatchedParameters(self._runtime, layer._parameters)

    def refuse_state_dict(self, layer: nn.Layer) -> None:
        """Make the layer's state dict, which would hold dataless parameters, an error that says what to use."""

        def state_dict(*_args: Any, **_kwargs: Any) -> Any:
            raise ShardingError(
                "state_dict() of a sharded model would hold no data: use paddle_fsdp_ckpt.save, or "
                "paddle_fsdp_ckpt.sharded_state_dict(model) with paddle.distributed.save_state_dict"
            )

        for name in ("state_dict", "to_static_state_dict"):
            layer.__dict__[name] = state_dict
