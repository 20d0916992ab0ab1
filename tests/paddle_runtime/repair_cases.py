"""What a repair of Paddle's own runtime does, warns of and leaves, on the ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from adapter_cases import cut
from fused_cases import Blocks, plain_model
from paddle.distributed.auto_parallel import fully_shard_fusion
from repair_trainings import (
    PartlyUnused,
    Skipping,
    backward,
    local_batch,
    momentum,
    pieces,
    sgd,
    shared_batch,
    update,
    warnings_of,
    whole_batch,
)

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp.paddle_runtime import paddle_runtime_of


def unused_parameters_move() -> bool:
    """Repaired, a parameter that no step uses has a gradient of zero, and weight decay moves it; unfused it stays."""
    paddle.seed(1)
    with cut(model := PartlyUnused()):
        optimizer = momentum(model)
        before = pieces(model)
        with ckpt.repair_paddle_runtime(model, optimizer):
            backward(model, shared_batch, 0)
            update(optimizer)
        after = pieces(model)
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


def harms() -> dict[str, list[str]]:
    with cut(model := Blocks(blocks=1)):
        optimizer = sgd(model)
        said = {
            "state": warnings_of(lambda: ckpt.optimizer_sharded_state_dict(optimizer)),
            "weights": warnings_of(lambda: ckpt.sharded_state_dict(model)),
        }
        with ckpt.repair_paddle_runtime(model, optimizer):
            said["repaired"] = warnings_of(lambda: ckpt.optimizer_sharded_state_dict(optimizer))
        said["closed"] = warnings_of(lambda: ckpt.optimizer_sharded_state_dict(optimizer))
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
