"""Repair what Paddle's own runtime gets wrong in silence, on the objects of one training, without touching Paddle's files or classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from ..errors import ShardingError, listing
from ..fsdp.paddle_runtime import PaddleRuntime
from ..warn import warn_caller
from .fused_checks import check_fused
from .fused_others import REPAIR_ATTRIBUTE, check_others, is_repaired

_RELIED_ON = ("grad_reduce_queue", "double_buffer_limit", "_release_one_buffer_if_needed")


def repair_paddle_runtime(model: nn.Layer, optimizer: Any) -> PaddleRepair:
    """Put right, for one model and its optimizer, what can be of that which Paddle's own ``fully_shard`` gets wrong without an error.

    Call it on all ranks, before the first step. It changes these two objects, Paddle's context and the model's parameters, each by itself.
    Still all ranks must use the same parameters in a step, or they wait for each other.

    Args:
        model: cut by Paddle's own ``fully_shard``.
        optimizer: the one that steps it.

    Returns:
        What was done, in words, as its ``actions``. Its ``close()``, or leaving it as a context manager, undoes all of it.

    Raises:
        ShardingError: Paddle did not cut this model, it is repaired already, or this version of Paddle lacks something to repair.
        UnsupportedOptimizerError: the optimizer can't step fused buffers right, or its training was made wrong by something else.
    """
    runtime = check_fused(optimizer, decay=False)
    if runtime.model is not model:
        raise ShardingError(f"repair_paddle_runtime: the {type(model).__name__} given is not the model that Paddle's fully_shard cut")
    check_others(runtime, [optimizer])
    if is_repaired(runtime):
        raise ShardingError("repair_paddle_runtime: this model is repaired already; close that repair first")
    return PaddleRepair(runtime, optimizer)


def warn_of_harms(runtime: PaddleRuntime) -> None:
    """Warn of what this runtime gets wrong in silence and nothing here can see, unless it is repaired."""
    if not is_repaired(runtime):
        warn_caller(
            f"Paddle's fully_shard gets these wrong without an error: {'; '.join(_harms(runtime))}. Where your training does any "
            "of that, call paddle_fsdp_ckpt.repair_paddle_runtime(model, optimizer) before the first step"
        )


def _harms(runtime: PaddleRuntime) -> Iterator[str]:
    context = runtime.context
    yield "a layer that a step skips has old weights when it is used again"
    if context.loses_partial_gradients:
        yield "gradient accumulation loses gradients in a model of few buffers"
        yield "where a buffer holds parameters that a step doesn't use, it waits for ever or loses the gradients of all"
    if not context.averages_gradients:
        yield "with inputs that aren't distributed tensors gradients are summed over ranks, not averaged"
    yield "clear_grad() without a step() keeps the gradients"
    yield "model.state_dict() has no values" + ", and those given to set_state_dict() and set_value() are lost" * context.loses_set_values
    if any(not buffer.trainable for buffer in runtime.buffers):
        yield "a backward through frozen layers after trainable ones fails, or waits for ever"


class PaddleRepair:
    """What :func:`repair_paddle_runtime` did, until it is closed.

    Attributes:
        actions: what it did, in words.
    """

    def __init__(self, runtime: PaddleRuntime, optimizer: Any) -> None:
        self.actions: tuple[str, ...] = ()
        self._context = runtime.context
        self._world_size = runtime.layout.world_size
        self._steps_open = 0
        self._written: dict[int, set[str]] = {}
        self._undo: list[Callable[[], None]] = []
        if self._context.loses_partial_gradients:
            self._check_relied_on()
        try:
            self._repair(runtime, optimizer)
        except BaseException:
            self.close()
            raise

    def _repair(self, runtime: PaddleRuntime, optimizer: Any) -> None:
        self._replace(self._context.raw, REPAIR_ATTRIBUTE, self)
        self._let_only(optimizer)
        self._let_go_at_each_step()
        self._keep_local_values(runtime)
        if self._context.loses_partial_gradients:
            self._keep_partial_gradients()
            self._never_wait_for_ever()
        self._clear_gradients(optimizer, runtime.model)
        self._refuse_plain_state(runtime)
        if not self._context.averages_gradients and self._world_size > 1:
            self._warn_of_local_inputs(runtime.model)

    def close(self) -> None:
        """Undo everything; closing again does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> PaddleRepair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_relied_on(self) -> None:
        missing = [name for name in _RELIED_ON if not hasattr(self._context.raw.comm_manager, name)]
        if missing:
            raise ShardingError(
                f"Paddle's fully_shard in version {paddle.__version__} can't be repaired: its comm_manager lacks {listing(missing)}; use "
                f"Paddle {self._context.written_for}, or paddle_fsdp_ckpt.fully_shard"
            )

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of one object, until :meth:`close`."""
        had, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append((lambda: setattr(owner, name, before)) if had else (lambda: delattr(owner, name)))

    def _let_only(self, optimizer: Any) -> None:
        """Let the optimizer's updates be told from those of others, which Paddle lets step this model too."""
        for name in ("step", "_apply_optimize"):  # minimize() calls the second alone
            self._replace(optimizer, name, self._counting(getattr(optimizer, name)))
        self.actions += (f"a step of another optimizer than this {type(optimizer).__name__} is an error, and changes nothing",)

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._steps_open += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._steps_open -= 1

        return counted

    def _let_go_at_each_step(self) -> None:
        synchronise = self._context.raw.comm_sync_and_reset_status

        def synchronise_all() -> None:
            if not self._steps_open:
                raise ShardingError(
                    "an optimizer stepped in a process whose model was cut by paddle.distributed.fsdp.fully_shard, and it isn't the one of "
                    "repair_paddle_runtime: Paddle lets it step that model instead of its own parameters. Nothing was changed: use "
                    "paddle_fsdp_ckpt.fully_shard for several models or optimizers"
                )
            for group in self._context.incomplete_gradients():
                self._reduce(group)
            synchronise()
            self._context.let_go_of_weights()

        self._replace(self._context.raw, "comm_sync_and_reset_status", synchronise_all)
        self.actions += ("weights that were gathered ahead and not used are let go of at each step",)

    def _keep_local_values(self, runtime: PaddleRuntime) -> None:
        """Let what a parameter's ``_local_value`` returned live until the next one is asked for.

        After each use of a layer Paddle 3.3.1's ``shard_params`` sets the dims of the tensor in it, and nothing keeps that alive meanwhile.
        The one that stays has no data, which ``shard_params`` has just taken away.
        """
        last: list[Any] = []

        def keeping(original: Callable[[], Any]) -> Callable[[], Any]:
            def local_value() -> Any:
                last[:] = [original()]
                return last[0]

            return local_value

        distributed = [shard.parameter for shard in runtime.shards if shard.parameter.is_dist()]
        for parameter in distributed:
            self._replace(parameter, "_local_value", keeping(parameter._local_value))
        if distributed:
            self.actions += ("what Paddle writes to when it takes a parameter's data away is kept alive meanwhile",)

    def _keep_partial_gradients(self) -> None:
        for group in self._context.buffer_groups:
            for parameter in group.params if group.grads_buffer is not None else ():
                self._replace(parameter, "get_main_grad", self._main_grad_of(parameter, group))
        self.actions += (
            "gradients of one backward are added up before the next one takes their place",
            "the gradients of a buffer are kept where some of its parameters got none; those count as zeros",
        )

    def _main_grad_of(self, parameter: Any, group: Any) -> Callable[[], Any]:
        """Return what a parameter's gradient hook asks for the place of the gradient, which it overwrites."""
        original: Callable[[], Any] = parameter.get_main_grad
        comm = self._context.raw.comm_manager
        name = parameter.name

        def main_grad() -> Any:
            written = self._written.setdefault(id(group), set())
            if group.grads_buffer in comm.grad_reduce_queue:
                comm.finish_grads_sync()
            elif group.grads_use_cnt and name in written:
                self._reduce(group)
            if not group.grads_use_cnt:
                written.clear()
            written.add(name)
            return original()

        return main_grad

    def _reduce(self, group: Any) -> None:
        """Reduce a buffer's gradients now, and add them to those that are there, as Paddle does once all parameters have one."""
        self._context.raw.comm_manager.finish_grads_sync()
        buffer = group.grads_buffer
        whole = buffer.get_tmp_buffer()
        mine = whole._slice(0, buffer.data_buffer.shape[0])
        dist.reduce_scatter(mine, whole, op=dist.ReduceOp.SUM, group=self._context.group, sync_op=False).wait()
        with paddle.no_grad():
            buffer.data_buffer.add_(mine)
        buffer.clear_tmp_buffer()
        group.grads_use_cnt = 0

    def _never_wait_for_ever(self) -> None:
        comm = self._context.raw.comm_manager

        def release_if_needed() -> None:
            while comm.buffer_cnt_in_using >= comm.double_buffer_limit:
                ready = [one.params_buffer for one in self._context.buffer_groups if one.params_buffer.status.name == "READY"]
                if not ready:  # Paddle's own looks again, and again
                    return
                ready[0].status = type(ready[0].status).FREED
                ready[0].clear_tmp_buffer()
                comm.buffer_cnt_in_using -= 1

        self._replace(comm, "_release_one_buffer_if_needed", release_if_needed)
        self.actions += (
            "a buffer of which a forward used some parameters only doesn't stop the next one; it stays gathered until the step",
        )

    def _clear_gradients(self, optimizer: Any, model: nn.Layer) -> None:
        for owner, name in ((optimizer, "clear_grad"), (optimizer, "clear_gradients"), (model, "clear_gradients")):
            self._replace(owner, name, self._clearing(getattr(owner, name)))
        self.actions += ("clear_grad() without a step() drops the gradients",)

    def _clearing(self, original: Callable[..., None]) -> Callable[..., None]:
        def clear(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if not self._context.raw.comm_manager.need_zero_grads:  # there was a backward since the last step
                self._context.drop_gradients()

        return clear

    def _refuse_plain_state(self, runtime: PaddleRuntime) -> None:
        instead = {
            "state_dict": "it has no values: use paddle_fsdp_ckpt.sharded_state_dict(model), or save",
            "set_state_dict": "the values would be lost: use paddle_fsdp_ckpt.load",
        }
        instead["set_dict"] = instead["load_dict"] = instead["set_state_dict"]
        for name, text in instead.items():
            self._replace(
                runtime.model, name, _raising(f"{type(runtime.model).__name__}.{name} on a model cut by Paddle's fully_shard: {text}")
            )
        for shard in runtime.shards:
            text = "the value would be lost: write into its piece of paddle_fsdp_ckpt.sharded_state_dict(model), or use load"
            self._replace(shard.parameter, "set_value", _raising(f"set_value of '{shard.slot.name}', cut by Paddle's fully_shard: {text}"))
        self.actions += ("the model's state_dict() and set_state_dict(), and set_value() of its parameters, are errors",)

    def _warn_of_local_inputs(self, model: nn.Layer) -> None:
        warned: list[bool] = []

        def warn_once(layer: nn.Layer, args: Any, kwargs: Any) -> None:
            tensors = list(_tensors((args, kwargs)))
            if tensors and not warned and not any(one.is_dist() and any(placed.is_shard() for placed in one.placements) for one in tensors):
                warned.append(True)
                warn_caller(
                    f"no input of this {type(layer).__name__} is distributed over the ranks, and Paddle's fully_shard sums the gradients "
                    f"of such inputs over {self._world_size} ranks: make them by dist.auto_parallel.api.dtensor_from_local(batch, mesh, "
                    f"[dist.Shard(0)]), or divide the loss by {self._world_size}"
                )

        self._undo.append(model.register_forward_pre_hook(warn_once, with_kwargs=True).remove)
        self.actions += ("inputs of the model that aren't distributed over the ranks are warned of, once",)


def _raising(text: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ShardingError(text)

    return refuse


def _tensors(value: Any) -> Iterator[paddle.Tensor]:
    if isinstance(value, paddle.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)
