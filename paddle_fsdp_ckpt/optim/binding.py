"""Bind an optimizer to the sharded model that it steps: what needs all shards, or the parameters local, is put on this one object."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import paddle

from ..errors import ShardingError
from ..fsdp import ParameterShard, Runtime, ShardedParameter
from ..fsdp.paddle_contexts import registered_context
from .aliases import hold_once, joined_parameters
from .binding_checks import check_can_step, check_is_optimizer, check_parameters, check_regularizers
from .catalog import check_states_known, entry_of
from .clipping import ShardedClip
from .given_gradients import check_given_gradients
from .gradient_norm import warn_without_gradients
from .hyperparameters import describe_hyperparameters, own_settings
from .parameters import parameter_groups
from .stepped_gradients import SteppedGradients

_BINDING_ATTRIBUTE = "_fully_shard_binding"


def bind_optimizer(optimizer: Any) -> None:
    """Bind a plain optimizer of ``paddle.optimizer`` to the sharded model whose parameters it holds.

    Binding twice does nothing, save that it takes note of parameters that the optimizer was given meanwhile, as the next step would.

    Afterwards ``step``, ``minimize``, ``apply_gradients`` and ``clear_grad`` work as ever, with param groups, regularizers, decay
    callbacks, per-parameter learning rates and gradient clipping. All but ``clear_grad`` are collective operations.

    Args:
        optimizer: made before or after ``fully_shard``; all its parameters must belong to sharded models.

    Raises:
        ShardingError: it holds parameters that are not sharded, or none; or, of what ``fully_shard`` made one parameter, an object that
            went and not the one that stays, or both with different settings.
        UnsupportedOptimizerError: its class or its clip can't step a sharded model right, or it has stepped already.
    """
    binding = binding_of(optimizer)
    if binding is not None:
        binding.look_at_parameters()
        return
    check_is_optimizer(optimizer)
    check_optimizer(optimizer, {id(one.alias) for one in joined_parameters(optimizer)})
    hold_once(optimizer)
    _Binding(optimizer)


def binding_of(optimizer: Any) -> _Binding | None:
    """Return the binding of an optimizer, or None."""
    binding = optimizer.__dict__.get(_BINDING_ATTRIBUTE)
    return binding if isinstance(binding, _Binding) else None


def unbind_optimizer(optimizer: Any) -> None:
    """Undo :func:`bind_optimizer`; the optimizer's states stay as they are."""
    binding = binding_of(optimizer)
    if binding is not None:
        binding.close()


def bound_optimizers(runtime: Runtime) -> list[Any]:
    """Return the optimizers that are bound to a model, in the same order on every rank."""
    bindings = [observer for observer in runtime.observers if isinstance(observer, _Binding)]
    return [binding.optimizer for binding in sorted(bindings, key=lambda binding: binding.first_index)]


def optimizer_shards(optimizer: Any) -> list[ParameterShard]:
    """Return the parameters of an optimizer over a sharded model.

    Raises:
        ShardingError: it holds parameters that are not sharded, or none.
    """
    check_parameters(optimizer)
    return [shard for shards in _shards_of_groups(optimizer) for shard in shards]


def _shards_of_groups(optimizer: Any) -> list[list[ParameterShard]]:
    return [[one._shard for one in group["params"] if isinstance(one, ShardedParameter)] for group in parameter_groups(optimizer)]


def check_optimizer(optimizer: Any, about_to_shard: Collection[int]) -> None:
    """Raise where an optimizer can't be bound to the model of its parameters, sharded or (by id in ``about_to_shard``) about to be.

    Raises:
        ShardingError: it holds parameters that are not sharded, or none; or it is bound already.
        UnsupportedOptimizerError: its class or its clip can't step a sharded model right, or it has stepped already.
    """
    check_is_optimizer(optimizer)
    entry_of(optimizer)
    if binding_of(optimizer) is not None:
        raise ShardingError(
            f"{type(optimizer).__name__}: it is bound already, to a model that was sharded before; make a new optimizer of this model's "
            "parameters"
        )
    check_can_step(optimizer, about_to_shard)


class _Binding:
    """One bound optimizer.

    Attributes:
        has_states: whether some rank keeps states in it, which a rank that keeps nothing of those parameters can't tell by itself.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._held: list[int] = []
        self._runtimes: list[Runtime] = []
        self.look_at_parameters()
        self._apply_optimize: Callable[..., Any] = optimizer._apply_optimize
        self._step: Callable[[], Any] = optimizer.step
        self._set_auxiliary_var: Callable[[str, Any], None] = optimizer._set_auxiliary_var
        self._is_unscaled = False
        self._is_compared = False
        self.has_states = False
        # A scaler that isn't bound multiplies the marks that it finds for gradients.
        self._sentinels = [shard for shard in (self._shards[0], self._shards[-1]) if not shard.parameter.stop_gradient]
        for shard in self._sentinels:
            shard.is_sentinel = True
        replaced = {
            _BINDING_ATTRIBUTE: self,
            "step": self._sharded_step,
            "backward": self._collect_gradients,
            "apply_gradients": self._apply_given_gradients,
            "_apply_optimize": self._apply_optimize_to_local,
            "_set_auxiliary_var": self._note_found_inf,
            "state_dict": _refuse_state_dict,
            "set_state_dict": _refuse_state_dict,
        }
        self._found = {name: optimizer.__dict__.get(name) for name in replaced}
        optimizer.__dict__.update(replaced)

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._optimizer

    @property
    def first_index(self) -> int:
        """The place of its first parameter among the model's."""
        return self._shards[0].index

    def close(self) -> None:
        """Leave the optimizer's attributes as they were found."""
        for runtime in self._runtimes:
            runtime.observers.discard(self)
        for name, value in self._found.items():
            if value is None:
                del self._optimizer.__dict__[name]
            else:
                self._optimizer.__dict__[name] = value

    def look_at_parameters(self) -> None:
        """Take note of what the optimizer holds; it may hold other parameters than before, as after ``_add_param_group``.

        Raises:
            ShardingError: some are not in a sharded model.
        """
        held = [id(parameter) for group in parameter_groups(self._optimizer) for parameter in group["params"]]
        if held == self._held:
            return
        self._shards = optimizer_shards(self._optimizer)
        self._held = held
        self._held_names = zlib.crc32(repr([[one.slot.name for one in shards] for shards in _shards_of_groups(self._optimizer)]).encode())
        for runtime in self._runtimes:
            runtime.observers.discard(self)
        self._runtimes = list({id(shard.unit.runtime): shard.unit.runtime for shard in self._shards}.values())
        for runtime in self._runtimes:
            runtime.add_observer(self)

    def parameters_written(self, shards: Sequence[ParameterShard], *, maybe: bool = False) -> None:
        """Make the master weights of these parameters follow their new values.

        Args:
            shards: the parameters.
            maybe: whether they may have their old values. Elements that are their rounded master weight then keep that.
        """
        masters = self._optimizer._master_weights
        for shard in shards:
            master = masters.get(shard.parameter.name)
            if master is not None:
                with paddle.no_grad():
                    new = shard.local.astype(master.dtype)
                    if maybe:
                        new = paddle.where(master.astype(shard.local.dtype) == shard.local, master, new)
                    paddle.assign(new, master)

    def _sharded_step(self) -> Any:
        self._check_before_step()
        with ExitStack() as stack:
            for runtime in self._runtimes:
                stack.enter_context(runtime.stepping(self._settings_now(), self._shards_in(runtime)))
            self._expect_states("step")
            result = self._step()
        check_states_known(self._optimizer)
        return result

    def _expect_states(self, call: str) -> None:
        """Take note that what has a gradient will have states; gradients are reduced, so that all ranks know of them."""
        self.has_states = self.has_states or any(shard.has_gradient for shard in self._shards)
        warn_without_gradients(f"{type(self._optimizer).__name__}.{call}", self._shards)

    def _check_before_step(self) -> None:
        self._check_setting()
        if any(shard.is_mark_scaled() for shard in self._sentinels):
            raise ShardingError(
                f"{type(self._optimizer).__name__}: a GradScaler that doesn't know of the sharded model was told to unscale its gradients, "
                "and they are still scaled; call bind_grad_scaler(scaler) first. Nothing was stepped"
            )

    def _check_setting(self) -> None:
        _check_paddles_own_runtime()
        check_regularizers(self._optimizer)
        self.look_at_parameters()
        if not self._is_compared:
            # Fleet's sharding leaves each rank's optimizer another part of the parameters.
            for runtime in self._runtimes:
                held = [[one.slot.name for one in shards if one.unit.runtime is runtime] for shards in _shards_of_groups(self._optimizer)]
                runtime.communicator.check_same("what the optimizer holds", f"{type(self._optimizer).__name__} {held}")
                settings = describe_hyperparameters(self._optimizer, self._shards)
                runtime.communicator.check_same("a hyper-parameter of the optimizer", repr(settings))
            self._is_compared = True

    def _settings_now(self) -> list[Any]:
        """Return what is compared at each step: names, rates, what parameters say, and all settings of each group's first parameter."""
        firsts = [shards[0] for shards in _shards_of_groups(self._optimizer) if shards]
        held = (parameter for group in parameter_groups(self._optimizer) for parameter in group["params"])
        return [self._held_names, *_rates(self._optimizer), own_settings(held), describe_hyperparameters(self._optimizer, firsts)]

    def unscale(self, divide: Callable[[Sequence[ParameterShard]], bool]) -> bool:
        """Let a loss scaler divide this rank's reduced gradients, and tell on all ranks whether any found an infinity. Collective.

        Args:
            divide: does it for these parameters, and tells whether it found one.
        """
        self._check_setting()
        for shard in self._sentinels:
            shard.reset_mark()
        for runtime in self._runtimes:
            runtime.begin_step(self._settings_now())
        found = divide(self._shards)
        for runtime in self._runtimes:
            found = bool(runtime.communicator.max_of_integers(np.array([found], dtype=np.int32))[0])
        self._is_unscaled = True
        return found

    def _note_found_inf(self, key: str, value: Any) -> None:
        # How a loss scaler says whether to step. Paddle's own finds no gradients to unscale on a sharded model.
        if key == "found_inf" and isinstance(value, paddle.Tensor):
            if not self._is_unscaled:
                raise ShardingError(
                    f"{type(self._optimizer).__name__}: a GradScaler that doesn't know of the sharded model can't unscale its gradients; "
                    "call bind_grad_scaler(scaler) first"
                )
            self._is_unscaled = False
        self._set_auxiliary_var(key, value)

    def _collect_gradients(self, loss: paddle.Tensor, *_: Any, parameters: Sequence[Any] | None = None, **__: Any) -> list[tuple[Any, Any]]:
        # What minimize calls; Paddle's own reads gradients past the parameters' Python face.
        self._check_before_step()
        for runtime in self._runtimes:
            runtime.begin_step(self._settings_now())
            runtime.gradient_use.step_uses(self._shards_in(runtime))
        self._expect_states("minimize")
        wanted = parameters or [p for group in parameter_groups(self._optimizer) for p in group["params"]]
        pairs = [(parameter, parameter.grad) for parameter in wanted if not parameter.stop_gradient]
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]

    def _apply_given_gradients(self, params_grads: Any) -> Any:
        self._check_before_step()
        pairs, refused = [], None
        try:
            pairs = check_given_gradients(self._optimizer, params_grads, self._shards)
        except ShardingError as error:
            refused = error
        with ExitStack() as stack:
            for runtime in self._runtimes:
                runtime.communicator.raise_together(refused)
                stack.enter_context(runtime.stepping(self._settings_now(), self._shards_in(runtime)))
            self._expect_states("apply_gradients")
            result = self._apply_optimize_to_local(None, None, pairs)
        check_states_known(self._optimizer)
        return result

    def _apply_optimize_to_local(self, loss: Any, startup_program: Any, params_grads: Any, param_group_idx: int = 0) -> Any:
        pairs = params_grads["params"] if isinstance(params_grads, dict) else params_grads
        with ExitStack() as stack:
            # Asked now, while parameters have their whole shapes, by which such functions like to decide.
            stack.enter_context(_answered(self._optimizer, "_apply_decay_param_fun", [parameter.name for parameter, _ in pairs]))
            stack.enter_context(_answered(self._optimizer, "_lr_ratio", [parameter for parameter, _ in pairs]))
            stack.enter_context(self.showing_local([parameter._shard for parameter, _ in pairs]))
            if isinstance(params_grads, dict):
                params_grads["grad_clip"] = self._sharded(params_grads.get("grad_clip"))
            stack.enter_context(self._clipping_sharded())
            return self._apply_optimize(loss, startup_program, params_grads, param_group_idx=param_group_idx)

    @contextmanager
    def showing_local(self, shards: Sequence[ParameterShard]) -> Iterator[None]:
        """Let these parameters be this rank's pieces inside the block."""
        with ExitStack() as stack:
            for runtime in self._runtimes:
                stack.enter_context(runtime.showing_local([shard for shard in shards if shard.unit.runtime is runtime]))
            yield

    def _shards_in(self, runtime: Runtime) -> list[ParameterShard]:
        """Return those of its parameters that are of this model."""
        return self._shards if len(self._runtimes) == 1 else [shard for shard in self._shards if shard.unit.runtime is runtime]

    @contextmanager
    def _clipping_sharded(self) -> Iterator[None]:
        clip = self._optimizer._grad_clip
        self._optimizer._grad_clip = self._sharded(clip)
        try:
            yield
        finally:
            self._optimizer._grad_clip = clip

    def _sharded(self, clip: Any) -> Any:
        return SteppedGradients(self._optimizer, None if clip is None else ShardedClip(clip, self._shards))


@contextmanager
def _answered(optimizer: Any, attribute: str, questions: Sequence[Any]) -> Iterator[None]:
    """Replace a function that the user gave the optimizer by its answers to these questions, inside the block."""
    function = getattr(optimizer, attribute, None)
    if function is None:
        yield
        return
    answers = {id(question) if isinstance(question, ShardedParameter) else question: function(question) for question in questions}
    setattr(optimizer, attribute, lambda question: answers[id(question) if isinstance(question, ShardedParameter) else question])
    try:
        yield
    finally:
        setattr(optimizer, attribute, function)


def _rates(optimizer: Any) -> list[Any]:
    """Return the learning rate, and what the param groups multiply it by."""
    factors = [group.get("learning_rate") for group in parameter_groups(optimizer)]
    return [float(optimizer.get_lr()), *(factor for factor in factors if isinstance(factor, (int, float)))]


def _refuse_state_dict(*_: Any, **__: Any) -> Any:
    raise ShardingError(
        "the state of this optimizer lies on this rank's pieces, so its own state_dict and set_state_dict can't hold it: use "
        "paddle_fsdp_ckpt.save and load, full_optimizer_state_dict(opt), or optimizer_sharded_state_dict(opt) with "
        "paddle.distributed.save_state_dict"
    )


def _check_paddles_own_runtime() -> None:
    # While a context of Paddle's own fully_shard is registered, every optimizer in the process steps that context's buffers.
    if registered_context() is not None:
        raise ShardingError(
            "a model sharded by paddle.distributed.fsdp.fully_shard lives in this process, and Paddle lets every optimizer step that one; "
            "use one of the two runtimes in a process"
        )
