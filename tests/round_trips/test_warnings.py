"""What a checkpoint can't hold is said when it is saved."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from checkpoint_cases import build
from harness import RankPool, this_rank

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


def save_with_own_buffers(path: str) -> list[str]:
    model, optimizer = build("convolutions", "sgd")
    model.norm._mean.set_value(paddle.full([16], float(this_rank().rank)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(path, model=model, optimizer=optimizer)
    return [str(one.message) for one in caught if "rank 0's are saved" in str(one.message)]


def test_buffers_that_differ_between_ranks(tmp_path: Path, ranks: Ranks) -> None:
    said = ranks(2).run(save_with_own_buffers, str(tmp_path / "checkpoint"))
    assert [len(messages) for messages in said] == [1, 0]
    assert "norm._mean" in said[0][0]
    assert "norm._variance" not in said[0][0]


def warns_of_gradients(path: str, model: paddle.nn.Layer, optimizer: Any) -> bool:
    """Save, and tell whether that warns of gradients."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(path, model=model, optimizer=optimizer, overwrite=True)
    return any("gradients are not saved" in str(one.message) for one in caught)


def saves_that_warn_of_gradients(path: str) -> list[bool]:
    model, optimizer = build("tied", "sgd")
    warned = []

    def backward() -> None:
        model(paddle.zeros([2, 5], "int64")).sum().backward()

    def save() -> None:
        warned.append(warns_of_gradients(path, model, optimizer))

    save()
    backward()
    save()
    assert any(parameter.grad is not None for parameter in model.parameters())  # which reduces them
    save()
    optimizer.step()
    save()  # a loop that clears before the backward
    optimizer.clear_grad()
    backward()
    optimizer.clear_grad()
    save()
    backward()
    with ckpt.local_parameters(model):  # where others step by hand
        pass
    save()
    backward()
    optimizer.step()
    save()  # a loop that didn't clear before the backward: the next one will add to what is there
    optimizer.clear_grad(set_to_zero=False)
    save()
    return warned


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_are_not_saved(tmp_path: Path, ranks: Ranks, world_size: int) -> None:
    for warned in ranks(world_size).run(saves_that_warn_of_gradients, str(tmp_path / "checkpoint")):
        assert warned == [False, True, True, False, False, False, True, False]


def saves_of_loops_that_clear_otherwise(path: str) -> list[bool]:
    """Save after each step of a loop that first never clears gradients, then after each save, and then after every other one."""
    model, optimizer = build("tied", "sgd")
    warned = []
    for clears in (False, False, True, True, True, False, True, False, True):
        model(paddle.zeros([2, 5], "int64")).sum().backward()
        optimizer.step()
        warned.append(warns_of_gradients(path, model, optimizer))
        if clears:
            optimizer.clear_grad()
    return warned


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_loop_does_with_gradients_that_a_step_used_may_change(tmp_path: Path, ranks: Ranks, world_size: int) -> None:
    """Whether the next backward will add to them is told by what the loop did between the last clearing of some and the one before."""
    for warned in ranks(world_size).run(saves_of_loops_that_clear_otherwise, str(tmp_path / "checkpoint")):
        # It clears from the third round on, which can be known in the fifth; that it doesn't after the sixth one, in the seventh.
        assert warned == [False, True, True, True, False, False, True, True, True]


def saves_that_warn_of_zeros(path: str) -> dict[str, bool]:
    """Save after two rounds that end with ``clear_grad()``, another call and a look, and tell by that call which saves warn."""
    model, optimizer = build("tied", "sgd")
    ckpt.save(path, model=model, optimizer=optimizer)

    calls: dict[str, Callable[[], object]] = {
        "local_parameters": lambda: None,
        "step": optimizer.step,
        "clip_grad_norm_": lambda: ckpt.clip_grad_norm_(model, 1.0),
        "grad": lambda: [parameter.grad for parameter in model.parameters()],
        "state dicts": lambda: (ckpt.full_state_dict(model), ckpt.sharded_state_dict(model)),
        "load": lambda: ckpt.load(path, model=model, optimizer=optimizer),
        "no clear_grad": lambda: None,
    }
    warned = {}
    for name, call in calls.items():
        for _ in range(2):
            model(paddle.zeros([2, 5], "int64")).sum().backward()
            optimizer.step()
            if name != "no clear_grad":
                optimizer.clear_grad()
            call()
            with ckpt.local_parameters(model):  # which counts as a step
                pass
        warned[name] = warns_of_gradients(path, model, optimizer)
    return warned


@pytest.mark.parametrize("world_size", [1, 2])
def test_zeros_of_clear_grad_are_no_gradients(tmp_path: Path, ranks: Ranks, world_size: int) -> None:
    for warned in ranks(world_size).run(saves_that_warn_of_zeros, str(tmp_path / "checkpoint")):
        assert [name for name, warns in warned.items() if warns] == ["no clear_grad"]


def saves_beside_an_optimizer_that_waits(path: str) -> list[bool]:
    """One of two optimizers steps at each step, and the other's gradients accumulate meanwhile."""
    model = paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 3))
    first, second = (paddle.optimizer.SGD(0.1, parameters=model[place].parameters()) for place in (0, 2))
    ckpt.fully_shard(model, optimizer=[first, second])
    warned = []
    for _ in range(2):
        model(paddle.ones([2, 8])).square().mean().backward()
        first.step()
        first.clear_grad()
        warned.append(warns_of_gradients(path, model, [first, second]))
    second.step()
    warned.append(warns_of_gradients(path, model, [first, second]))
    second.clear_grad()
    warned.append(warns_of_gradients(path, model, [first, second]))
    loss = model(paddle.ones([2, 8])).square().mean()
    loss.backward()
    first.minimize(loss)
    first.clear_grad()
    warned.append(warns_of_gradients(path, model, [first, second]))
    return warned


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_another_optimizer_will_use(tmp_path: Path, ranks: Ranks, world_size: int) -> None:
    for warned in ranks(world_size).run(saves_beside_an_optimizer_that_waits, str(tmp_path / "checkpoint")):
        assert warned == [True, True, False, False, True]


def train_without_gradients() -> list[list[str]]:
    """Clip and step, twice each, where there are no gradients, and where there are; return what Python says of it."""
    said = []
    for calls in (("clip", "step"), ("step", "clip"), ("backward", "clip", "step")):
        model = paddle.nn.Linear(3, 2)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        ckpt.fully_shard(model, optimizer=optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for call in calls * 2:
                if call == "clip":
                    ckpt.clip_grad_norm_(model, 1.0)
                elif call == "step":
                    optimizer.step()
                else:
                    model(paddle.ones([2, 3])).sum().backward()
        said.append([f"{Path(one.filename).name}: {one.message}" for one in caught])
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_without_gradients_is_said_once(world_size: int, ranks: Ranks) -> None:
    first, *others = ranks(world_size).run(train_without_gradients)
    assert others == [[[], [], []]] * (world_size - 1)
    for call, (message,) in zip(("clip_grad_norm_", "SGD.step"), first[:2], strict=True):
        assert message.startswith(f"test_warnings.py: {call}: none of its 2 parameters has a gradient on any rank")
    assert first[2] == []


def save_without_the_optimizer(folder: str) -> list[list[str]]:
    """Save twice at one line, in each of some ways, and return what Python says of it as it does unless told otherwise, and where."""
    model, optimizer = build("tied", "sgd")
    checkpoints = ckpt.CheckpointManager(f"{folder}/managed")
    ways: list[Callable[[int], None]] = [
        lambda number: ckpt.save(f"{folder}/{number}", model=model),
        lambda number: checkpoints.save(number, model=model),
        lambda number: ckpt.save(f"{folder}/{number}", model={"one": model}),
        lambda number: ckpt.save(f"{folder}/{number}", model=model, optimizer=[]),
        lambda number: ckpt.save(f"{folder}/{number}", model=model, optimizer=optimizer),
        lambda number: checkpoints.save(number, model=model, optimizer=()),
    ]
    said = []
    for way, save in enumerate(ways):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for again in range(2):
                save(2 * way + again)
        said.append([f"{Path(one.filename).name}: {one.message}" for one in caught])
    checkpoints.close()
    return said


def test_an_optimizer_that_is_left_out_is_said_once_unless_it_is_meant(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(save_without_the_optimizer, str(tmp_path))
    assert second == [[]] * 6
    for (message,) in first[:3]:
        assert message.startswith("test_warnings.py: save: SGD is bound to the model and was not given")
        assert "optimizer=[] where that is meant" in message
    assert first[3:] == [[]] * 3


def load_without_the_optimizer(folder: str) -> list[list[str]]:
    """Load in each of some ways, and return what Python says of it, and where."""
    model, sgd = build("tied", "sgd")
    other, momentum = build("tied", "momentum")
    other(paddle.zeros([2, 5], "int64")).sum().backward()
    momentum.step()
    with ckpt.CheckpointManager(f"{folder}/managed") as checkpoints:
        checkpoints.save(1, model=other, optimizer=momentum)
        ckpt.save(f"{folder}/bare", model=model, optimizer=[])
        ckpt.save(f"{folder}/sgd", model=model, optimizer=sgd)
        full = f"{folder}/managed/step_00000001"
        ways: list[Callable[[], object]] = [
            lambda: ckpt.load(full, model=other),
            lambda: checkpoints.restore(model=other),
            lambda: ckpt.load(f"{folder}/sgd", model=model),
            lambda: ckpt.load(full, model=other, optimizer=momentum),
            lambda: ckpt.load(full, model=other, optimizer=[]),
            lambda: ckpt.load(full, model=other, parts={"model"}),
            lambda: ckpt.load(f"{folder}/bare", model=other),
        ]
        said = []
        for way in ways:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                way()
            said.append([f"{Path(one.filename).name}: {one.message}" for one in caught])
    return said


def test_states_that_are_not_loaded_are_said_unless_it_is_meant(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(load_without_the_optimizer, str(tmp_path))
    assert second == [[]] * 7
    for name, (message,) in zip(("Momentum", "Momentum", "SGD"), first[:3], strict=True):
        assert message.startswith(f"test_warnings.py: load: {name} is bound to the model and was not given")
        assert "optimizer=[], where that is meant" in message
    assert first[3:] == [[]] * 4


def save_what_nobody_sharded(path: str) -> str:
    model = paddle.nn.Linear(3, 3)
    model.weight.set_value(paddle.full([3, 3], 1.0 + this_rank().rank))
    with pytest.raises(ckpt.RankFailedError) as caught:
        ckpt.save(path, model=model)
    return str(caught.value)


def test_plain_models_that_differ_between_ranks_are_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(save_what_nobody_sharded, str(tmp_path / "checkpoint")):
        assert "was fully_shard forgotten?" in said
    assert not (tmp_path / "checkpoint").exists()


def work_without_a_process_group(path: str) -> list[str]:
    said = []
    os.environ["PADDLE_TRAINERS_NUM"] = "2"
    try:
        for call in (ckpt.fully_shard, lambda model: ckpt.save(path, model=model), lambda model: ckpt.load(path, model=model)):
            with pytest.raises(ckpt.ShardingError) as caught:
                call(paddle.nn.Linear(3, 3))
            said.append(str(caught.value))
    finally:
        del os.environ["PADDLE_TRAINERS_NUM"]
    return said


def test_a_launched_process_without_a_process_group_is_refused(single: RankPool, tmp_path: Path) -> None:
    for said in single.run(work_without_a_process_group, str(tmp_path / "checkpoint"))[0]:
        assert "init_parallel_env" in said
