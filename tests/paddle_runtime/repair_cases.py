"""What Paddle's own runtime gets wrong, and what runs on the ranks to see it refused, warned of and repaired."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from adapter_cases import cut, error_of
from fused_cases import FEATURES, GLOBAL_BATCH, Blocks, WithoutEmbeddings, _share, plain_model
from harness import this_rank
from paddle import nn
from paddle.base import core
from paddle.distributed.auto_parallel import fully_shard_fusion

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp.paddle_runtime import paddle_runtime_of

Batches = Callable[[int], tuple[paddle.Tensor, paddle.Tensor]]
Stepper = Callable[[nn.Layer], Any]


def sgd(model: nn.Layer) -> Any:
    """Shows a wrong scale of a gradient, as Adam doesn't."""
    return paddle.optimizer.SGD(0.003, parameters=model.parameters())


def momentum(model: nn.Layer) -> Any:
    """Goes on moving weights whose gradient is zero."""
    return paddle.optimizer.Momentum(0.003, parameters=model.parameters(), weight_decay=0.1)


class Skipping(Blocks):
    """Skips blocks."""

    skipped: tuple[int, ...] = ()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return self.head(x)


class PartlyUnused(Blocks):
    """The buffer of the head has parameters that no step uses."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.unused = nn.Linear(3, 3)


class UnusedInBlock(Blocks):
    """Paddle's runtime waits for ever in the first backward."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.blocks[1].unused = nn.Linear(3, 3)


def whole_batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    batch = paddle.to_tensor(np.random.RandomState(step).randn(GLOBAL_BATCH, FEATURES).astype("float32"))
    return batch, batch.sum(-1, keepdim=True)


def shared_batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    batch, target = whole_batch(step)
    return _share(batch), _share(target)


def local_batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """This rank's rows, as no distributed tensor."""
    place = this_rank()
    rows = GLOBAL_BATCH // place.world_size
    batch, target = whole_batch(step)
    return batch[place.rank * rows :][:rows], target[place.rank * rows :][:rows]


def backward(model: nn.Layer, batches: Batches, step: int, scale: float = 1.0) -> float:
    batch, target = batches(step)
    loss = (model(batch) - target).square().mean() * scale
    loss.backward()
    return float(np.asarray(loss.numpy()))


def update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.clear_grad()


def plainly(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    losses = []
    for step in range(5):
        losses.append(backward(model, batches, step))
        update(optimizer)
    return losses


def skipping(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    """The second block is not used in three steps, and goes on moving meanwhile."""
    losses = []
    for step in range(7):
        model.skipped = (1,) if step in (1, 2, 3) else ()
        losses.append(backward(model, batches, step))
        update(optimizer)
    return losses


def accumulating(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    losses = []
    for step in range(4):
        losses.append(sum(backward(model, batches, 10 * step + part, 0.5) for part in range(2)))
        update(optimizer)
    return losses


def both_backwards_after_both_forwards(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    losses = []
    for step in range(4):
        parts = []
        for part in range(2):
            batch, target = batches(10 * step + part)
            parts.append((model(batch) - target).square().mean() * 0.5)
        for loss in parts:
            loss.backward()
        update(optimizer)
        losses.append(sum(float(np.asarray(loss.numpy())) for loss in parts))
    return losses


def clearing(model: nn.Layer, optimizer: Any, batches: Batches) -> list[float]:
    """A backward that is thrown away, and three steps."""
    losses = []
    for step, clear in enumerate((optimizer.clear_grad, optimizer.clear_gradients, model.clear_gradients)):
        backward(model, batches, 77)
        clear()
        losses.append(backward(model, batches, step))
        update(optimizer)
    return losses


def one_block() -> nn.Layer:
    return Blocks(blocks=1)


def frozen_first() -> nn.Layer:
    model = Blocks(blocks=1)
    model.embed.weight.stop_gradient = True
    return model


SILENT: dict[str, tuple[Callable[[], nn.Layer], Stepper, Callable[..., list[float]]]] = {
    "a layer that steps skip": (Skipping, momentum, skipping),
    "accumulation": (one_block, sgd, accumulating),
    "accumulation, backwards after forwards": (one_block, sgd, both_backwards_after_both_forwards),
    "unused parameters": (PartlyUnused, sgd, plainly),
    "unused parameters, accumulation": (PartlyUnused, sgd, accumulating),
    "clearing without a step": (Blocks, sgd, clearing),
}
"""Models and trainings that Paddle's runtime gets wrong without an error."""

ENDLESS = {
    "unused parameters of a block": (UnusedInBlock, sgd, plainly),
    "a buffer before and after the blocks": (WithoutEmbeddings, sgd, plainly),
    "a buffer before and after the blocks, accumulation": (WithoutEmbeddings, sgd, accumulating),
}
"""Those in which it waits for ever."""


RIGHT = {"frozen before what is trained": (frozen_first, sgd, plainly)}
"""Those that it gets right by itself."""

EVERY = {**SILENT, **ENDLESS, **RIGHT}


def unsharded(case: str) -> list[float]:
    make, stepper, training = EVERY[case]
    paddle.seed(1)
    model = make()
    return training(model, stepper(model), whole_batch)


def sharded(case: str, repair: bool) -> list[float]:
    make, stepper, training = EVERY[case]
    paddle.seed(1)
    with cut(model := make()):
        optimizer = stepper(model)
        if not repair:
            return training(model, optimizer, shared_batch)
        with ckpt.repair_paddle_runtime(model, optimizer):
            return training(model, optimizer, shared_batch)


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


def unused_parameters_move() -> bool:
    """Repaired, a parameter that no step uses has a gradient of zero, and weight decay moves it; unfused it stays."""
    paddle.seed(1)
    with cut(model := PartlyUnused()):
        optimizer = momentum(model)
        before = _pieces(model)
        with ckpt.repair_paddle_runtime(model, optimizer):
            backward(model, shared_batch, 0)
            update(optimizer)
        after = _pieces(model)
        return any((before[name] != after[name]).any() for name in before if name.startswith("unused.weight"))


def local_inputs(repair: bool) -> tuple[dict[str, np.ndarray], list[str]]:
    """One step on batches that are no distributed tensors: this rank's pieces, and what was warned of in two steps more."""
    paddle.seed(1)
    with cut(model := Blocks(blocks=1)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = sgd(model)
        closing = ckpt.repair_paddle_runtime(model, optimizer) if repair else None
        backward(model, shared_batch, 0)
        optimizer.clear_grad() if repair else paddle_runtime_of(model).values_written()  # type: ignore[union-attr]
        said_too_soon = list(caught)
        backward(model, local_batch, 0)
        update(optimizer)
        pieces = {name: one.local_tensor.numpy().copy() for name, one in ckpt.sharded_state_dict(model).items()}
        backward(model, local_batch, 1)
        if closing is not None:
            closing.close()
        assert not said_too_soon
        return pieces, [str(one.message) for one in caught]


def pieces_of_unsharded(rate: float) -> dict[str, np.ndarray]:
    """One step of the whole batch."""
    model = plain_model(1, blocks=1)
    optimizer = paddle.optimizer.SGD(rate, parameters=model.parameters())
    backward(model, whole_batch, 0)
    update(optimizer)
    return {name: parameter.numpy().reshape(-1) for name, parameter in model.named_parameters()}


def positions() -> dict[str, slice]:
    """Which elements of each parameter this rank keeps."""
    with cut(model := Blocks(blocks=1)):
        return {name: one.flattened_range for name, one in ckpt.sharded_state_dict(model).items() if one.is_flattened}


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
            before, own = _pieces(model), other.weight.numpy().copy()
            other(paddle.ones([1, 2])).sum().backward()
            theirs.step()
            theirs.clear_grad()
            return _differ(before, _pieces(model)), bool((own != other.weight.numpy()).any())

        said["warned"] = _warnings_of(lambda: ckpt.init_optimizer_state(optimizer))
        with ckpt.repair_paddle_runtime(model, optimizer):
            backward(model, shared_batch, 0)
            before = _pieces(model)
            said["repaired"] = error_of(step_other, theirs)
            assert not _differ(before, _pieces(model))
            assert not any(theirs._accumulators.values())
            update(optimizer)
            assert _differ(before, _pieces(model))
            assert _warnings_of(lambda: ckpt.init_optimizer_state(optimizer)) == []
        backward(model, shared_batch, 0)
        said["moved"] = step_other(theirs)
        said["refused"] = error_of(ckpt.optimizer_sharded_state_dict, optimizer)
        said["repairing"] = error_of(ckpt.repair_paddle_runtime, model, optimizer)
        said["splitting"] = error_of(ckpt.split_weight_decay, model, optimizer)
        del theirs
        said["gone"] = error_of(ckpt.optimizer_sharded_state_dict, optimizer)
    return said


def _pieces(model: nn.Layer) -> dict[str, np.ndarray]:
    return {name: one.local_tensor.numpy().copy() for name, one in ckpt.sharded_state_dict(model).items()}


def _differ(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return any((values != other[name]).any() for name, values in one.items())


def _warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        return [str(one.message) for one in caught]


def second_optimizer_of_the_model() -> list[str]:
    with cut(model := Blocks(blocks=1)):
        optimizer, second = sgd(model), momentum(model)
        assert second._parameter_list
        return _warnings_of(lambda: ckpt.init_optimizer_state(optimizer))


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


def harms() -> dict[str, list[str]]:
    with cut(model := Blocks(blocks=1)):
        optimizer = sgd(model)
        said = {
            "state": _warnings_of(lambda: ckpt.optimizer_sharded_state_dict(optimizer)),
            "weights": _warnings_of(lambda: ckpt.sharded_state_dict(model)),
        }
        with ckpt.repair_paddle_runtime(model, optimizer):
            said["repaired"] = _warnings_of(lambda: ckpt.optimizer_sharded_state_dict(optimizer))
        said["closed"] = _warnings_of(lambda: ckpt.optimizer_sharded_state_dict(optimizer))
    return said


def undone() -> tuple[str, ...]:
    """Everything that a repair touched is as it was after it is closed."""
    with cut(model := Blocks(blocks=1)):
        optimizer = sgd(model)
        context = fully_shard_fusion.get_fsdp_context()
        touched = [context, context.comm_manager, optimizer, model, *model.parameters()]

        def contents() -> list[dict[str, Any]]:
            return [dict(vars(one)) for one in touched]

        def holders() -> int:
            value = model.parameters()[0]._local_value()
            return sys.getrefcount(value)

        before, hooks, alone = contents(), len(model._forward_pre_hooks), holders()
        repair = ckpt.repair_paddle_runtime(model, optimizer)
        assert all(one != other for one, other in zip(before, contents(), strict=True))
        repair.close()
        repair.close()
        for one, other in zip(before, contents(), strict=True):
            assert one.keys() == other.keys()
            assert all(value is other[name] for name, value in one.items())
        assert len(model._forward_pre_hooks) == hooks
        with ckpt.repair_paddle_runtime(model, optimizer) as again:
            assert again.actions == repair.actions
            assert holders() == alone + 1, "what _local_value returned last is kept"
        assert holders() == alone
        return repair.actions


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


@contextmanager
def _repaired(seed: int) -> Iterator[tuple[Any, Any]]:
    paddle.seed(seed)
    with cut(model := Skipping()):
        optimizer = momentum(model)
        with ckpt.repair_paddle_runtime(model, optimizer):
            yield model, optimizer


def _train_skipping(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        model.skipped = (1,) if step in (1, 2, 3) else ()
        losses.append(backward(model, shared_batch, step))
        update(optimizer)
    return losses


def repaired_save(path: str) -> list[float]:
    """A save while a layer is skipped, and the steps after it."""
    with _repaired(1) as (model, optimizer):
        _train_skipping(model, optimizer, 0, 3)
        ckpt.save(path, model=model, optimizer=optimizer)
        return _train_skipping(model, optimizer, 3, 7)


def repaired_load(path: str) -> list[float]:
    with _repaired(2) as (model, optimizer):
        _train_skipping(model, optimizer, 50, 52)
        ckpt.load(path, model=model, optimizer=optimizer)
        return _train_skipping(model, optimizer, 3, 7)
