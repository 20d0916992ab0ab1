"""What users may give to save and load by mistake, and failures of one rank; run on the ranks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from checkpoint_cases import Tied, train
from harness import this_rank
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from strict_cases import Refusal, attempt, backward, copied, make, snapshot

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.loading import planned
from paddle_fsdp_ckpt.storage import buffers


def _try(call: Callable[[nn.Layer, Any], object]) -> Refusal:
    """Make the call in the middle of an accumulation."""
    made, stepper = _accumulating()
    return attempt(lambda: call(made, stepper), made, stepper)


def _accumulating() -> tuple[nn.Layer, Any]:
    made, stepper = make("base")
    train(made, stepper, 0, 1)
    backward(made)
    return made, stepper


def refused_path(call: str, paths: list[Any], overwrite: bool = False) -> Refusal:
    path = paths[this_rank().rank % len(paths)]
    if call == "save":
        return _try(lambda model, optimizer: ckpt.save(path, model=model, optimizer=optimizer, overwrite=overwrite, timeout_seconds=20))
    return _try(lambda model, optimizer: ckpt.load(path, model=model, optimizer=optimizer, timeout_seconds=20))


def refused_timeout(timeout: Any, path: str, good: str) -> list[Refusal]:
    """Of a save, a load and a manager; ``timeout`` on rank 1, and on rank 0 a good one."""
    mine: Any = timeout if this_rank().rank else 20
    calls: list[Callable[[nn.Layer, Any], object]] = [
        lambda model, optimizer: ckpt.save(path, model=model, optimizer=optimizer, timeout_seconds=mine),
        lambda model, optimizer: ckpt.load(good, model=model, optimizer=optimizer, timeout_seconds=mine),
        lambda model, optimizer: ckpt.CheckpointManager(path, timeout_seconds=mine),
    ]
    return [_try(call) for call in calls]


def refused_buffer(path: str) -> str:
    made, stepper = make("base")
    made.register_buffer("angles", paddle.ones([3], "complex64"))
    with pytest.raises(ckpt.CheckpointError) as caught:
        ckpt.save(path, model=made, optimizer=stepper)
    return str(caught.value)


def _sparse(shape: list[int]) -> paddle.Tensor:
    return paddle.sparse.sparse_coo_tensor([[0]] * len(shape), [1.0], shape)


def _strided(like: paddle.Tensor) -> paddle.Tensor:
    return paddle.as_strided(paddle.ones([2 * like.shape[0]], like.dtype), like.shape, [2])


def _replace_state(optimizer: Any, make_other: Callable[[Any], Any]) -> None:
    table = optimizer._accumulators["moment2"]
    owner = next(owner for owner, tensor in table.items() if tensor.shape[0] > 1)
    table[owner] = make_other(table[owner])


def _cleared(tensor: paddle.Tensor) -> paddle.Tensor:
    tensor._clear_data()
    return tensor


def _add_buffers(model: nn.Layer) -> None:
    model.register_buffer("extra", _cleared(paddle.ones([2])))
    model.register_buffer("more", _sparse([2, 3]))
    model.register_buffer("never", model.create_tensor())


def refused_tensors(path: str, good: str) -> list[tuple[str, str]]:
    """What must be in the messages of saves and loads of tensors that can't be stored, and the messages."""

    def save(**more: Any) -> object:
        return ckpt.save(path, model=made, optimizer=stepper, **more)

    def load() -> object:
        return ckpt.load(good, model=made, optimizer=stepper)

    def save_more(**more: Any) -> object:
        return ckpt.CheckpointManager(path).save(1, model=made, optimizer=stepper, **more)

    said = []

    def refused(words: str, *calls: Callable[[], object]) -> None:
        for call in calls:
            with pytest.raises(ckpt.CheckpointError) as caught:
                call()
            said.append((words, str(caught.value)))

    made, stepper = make("base")
    train(made, stepper, 0, 1)
    average = ShardedWeight("average", _sparse([2, 3]), (2, 3), (2, 3), (0, 0))
    refused("sharded: .*'average': it is sparse", lambda: save_more(sharded={"average": average}))
    refused(r"extra_state\['mean'\] can't be saved: it is sparse", lambda: save_more(extra_state={"mean": _sparse([2, 3])}))
    _replace_state(stepper, _cleared)
    refused("'moment2_0' of '.*it has no values", save, load)
    _replace_state(stepper, lambda state: _sparse(state.shape))
    refused("'moment2_0' of '.*it is sparse", save, load)
    _replace_state(stepper, lambda state: _strided(state.to_dense()))
    refused("'moment2_0' of '.*one behind the other", save, load)
    # The ways out that they name.
    _replace_state(stepper, lambda state: state.contiguous())
    save()
    _replace_state(stepper, _cleared)
    _replace_state(stepper, lambda state: paddle.assign(paddle.ones(state.shape), state))
    save(overwrite=True)
    load()
    _replace_state(stepper, lambda state: state.numpy())
    refused("'moment2' of '.*a ndarray, not a tensor", save, load)
    _replace_state(stepper, paddle.to_tensor)
    table = stepper._accumulators["moment2"]
    found = dict(table)
    table.update(dict.fromkeys(table))
    refused("'moment2' of '.*is None, not a tensor", save, load)
    table.update(found)
    _add_buffers(made)
    refused("'extra': it has no values.*'more': it is sparse.*'never': it has no values", save, load)
    return said


def _unbound(model: nn.Layer) -> Any:
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters())


def _foreign_bound() -> Any:
    return make("base")[1]


def _plain_model() -> nn.Layer:
    return Tied()


def _two_models() -> dict[str, Any]:
    one, other = Tied(), Tied()
    ckpt.fully_shard(one)
    ckpt.fully_shard(other)
    both = paddle.optimizer.AdamW(0.01, parameters=[*one.parameters(), *other.parameters()])
    ckpt.bind_optimizer(both)
    both.other_model = other  # which lives as long
    return {"model": one, "optimizer": both}


def _lazy() -> nn.Layer:
    with paddle.LazyGuard():
        return nn.Linear(2, 3)


SUBJECTS: dict[str, Callable[[nn.Layer, Any], dict[str, Any]]] = {
    "nothing": lambda model, optimizer: {"model": None},
    "no layer": lambda model, optimizer: {"model": model.parameters(), "optimizer": optimizer},
    "no optimizer": lambda model, optimizer: {"model": model, "optimizer": "AdamW"},
    "not bound": lambda model, optimizer: {"model": model, "optimizer": _unbound(model)},
    "of another model": lambda model, optimizer: {"model": model, "optimizer": _foreign_bound()},
    "of a plain model": lambda model, optimizer: {"model": model, "optimizer": _unbound(_plain_model())},
    "bound, model plain": lambda model, optimizer: {"model": _plain_model(), "optimizer": optimizer},
    "plain, of another plain model": lambda model, optimizer: {"model": _plain_model(), "optimizer": _unbound(_plain_model())},
    "given twice": lambda model, optimizer: {"model": model, "optimizer": [optimizer, optimizer]},
    "of two models": lambda model, optimizer: _two_models(),
    "a part of the model": lambda model, optimizer: {"model": model.blocks, "optimizer": optimizer},
    "the model in another": lambda model, optimizer: {"model": nn.Sequential(model), "optimizer": optimizer},
    "lazy": lambda model, optimizer: {"model": _lazy()},
}


def refused_subjects(call: str, case: str, path: str, only_rank: int | None) -> Refusal:
    model, optimizer = _accumulating()
    wrong = SUBJECTS[case](model, optimizer)
    given = wrong if only_rank in (None, this_rank().rank) else {"model": model, "optimizer": optimizer}
    return attempt(lambda: getattr(ckpt, call)(path, **given, timeout_seconds=20), model, optimizer)


EXTRA_STATES: dict[str, Any] = {
    "tuple": (1, 2),
    "int key": {1: 2},
    "array": {"a": [paddle.zeros([1])]},
    "object": object(),
    "bytes": b"x",
    "huge": 10**5000,
}


def _endless() -> Any:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def refused_extra_state(case: str, path: str, only_rank: int | None) -> Refusal:
    others = {"endless": _endless, "by rank": lambda: {"epoch": 1, "loss": 0.5 + this_rank().rank}}
    value = others[case]() if case in others else EXTRA_STATES[case]
    extra = value if only_rank in (None, this_rank().rank) else None
    return _try(lambda model, optimizer: ckpt.save(path, model=model, optimizer=optimizer, extra_state=extra, timeout_seconds=20))


def refused_step(step: Any, path: str) -> Refusal:
    mine = step[this_rank().rank] if isinstance(step, list) else step
    return _try(lambda model, optimizer: ckpt.save(path, model=model, optimizer=optimizer, step=mine, timeout_seconds=20))


def one_without_optimizer(call: str, path: str) -> Refusal:
    rank = this_rank().rank
    return _try(lambda model, optimizer: getattr(ckpt, call)(path, model=model, optimizer=[optimizer, None][rank], timeout_seconds=20))


def save_and_load_here(paths: list[str]) -> list[Any]:
    """Save and load by str, Path and relative paths; the working directory is this rank's."""
    os.chdir(paths[0])
    made, stepper = make("base")
    train(made, stepper, 0, 1)
    before = snapshot(made, stepper)
    steps = []
    for step, path in enumerate(
        ["relative", Path("up") / ".." / "dotted", f"{paths[0]}/deep/er/absolute", Path(paths[0]) / "path", "./relative/"]
    ):
        ckpt.save(path, model=made, optimizer=stepper, step=step, overwrite=True)
        steps.append(ckpt.load(path, model=made, optimizer=stepper).step)
    after = snapshot(made, stepper)
    return [steps, {key for key in before if before[key] != after[key] and not key.endswith((".unit", ".flags", ".gradients"))}]


def _failing(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def one_rank_fails_to_save(path: str, rank: int, where: str, overwrite: bool) -> tuple[Refusal, int | None]:
    """One rank's disk is full; then all save right."""
    made, stepper = make("base")
    train(made, stepper, 0, 2)
    backward(made)
    module, name = {"write": (buffers.os, "writev"), "sync": (buffers.os, "fsync"), "rename": (buffers.os, "rename")}[where]
    kept = getattr(module, name)
    if this_rank().rank == rank:
        setattr(module, name, _failing)
    try:
        result = attempt(
            lambda: ckpt.save(path, model=made, optimizer=stepper, step=2, overwrite=overwrite, timeout_seconds=20), made, stepper
        )
    finally:
        setattr(module, name, kept)
    there = Path(path).exists()
    old = ckpt.load(path, model=made, optimizer=stepper).step if there else None
    ckpt.save(path, model=made, optimizer=stepper, step=5, overwrite=overwrite)
    assert ckpt.load(path, model=made, optimizer=stepper).step == 5
    return result, old


def one_rank_fails_to_read(path: str, rank: int) -> tuple[str, str]:
    """One rank can't read; then all load right."""
    made, stepper = make("base", seed=5)
    kept = planned.read_ranges
    if this_rank().rank == rank:
        planned.read_ranges = _failing
    try:
        ckpt.load(path, model=made, optimizer=stepper, timeout_seconds=20)
        raise AssertionError("nothing was raised")
    except ckpt.CheckpointError as error:
        result = type(error).__name__, str(error)
    finally:
        planned.read_ranges = kept
    ckpt.load(path, model=made, optimizer=stepper)
    train(made, stepper, 3, 4)
    return result


def one_rank_lost_its_states(path: str) -> Refusal:
    made, stepper = make("base")
    train(made, stepper, 0, 1)
    if this_rank().rank == 1:
        stepper._accumulators["moment1"].clear()
    return attempt(lambda: ckpt.save(path, model=made, optimizer=stepper, timeout_seconds=20), made, stepper)


def values(path: str) -> dict[str, bytes | None]:
    made, stepper = make("base", seed=6)
    ckpt.load(path, model=made, optimizer=stepper)
    return {
        key: copied(weight.local_tensor)
        for key, weight in {**ckpt.sharded_state_dict(made), **ckpt.optimizer_sharded_state_dict(stepper)}.items()
    }
