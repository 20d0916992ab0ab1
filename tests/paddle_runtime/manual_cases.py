"""An object of the shape of the development version's manual-mode context, and what runs on the ranks to read, step, save and load it.

Released Paddle lacks that runtime. The stand-in has the attributes that its public source shows, on plain tensors; it gathers and
reduces nothing: a test puts each rank's gradients where its runtime would. The optimizers that step it are Paddle's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from adapter_cases import error_of
from fused_cases import Blocks, Held, held, plain_held, plain_model
from harness import this_rank
from paddle import nn
from paddle.distributed.auto_parallel import fully_shard_fusion

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp.paddle_runtime import paddle_runtime_of
from paddle_fsdp_ckpt.optim.fused import init_optimizer_state

REGISTRY = "paddle.distributed.fsdp._fsdp_context"
ALIGNED = 64  # elements of float32 in 256 bytes


class Status(Enum):
    FREED = 1
    USING = 2
    READY = 3
    SYNCING = 4


@dataclass
class Task:
    waited: bool = False

    def wait(self) -> None:
        self.waited = True


class Buffer:
    """One fused buffer, of parameters or of their gradients."""

    def __init__(self, number: int, parameters: list[Any], group: Any, of_gradients: bool) -> None:
        self.fsdp_group, self.fsdp_degree, self.is_sharded = group, group.nranks, group.nranks > 1
        self.param_offsets: dict[str, int] = {}
        self.total_buffer_size = 0
        for parameter in parameters:
            self.param_offsets[parameter.name] = self.total_buffer_size
            step = ALIGNED * group.nranks
            self.total_buffer_size += -(-int(np.prod(parameter.shape)) // step) * step
        self.trainable = not parameters[0].stop_gradient
        self.tmp_data_buffer: Any = None
        self.comm_task: Any = None
        self.status = Status.FREED
        whole = np.zeros(self.total_buffer_size, "float32")
        if not of_gradients:
            for parameter in parameters:
                self.slot_of(parameter, whole)[:] = parameter.numpy().reshape(-1)
        self.data_buffer = paddle.to_tensor(self.mine(whole))
        if not of_gradients:
            self.data_buffer.name = f"fuse_params_{number}"
            self.data_buffer.stop_gradient = parameters[0].stop_gradient
            self.data_buffer.optimize_attr = parameters[0].optimize_attr

    def slot_of(self, parameter: Any, whole: np.ndarray) -> np.ndarray:
        start = self.param_offsets[parameter.name]
        return whole[start : start + int(np.prod(parameter.shape))]

    def mine(self, whole: np.ndarray) -> np.ndarray:
        return np.split(whole, self.fsdp_degree)[self.fsdp_group.rank]

    def clear_tmp_buffer(self) -> None:
        self.tmp_data_buffer = None


@dataclass
class BufferGroup:
    params: list[Any]
    fsdp_group: Any
    is_expert_param: bool
    no_decay: bool
    params_buffer: Any = None
    grads_buffer: Any = None
    grads_use_cnt: int = 0


class CommManager:
    def __init__(self) -> None:
        self.buffer_cnt_in_using = 0
        self.need_zero_grads = True

    def finish_grads_sync(self) -> None:
        """Nothing is ever under way."""


@dataclass
class Manual:
    """The context."""

    model: nn.Layer
    buffer_manager: Any
    comm_manager: CommManager = field(default_factory=CommManager)

    def comm_sync_and_reset_status(self) -> None:
        """Paddle's leaves buffers alone that are being gathered ahead."""
        for group in self.buffer_manager.buffer_groups:
            if group.params_buffer.status in (Status.READY, Status.USING):
                group.params_buffer.clear_tmp_buffer()
                group.params_buffer.status = Status.FREED
        self.comm_manager.need_zero_grads = True

    def bind_decay_param_fun(self, optimizer: Any) -> None:
        """Paddle asks for the names of parameters itself, and refuses mixed buffers, at the first step."""


def fused_by_hand(model: nn.Layer, group: Any) -> Manual:
    unit_of = {id(one): number for number, block in enumerate(model.blocks) for one in block.parameters()}
    groups: dict[Any, BufferGroup] = {}
    for parameter in model.parameters():
        is_expert, no_decay = getattr(parameter, "is_moe_param", False), getattr(parameter, "no_weight_decay", False)
        key = (unit_of.get(id(parameter)), parameter.stop_gradient, is_expert, no_decay)
        groups.setdefault(key, BufferGroup([], group, is_expert, no_decay)).params.append(parameter)
    for number, one in enumerate(groups.values()):
        one.params_buffer = Buffer(number, one.params, group, False)
        one.grads_buffer = Buffer(number, one.params, group, True) if one.params_buffer.trainable else None
    for parameter in model.parameters():
        shape = parameter.shape
        parameter._clear_data()
        parameter.get_tensor()._set_dims(shape)
    return Manual(model, SimpleNamespace(buffer_groups=list(groups.values()), _fsdp_group=group))


@contextmanager
def manually_cut(model: nn.Layer, group: Any = None) -> Iterator[Manual]:
    """Cut a model, and register the context where the development version does; and where this Paddle's optimizers look for it."""
    context = fused_by_hand(model, group or dist.get_group(0))
    registry = ModuleType(REGISTRY)
    registry.get_fsdp_context = lambda: context  # type: ignore[attr-defined]
    sys.modules[REGISTRY] = registry
    fully_shard_fusion.register_fsdp_context(context)
    try:
        yield context
    finally:
        del sys.modules[REGISTRY]
        fully_shard_fusion.register_fsdp_context(None)


def marked(seed: int = 1, mixed: bool = False) -> nn.Layer:
    """The second block's matrices are an expert's; what is no matrix is exempt from decay, and marked so unless ``mixed``."""
    model = plain_model(seed)
    for parameter in model.parameters():
        parameter.no_weight_decay = len(parameter.shape) == 1 and not mixed
    for parameter in (model.blocks[1].up.weight, model.blocks[1].down.weight):
        parameter.is_moe_param = True
    return model


def gradient_of(name: str, shape: list[int], step: int) -> np.ndarray:
    return np.random.RandomState(sum(map(ord, name)) + 1000 * step).randn(*shape).astype("float32")


def step_fused(context: Manual, optimizer: Any, first: int, last: int) -> None:
    """Steps of given gradients, laid out as the runtime's reduced ones."""
    for step in range(first, last):
        for group in context.buffer_manager.buffer_groups:
            if group.grads_buffer is not None:
                whole = np.zeros(group.grads_buffer.total_buffer_size, "float32")
                for name, parameter in context.model.named_parameters():
                    if parameter.name in group.grads_buffer.param_offsets:
                        group.grads_buffer.slot_of(parameter, whole)[:] = gradient_of(name, parameter.shape, step).reshape(-1)
                paddle.assign(paddle.to_tensor(group.grads_buffer.mine(whole)), group.grads_buffer.data_buffer)
        optimizer.step()


def step_plain(model: nn.Layer, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for name, parameter in model.named_parameters():
            parameter.grad = paddle.to_tensor(gradient_of(name, parameter.shape, step))
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[nn.Layer], Any]] = {
    "adamw": lambda model: paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.1),
    "nadam named": lambda model: paddle.optimizer.NAdam(0.01, parameters=model.parameters(), name="opt"),
    "sgd": lambda model: paddle.optimizer.SGD(0.01, parameters=model.parameters()),
}


def run_plain(optimizer: str, steps: int) -> Held:
    model = plain_model(1)
    stepper = OPTIMIZERS[optimizer](model)
    step_plain(model, stepper, 0, steps)
    return plain_held(model, stepper, [])


def save_manual(optimizer: str, path: str) -> tuple[Held, Held]:
    """Three steps, save, three more: what was saved, and the end."""
    with manually_cut(marked()) as context:
        stepper = OPTIMIZERS[optimizer](context.model)
        step_fused(context, stepper, 0, 3)
        saved = held(context.model, stepper)
        ckpt.save(path, model=context.model, optimizer=stepper)
        step_fused(context, stepper, 3, 6)
        return saved, held(context.model, stepper)


def load_manual(optimizer: str, path: str) -> tuple[Held, Held]:
    """Other weights, two steps of something else, load, three steps."""
    with manually_cut(marked(2)) as context:
        stepper = OPTIMIZERS[optimizer](context.model)
        step_fused(context, stepper, 50, 52)
        ckpt.load(path, model=context.model, optimizer=stepper)
        loaded = held(context.model, stepper)
        step_fused(context, stepper, 3, 6)
        return loaded, held(context.model, stepper)


def load_plain(optimizer: str, path: str) -> Held:
    model = plain_model(2)
    stepper = OPTIMIZERS[optimizer](model)
    ckpt.load(path, model=model, optimizer=stepper)
    return plain_held(model, stepper, [])


def groups_of_buffers() -> list[tuple[bool, bool, list[str]]]:
    """How the stand-in grouped, as the layout has it."""
    with manually_cut(marked()) as context:
        runtime = paddle_runtime_of(context.model)
        assert runtime is not None
        groups = context.buffer_manager.buffer_groups
        return [
            (group.is_expert_param, buffer.no_decay, [slot.name for slot in buffer.layout.slots])
            for group, buffer in zip(groups, runtime.buffers, strict=True)
        ]


def one_rank() -> dict[str, tuple[tuple[int, ...], bool]]:
    """In a world of one, pieces are whole."""
    model = marked()
    right = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    with manually_cut(model, SimpleNamespace(nranks=1, rank=0, ranks=[0])):
        stepper = OPTIMIZERS["adamw"](model)
        weights = ckpt.sharded_state_dict(model)
        for name, values in right.items():
            np.testing.assert_array_equal(weights[name].local_tensor.numpy(), values)
        return {
            key: (tuple(one.local_tensor.shape), one.is_flattened)
            for key, one in {**weights, **ckpt.optimizer_sharded_state_dict(stepper)}.items()
        }


def gathered_copies(path: str) -> list[str]:
    """Whatever was gathered or under way, a load lets go of it."""
    with manually_cut(marked()) as context:
        stepper = OPTIMIZERS["adamw"](context.model)
        ckpt.save(path, model=context.model, optimizer=stepper)
        buffers, tasks = _gather(context)
        ckpt.load(path, model=context.model, optimizer=stepper)
        assert all(task.waited for task in tasks)
        assert all(one.tmp_data_buffer is None and one.comm_task is None for one in buffers)
        assert all(not group.grads_buffer.data_buffer.numpy().any() for group in context.buffer_manager.buffer_groups)
        assert context.comm_manager.buffer_cnt_in_using == 0
        assert context.comm_manager.need_zero_grads
        return [one.status.name for one in buffers]


def _gather(context: Manual) -> tuple[list[Buffer], list[Task]]:
    """Let each buffer be in some state, in turn."""
    groups = context.buffer_manager.buffer_groups
    for group, status in zip(groups, [*Status] * len(groups), strict=False):
        fused = group.params_buffer
        fused.status = status
        fused.comm_task = Task() if status is Status.SYNCING else None
        fused.tmp_data_buffer = None if status is Status.FREED else paddle.ones([fused.total_buffer_size])
        group.grads_buffer.data_buffer.fill_(1.0)
        group.grads_use_cnt = 1
    context.comm_manager.buffer_cnt_in_using = len(groups)
    context.comm_manager.need_zero_grads = False
    buffers = [group.params_buffer for group in groups]
    return buffers, [one.comm_task for one in buffers if one.comm_task is not None]


def repaired() -> tuple[str, ...]:
    """A step lets go of all that was gathered, clear_grad() drops gradients, and the model's own state functions are errors."""
    with manually_cut(marked()) as context:
        stepper = OPTIMIZERS["sgd"](context.model)
        with pytest.warns(UserWarning, match="given to set_state_dict\\(\\) and set_value\\(\\) are lost"):
            ckpt.init_optimizer_state(stepper)
        with ckpt.repair_paddle_runtime(context.model, stepper) as repair:
            buffers, tasks = _gather(context)
            stepper.step()
            assert {one.status.name for one in buffers} == {"FREED"}
            assert all(task.waited for task in tasks)
            _gather(context)
            stepper.clear_grad()
            assert all(not group.grads_buffer.data_buffer.numpy().any() for group in context.buffer_manager.buffer_groups)
            assert error_of(context.model.set_state_dict, {}).startswith("ShardingError")
        _gather(context)
        stepper.step()
        assert "SYNCING" in {one.status.name for one in buffers}
        return repair.actions


MISSING = (
    "comm_manager.need_zero_grads",
    "buffer_manager._fsdp_group",
    "buffer_groups[...].fsdp_group",
    "buffer_groups[...].params_buffer.total_buffer_size",
    "buffer_groups[...].no_decay",
)


def missing_attributes() -> dict[str, str]:
    said = {}
    for dotted in MISSING:
        with manually_cut(marked()) as context:
            owner: Any = context
            *path, name = dotted.replace("buffer_groups[...]", "buffer_manager.buffer_groups").split(".")
            for step in path:
                owner = getattr(owner, step)
                owner = owner[-1] if isinstance(owner, list) else owner
            delattr(owner, name)
            said[dotted] = error_of(ckpt.sharded_state_dict, context.model)
    return said


def other_ranks_for_experts() -> str:
    with manually_cut(marked()) as context:
        for group in context.buffer_manager.buffer_groups:
            if group.is_expert_param:
                group.fsdp_group = SimpleNamespace(nranks=1, rank=0, ranks=[this_rank().rank])
        return error_of(ckpt.sharded_state_dict, context.model)


def decayed(model: nn.Layer) -> Any:
    matrices = {parameter.name for parameter in model.parameters() if len(parameter.shape) > 1}
    return paddle.optimizer.AdamW(
        0.01, parameters=model.parameters(), weight_decay=0.5, apply_decay_param_fun=lambda name: name in matrices
    )


def decay() -> tuple[str, str, Held]:
    """What is said of buffers of one kind, and of mixed ones; and three steps of those, split."""
    with manually_cut(marked()) as context:
        of_one_kind = error_of(init_optimizer_state, decayed(context.model))
    with manually_cut(marked(mixed=True)) as context:
        stepper = decayed(context.model)
        mixed = error_of(init_optimizer_state, stepper)
        ckpt.split_weight_decay(context.model, stepper)
        assert stepper._fsdp_decay_fun_bound  # else Paddle would refuse the mixed buffers
        step_fused(context, stepper, 0, 3)
        return of_one_kind, mixed, held(context.model, stepper)


def decay_plain() -> Held:
    model = plain_model(1)
    stepper = decayed(model)
    step_plain(model, stepper, 0, 3)
    return plain_held(model, stepper, [])


def frozen(path: str) -> set[str]:
    """A frozen buffer has no gradients, and its parameters no states."""
    model: Any = Blocks(blocks=2)
    model.embed.weight.stop_gradient = True
    with manually_cut(model) as context:
        stepper = OPTIMIZERS["adamw"](model)
        step_fused(context, stepper, 0, 1)
        ckpt.save(path, model=model, optimizer=stepper)
        assert ckpt.load(path, model=model, optimizer=stepper).without_state == []
        return {key.rpartition(".")[0] for key in ckpt.optimizer_sharded_state_dict(stepper)}
