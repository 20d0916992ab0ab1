"""Optimizers with state for some parameters, of several dtypes, or not for what is loaded; cases 3, 5 to 9 of what broke elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, assert_equal_states
from optimizer_cases import Part, State, assert_same_pieces, build, held, train, whole
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.optim import CATALOG

Ranks = Callable[[int], RankPool]


def values(state: State) -> dict[str, np.ndarray]:
    return {key: piece.values for key, piece in state.items()}


def states_alone(optimizer: Any) -> dict[str, bytes]:
    """Every accumulator and master weight of this rank; numpy sees the bits of bfloat16."""
    tables = {**optimizer._accumulators, "master": optimizer._master_weights}
    return {f"{table} {owner}": tensor.numpy().tobytes() for table, tensors in tables.items() for owner, tensor in tensors.items()}


# Case 5.


def made_before_the_first_step(variant: str) -> None:
    model, optimizer = build(variant, 1)
    before = held(model, optimizer)  # which makes the states of an optimizer that has none
    ckpt.init_optimizer_state(optimizer)
    assert_same_pieces(held(model, optimizer), before)
    other, theirs = build(variant, 1)
    assert train(model, optimizer, 0, 3) == train(other, theirs, 0, 3)
    ckpt.init_optimizer_state(theirs)  # leaves what there is, and makes that of the layer that no step used
    assert_same_pieces(held(other, theirs), held(model, optimizer))


@pytest.mark.parametrize("variant", [*CATALOG, "Rprop bfloat16", "SGD bfloat16"])
def test_states_made_before_the_first_step_change_nothing(variant: str, ranks: Ranks) -> None:
    ranks(2).run(made_before_the_first_step, variant)


# Cases 6 and 7.


def save_the_model_alone(variant: str, path: str) -> None:
    model, _ = build(variant, 7)
    ckpt.save(path, model=model)


def load_the_model_alone(variant: str, path: str) -> None:
    """States and counters stay, master weights follow, and the next steps are those of a plain run that was given the same weights.

    The CPU wheel steps bfloat16 without looking at master weights, so these are looked at here.
    """
    plain, theirs = build(variant, 1, sharded=False)
    train(plain, theirs, 0, 2)
    wanted, _ = build(variant, 7, sharded=False)
    plain.set_state_dict(wanted.state_dict())
    right = train(plain, theirs, 2, 5)

    model, optimizer = build(variant, 1)
    train(model, optimizer, 0, 2)
    before = states_alone(optimizer)
    report = ckpt.load(path, model=model)
    after = states_alone(optimizer)
    assert report.without_state == report.not_asked_for == []
    assert before.keys() == after.keys()
    assert {key for key in before if before[key] != after[key]} <= {key for key in before if key.startswith("master ")}
    runtime = runtime_of(model)
    assert runtime is not None
    for one in runtime.shards:
        master = optimizer._master_weights.get(one.parameter.name)
        if master is not None:
            np.testing.assert_array_equal(master.numpy(), one.local.astype("float32").numpy())
    rtol = 2e-2 if optimizer._master_weights else 1e-5
    np.testing.assert_allclose(train(model, optimizer, 2, 5), right, rtol=rtol)


@pytest.mark.parametrize("variant", ["AdamW", "NAdam", "ASGD", "Rprop bfloat16", "SGD bfloat16"])
def test_a_load_of_the_model_alone_leaves_the_optimizer(variant: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    ranks(2).run(save_the_model_alone, variant, path)
    ranks(2).run(load_the_model_alone, variant, path)


# Case 3.


def frozen(path: str, save: bool) -> tuple[list[float], State]:
    """Trained, frozen, trained, saved; loaded into one where nothing is frozen yet; unfrozen, and trained on."""
    model, optimizer = build("AdamW", 1 if save else 8)
    chosen = model.up.parameters()

    def freeze(what: bool) -> None:
        for parameter in chosen:
            parameter.stop_gradient = what

    if save:
        train(model, optimizer, 0, 2)
        freeze(True)
        train(model, optimizer, 2, 3)
        ckpt.save(path, model=model, optimizer=optimizer)
        freeze(False)
    else:
        ckpt.load(path, model=model, optimizer=optimizer)
    return train(model, optimizer, 3, 6), held(model, optimizer)


def test_state_of_what_is_frozen_at_the_save_goes_on(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    uninterrupted = ranks(2).run(frozen, path, True)
    for (losses, state), (right, wanted) in zip(ranks(2).run(frozen, path, False), uninterrupted, strict=True):
        assert losses == right
        assert_same_pieces(state, wanted)


# Case 8.

GROUPS: dict[str, list[list[int]]] = {
    "saved": [[0, 1], [], [2, 3, 4, 5, 6]],
    "split": [[1], [6, 4], [0], [2], [5, 3]],
    "reversed": [[6, 5, 4, 3, 2], [1, 0], []],
    "split and empty": [[2, 3, 4], [], [0, 1], [], [5, 6]],
}


def grouped(division: str, path: str, save: bool) -> tuple[list[float], State]:
    """The first two parameters have settings of their own, however they are divided into groups."""
    paddle.seed(1 if save else 9)
    model = nn.Sequential(nn.Linear(3, 75), nn.GELU(), nn.Linear(75, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias_attr=False))
    parameters = model.parameters()
    own = {"learning_rate": 0.5, "weight_decay": 0.3, "beta1": 0.7, "epsilon": 1e-4}
    groups = [{"params": [parameters[i] for i in chosen], **(own if set(chosen) <= {0, 1} else {})} for chosen in GROUPS[division]]
    schedule = paddle.optimizer.lr.CosineAnnealingWarmRestarts(0.05, T_0=2, T_mult=2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=groups)
    ckpt.fully_shard(model, optimizer=optimizer)
    losses = []
    if save:
        go_on(model, optimizer, schedule, 0, 3)
        ckpt.save(path, model=model, optimizer=optimizer)
    else:
        assert ckpt.load(path, model=model, optimizer=optimizer).differences == []
    losses = go_on(model, optimizer, schedule, 3, 7)
    return losses, held(model, optimizer)


def go_on(model: nn.Layer, optimizer: Any, schedule: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        losses += train(model, optimizer, step, step + 1)
        schedule.step()
    return losses


@pytest.mark.parametrize("division", GROUPS)
def test_groups_divided_otherwise_go_on(division: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    uninterrupted = ranks(2).run(grouped, "saved", path, True)
    for (losses, state), (right, wanted) in zip(ranks(2).run(grouped, division, path, False), uninterrupted, strict=True):
        assert losses == right
        assert_equal_states(values(state), values(wanted))


# Case 9.


class Mixed(nn.Layer):
    """Matrices in bfloat16, norms in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = Part(3, 75), nn.LayerNorm(75), Part(75, 2)
        self.up.to(dtype="bfloat16")
        self.down.to(dtype="bfloat16")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(self.norm(self.up(x)))


def mixed(optimizer: str, path: str, seed: int) -> tuple[State, list[float], State]:
    """Saved where the seed is 1, else loaded; AdamW's states are filled, as it can't be stepped on CPU."""
    paddle.seed(seed)
    model = Mixed()
    stepper = getattr(paddle.optimizer, optimizer)(0.02, parameters=model.parameters(), multi_precision=True)
    ckpt.fully_shard(model, optimizer=stepper)
    if seed != 1:
        ckpt.load(path, model=model, optimizer=stepper)
    elif optimizer == "SGD":
        train(model, stepper, 0, 2)
    else:
        ckpt.init_optimizer_state(stepper)
        for number, weight in enumerate(ckpt.optimizer_sharded_state_dict(stepper).values()):
            with paddle.no_grad():
                paddle.assign(paddle.rand(weight.local_tensor.shape) * 0.0 + 1 + number / 1024, weight.local_tensor)
    if seed == 1:
        ckpt.save(path, model=model, optimizer=stepper)
    before = held(model, stepper)
    return before, train(model, stepper, 2, 4) if optimizer == "SGD" else [], held(model, stepper)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_norms_and_matrices_of_other_dtypes_in_one_group(optimizer: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    saved, losses, after = zip(*ranks(2).run(mixed, optimizer, path, 1), strict=True)
    loaded, resumed_losses, resumed = zip(*ranks(2).run(mixed, optimizer, path, 2), strict=True)
    assert resumed_losses == losses
    for one, other in zip((*loaded, *resumed), (*saved, *after), strict=True):
        assert_same_pieces(one, other)
    found, shapes = whole([state for state, _, _ in ranks(3).run(mixed, optimizer, path, 3)])
    right, right_shapes = whole(list(saved))
    assert_equal_states(found, right)
    assert shapes == right_shapes
    assert {key for key in right if key.endswith(".w_0")} == {
        f"{part}.{name}.w_0" for part in ("up", "down") for name in ("weight", "bias")
    }
    bits = {key for key, array in right.items() if array.dtype == np.uint16}
    assert bits == {f"{part}.{name}" for part in ("up", "down") for name in ("weight", "bias")}
