"""What can't be trained or told with Paddle's own runtime, and what is said of it on the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import paddle
from adapter_cases import cut, error_of
from fused_cases import Blocks
from paddle import nn
from paddle.base import core
from paddle.distributed.auto_parallel import fully_shard_fusion
from repair_trainings import PartlyUnused, backward, differ, momentum, pieces, sgd, shared_batch, update, warnings_of

import paddle_fsdp_ckpt as ckpt


class _HeadOf(nn.Layer):
    """Computes with the weight of another layer."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, self.weight, transpose_y=True)


def errors_of_paddle() -> dict[str, str]:
    """What this runtime can't train, and says so."""
    said = {}
    tied, frozen = Blocks(blocks=1), Blocks(blocks=2)
    tied.head = _HeadOf(tied.embed)
    for one in frozen.blocks[1].parameters():
        one.stop_gradient = True
    calls: dict[str, tuple[nn.Layer, Callable[[nn.Layer], Any]]] = {
        "tied": (tied, lambda _: None),
        "frozen after what is trained": (frozen, lambda model: backward(model, shared_batch, 0)),
    }
    for name, (model, call) in calls.items():
        try:
            with cut(model):
                call(model)
            said[name] = "nothing was raised"
        except (NotImplementedError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def cut_by_one_rank() -> str:
    try:
        with cut(Blocks(blocks=1)):
            return "nothing was raised"
    except AssertionError as error:
        return str(error)


def plain_state(repair: bool) -> dict[str, str]:
    """What the model's own state dict functions do."""
    said = {}
    with cut(model := Blocks(blocks=1)):
        optimizer = sgd(model)
        closing = ckpt.repair_paddle_runtime(model, optimizer) if repair else None
        calls: dict[str, Callable[[], Any]] = {
            "state_dict": lambda: _values_of(model.state_dict()),
            "set_state_dict": lambda: model.set_state_dict({}),
            "set_dict": lambda: model.set_dict({}),
            "load_dict": lambda: model.load_dict({}),
            "set_value": lambda: model.head.weight.set_value(paddle.zeros([10, 1])),
        }
        for name, call in calls.items():
            try:
                said[name] = str(call())
            except ckpt.ShardingError as error:
                said[name] = f"ShardingError: {error}"
            except NotImplementedError:
                said[name] = "an error of Paddle's"
        if closing is not None:
            closing.close()
    return said


def _values_of(state: dict[str, Any]) -> str:
    return f"{sum(one._is_initialized() for one in state.values())} of {len(state)}"


def second_optimizer() -> dict[str, Any]:
    """Another model's optimizer in the process: what it steps, what is said of it, and what its step does once the first is repaired."""
    said: dict[str, Any] = {}
    other = nn.Linear(2, 2)
    with cut(model := Blocks(blocks=1)):
        optimizer = sgd(model)
        theirs = paddle.optimizer.Momentum(0.1, parameters=other.parameters())

        def step_other(theirs: Any) -> tuple[bool, bool]:
            before, own = pieces(model), other.weight.numpy().copy()
            other(paddle.ones([1, 2])).sum().backward()
            theirs.step()
            theirs.clear_grad()
            return differ(before, pieces(model)), bool((own != other.weight.numpy()).any())

        said["warned"] = warnings_of(lambda: ckpt.init_optimizer_state(optimizer))
        with ckpt.repair_paddle_runtime(model, optimizer):
            backward(model, shared_batch, 0)
            before = pieces(model)
            said["repaired"] = error_of(step_other, theirs)
            assert not differ(before, pieces(model))
            assert not any(theirs._accumulators.values())
            update(optimizer)
            assert differ(before, pieces(model))
            assert warnings_of(lambda: ckpt.init_optimizer_state(optimizer)) == []
        backward(model, shared_batch, 0)
        said["moved"] = step_other(theirs)
        said["refused"] = error_of(ckpt.optimizer_sharded_state_dict, optimizer)
        said["repairing"] = error_of(ckpt.repair_paddle_runtime, model, optimizer)
        said["splitting"] = error_of(ckpt.split_weight_decay, model, optimizer)
        del theirs
        said["gone"] = error_of(ckpt.optimizer_sharded_state_dict, optimizer)
    return said


def second_optimizer_of_the_model() -> list[str]:
    with cut(model := Blocks(blocks=1)):
        optimizer, second = sgd(model), momentum(model)
        assert second._parameter_list
        return warnings_of(lambda: ckpt.init_optimizer_state(optimizer))


def second_model() -> dict[str, str]:
    first = Blocks(blocks=1)
    with cut(first):
        from paddle.distributed.fsdp import fully_shard

        fully_shard(second := Blocks(blocks=1), mesh=paddle.distributed.auto_parallel.get_mesh())
        said = {
            "first": error_of(ckpt.sharded_state_dict, first),
            "its optimizer": error_of(ckpt.optimizer_sharded_state_dict, sgd(first)),
            "second": error_of(ckpt.sharded_state_dict, second),
        }
    said["none"] = error_of(ckpt.sharded_state_dict, first)
    return said


def grad_scaler() -> dict[str, Any]:
    """Loss scaling is off on CPU, so that an enabled scaler is made by hand; and what one would find to unscale."""
    said: dict[str, Any] = {}
    with cut(model := Blocks(blocks=1)):
        optimizer = sgd(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler = paddle.amp.GradScaler()
        backward(model, shared_batch, 0)
        said["found"] = sum(len(one) for one in core.eager.get_grads_lists(optimizer._parameter_list))
        said["disabled"] = error_of(ckpt.init_optimizer_state, optimizer)
        scaler._enable = True
        said["enabled"] = error_of(ckpt.init_optimizer_state, optimizer)
        del scaler
        said["gone"] = error_of(ckpt.init_optimizer_state, optimizer)
    return said


def lost_gradients(path: str) -> dict[str, str]:
    """A step in which Paddle loses a buffer's gradients: its optimizer's state can't be had, the weights can, and a load goes on."""
    paddle.seed(1)
    with cut(model := PartlyUnused()):
        optimizer = momentum(model)
        ckpt.save(f"{path} before", model=model, optimizer=optimizer)
        backward(model, shared_batch, 0)
        update(optimizer)
        said = {
            "states": error_of(ckpt.optimizer_sharded_state_dict, optimizer),
            "save": error_of(lambda: ckpt.save(path, model=model, optimizer=optimizer)),
            "weights": error_of(lambda: ckpt.save(path, model=model)),
            "load": error_of(lambda: ckpt.load(f"{path} before", model=model, optimizer=optimizer)),
        }
        said["after load"] = error_of(ckpt.optimizer_sharded_state_dict, optimizer)
    return said


def refused_repairs() -> dict[str, str]:
    said = {}
    model, other = Blocks(blocks=1), Blocks(blocks=1)
    said["not cut"] = error_of(ckpt.repair_paddle_runtime, model, sgd(model))
    with cut(model):
        optimizer = sgd(model)
        said["other model"] = error_of(ckpt.repair_paddle_runtime, other, optimizer)
        said["lamb"] = error_of(ckpt.repair_paddle_runtime, model, paddle.optimizer.Lamb(0.1, parameters=model.parameters()))
        with ckpt.repair_paddle_runtime(model, optimizer):
            said["twice"] = error_of(ckpt.repair_paddle_runtime, model, optimizer)
        comm = fully_shard_fusion.get_fsdp_context().comm_manager
        del comm.double_buffer_limit
        said["version"] = error_of(ckpt.repair_paddle_runtime, model, optimizer)
        comm.double_buffer_limit = 2
    return said
