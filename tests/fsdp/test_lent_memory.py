"""What is written to this rank's pieces, and to its gradients, comes there, or is an error on all ranks; nothing trains on without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import live_buffer, runtime_of

Ranks = Callable[[int], RankPool]
Values = dict[str, np.ndarray]


def net() -> nn.Layer:
    paddle.seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))


def made(sharded: bool = True, model: nn.Layer | None = None) -> tuple[nn.Layer, Any]:
    model = model or net()
    optimizer = paddle.optimizer.AdamW(0.05, epsilon=1e-4, parameters=model.parameters(), weight_decay=0.1)
    if sharded:
        ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


def backward(model: nn.Layer, step: int = 0) -> None:
    model(paddle.to_tensor(np.random.RandomState(step).randn(4, 6).astype("float32"))).square().mean().backward()


def train(model: nn.Layer, optimizer: Any, step: int) -> None:
    backward(model, step)
    optimizer.step()
    optimizer.clear_grad()


def weights(model: nn.Layer) -> Values:
    if runtime_of(model) is None:
        return {name: one.numpy() for name, one in model.named_parameters()}
    return {name: one.numpy() for name, one in ckpt.full_state_dict(model, to_rank=None).items()}


def check_same(found: Values, right: Values, atol: float = 0.0) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol, err_msg=name)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ckpt.CheckpointError) as caught:
        call()
    return str(caught.value)


def write_all(model: nn.Layer, write: Callable[[Any], object], names: tuple[str, ...]) -> None:
    with paddle.no_grad(), ckpt.local_parameters(model):
        for name, parameter in model.named_parameters():
            if name in names:
                write(parameter)


LOST: dict[str, Callable[[Any], object]] = {
    "numpy's float64": lambda p: paddle.assign(np.full(p.shape, 0.5), p),
    "float64": lambda p: paddle.assign(paddle.full(p.shape, 0.5, "float64"), p),
    "float16": lambda p: paddle.assign(paddle.full(p.shape, 0.5, "float16"), p),
    "cast_": lambda p: p.cast_("float64"),
}


def written_otherwise(path: str, kind: str) -> list[str]:
    model, optimizer = made()
    train(model, optimizer, 0)
    before = weights(model)
    backward(model, 1)
    calls: tuple[Callable[[], object], ...] = (
        lambda: write_all(model, LOST[kind], ("2.weight",)),
        optimizer.step,
        lambda: model(paddle.ones([2, 6])),
        lambda: ckpt.save(f"{path}/after", model=model, optimizer=optimizer),
        lambda: ckpt.full_state_dict(model),
        lambda: ckpt.sharded_state_dict(model),
        lambda: ckpt.unshard(model),
        lambda: write_all(model, LOST[kind], ()),
    )
    said = [refusal(call) for call in calls]
    value = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
    model[2].weight.set_value(value)
    check_same(weights(model), {**before, "2.weight": value})
    optimizer.clear_grad()
    train(model, optimizer, 2)
    plain, optimizer = made(sharded=False)
    train(plain, optimizer, 0)
    plain[2].weight.set_value(value)
    train(plain, optimizer, 2)
    check_same(weights(model), weights(plain), 1e-6)
    assert not Path(path, "after").exists()
    return said


@pytest.mark.parametrize("kind", LOST)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_of_another_dtype_are_refused_until_there_are_others(world_size: int, kind: str, ranks: Ranks, tmp_path: Path) -> None:
    for messages in ranks(world_size).run(written_otherwise, str(tmp_path), kind):
        for message in messages:
            assert "2.weight" in message
            assert "load_full_state_dict or set_value" in message


def written_on_one_rank(path: str, shape: list[int], dtype: str) -> str:
    model, optimizer = made()
    train(model, optimizer, 0)
    ckpt.save(path, model=model, optimizer=optimizer)
    backward(model, 1)
    lost = False
    try:
        with paddle.no_grad(), ckpt.local_parameters(model):
            if this_rank().rank == 0:
                paddle.assign(paddle.full(shape, 0.5, dtype), model[0].weight)
    except ckpt.ShardingError:
        lost = True
    assert lost == (this_rank().rank == 0)
    message = refusal(optimizer.step)
    assert "0.weight" in message
    ckpt.load(path, model=model, optimizer=optimizer)
    train(model, optimizer, 1)
    plain, optimizer = made(sharded=False)
    for step in range(2):
        train(plain, optimizer, step)
    check_same(weights(model), weights(plain), 1e-6)
    return message


@pytest.mark.parametrize(("shape", "dtype"), [([10], "float64"), ([3], "float32"), ([300], "float32")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_rank_lost_all_learn_at_the_step(world_size: int, shape: list[int], dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks(world_size).run(written_on_one_rank, str(tmp_path / "checkpoint"), shape, dtype)
    assert "inside local_parameters" in first
    assert all("on another rank" in message for message in others)


def _twice(parameter: Any) -> None:
    paddle.assign(paddle.full(parameter.shape, 7.0, "float64"), parameter)
    paddle.assign(paddle.full(parameter.shape, 0.5), parameter)


def _by_a_vector(parameter: Any) -> None:
    nn.utils.vector_to_parameters(paddle.full([int(np.prod(parameter.shape))], 0.5), [parameter])


TAKEN: dict[str, Callable[[Any], object]] = {
    "float32": lambda p: paddle.assign(paddle.full(p.shape, 0.5), p),
    "float64 before": _twice,
    "cast_ and back": lambda p: (p.cast_("float64"), p.fill_(0.5), p.cast_("float32")),
    "vector_to_parameters": _by_a_vector,
    "_share_buffer_to": lambda p: paddle.full(p.shape, 0.5)._share_buffer_to(p),
    "_share_underline_tensor_to": lambda p: paddle.full(p.shape, 0.5)._share_underline_tensor_to(p),
    "reshape_": lambda p: (p.fill_(0.5), p.reshape_([-1, 1])),
}


def written_as_a_vector() -> None:
    """Also where a rank keeps nothing of some parameters."""
    model, optimizer = made()
    before = weights(model)
    with paddle.no_grad(), ckpt.local_parameters(model):
        parameters = model.parameters()
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * 0.5, parameters)
    check_same(weights(model), {name: value * np.float32(0.5) for name, value in before.items()})
    train(model, optimizer, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_vector_of_all_pieces_is_taken_over(world_size: int, ranks: Ranks) -> None:
    ranks(world_size).run(written_as_a_vector)


def written_right() -> None:
    for kind, write in TAKEN.items():
        model, optimizer = made()
        before = weights(model)
        with paddle.no_grad(), ckpt.local_parameters(model):
            for parameter in (model[0].weight, model[2].bias):
                if parameter.shape != [0]:
                    write(parameter)
        right = {name: np.full_like(value, 0.5) if name in ("0.weight", "2.bias") else value for name, value in before.items()}
        found = weights(model)
        assert all((found[name] == value).all() for name, value in right.items()), kind
        train(model, optimizer, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_of_the_same_dtype_are_taken_over(world_size: int, ranks: Ranks) -> None:
    ranks(world_size).run(written_right)


def written_where_pieces_lie_together() -> str:
    """Where Paddle may have no DLPack, all parameters beside it count as lost."""
    found = live_buffer.ends_with_piece
    live_buffer.ends_with_piece = lambda _: False
    try:
        model, optimizer = made()
    finally:
        live_buffer.ends_with_piece = found
    message = refusal(lambda: write_all(model, LOST["float64"], ("2.weight",)))
    model[2].weight.set_value(np.ones([5, 4], "float32"))
    assert "2.weight" in refusal(lambda: model(paddle.ones([2, 6])))
    model[2].bias.set_value(np.ones([4], "float32"))
    train(model, optimizer, 0)
    backward(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            paddle.assign(parameter.grad.astype("float64"), parameter.grad)
    assert "beside it" in refusal(optimizer.step)
    return message


def test_neighbours_are_lost_too_where_memory_does_not_end_with_the_piece(ranks: Ranks) -> None:
    (message,) = ranks(1).run(written_where_pieces_lie_together)
    assert "the weights of unit '2' beside it" in message


class Writing(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4, 6])
        self.bias = self.create_parameter([6])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = x @ self.weight + self.bias
        with paddle.no_grad():
            paddle.assign(np.full([4, 6], 0.5), self.weight)
        return y


def written_in_a_forward() -> list[str]:
    model, optimizer = made(model=nn.Sequential(Writing()))
    said = [refusal(lambda: model(paddle.ones([2, 4]))), refusal(optimizer.step)]
    for parameter in model.parameters():
        parameter.set_value(paddle.ones(parameter.shape))
    check_same(weights(model), {"0.weight": np.ones([4, 6], "float32"), "0.bias": np.ones([6], "float32")})
    return said


def test_another_dtype_in_a_forward_of_one_rank(ranks: Ranks) -> None:
    ((first, second),) = ranks(1).run(written_in_a_forward)
    assert "changed in place while it was whole" in first
    assert "inside a forward" in second


GRADIENTS: dict[str, Callable[[Any], object]] = {
    "float64": lambda g: paddle.assign(g.astype("float64"), g),
    "float16": lambda g: paddle.assign(g.astype("float16"), g),
    "cast_": lambda g: g.cast_("float64"),
    "_share_buffer_to": lambda g: paddle.zeros_like(g)._share_buffer_to(g),
    "_clear_data": lambda g: g._clear_data(),
}


def lost_gradients(kind: str, on: int | None, then: str) -> None:
    model, optimizer = made()
    backward(model)
    gradients = [gradient for parameter in model.parameters() if (gradient := parameter.grad) is not None]
    if on not in (None, this_rank().rank):
        gradients.clear()
    for gradient in gradients:
        GRADIENTS[kind](gradient)
    before = weights(model)
    if then == "backward":
        backward(model, 1)
    message = refusal(lambda: ckpt.clip_grad_norm_(model, 0.1) if then == "clip" else optimizer.step())
    assert ("its gradient was made something else" if gradients else "on another rank") in message
    check_same(weights(model), before)
    optimizer.clear_grad()
    train(model, optimizer, 2)
    plain, optimizer = made(sharded=False)
    train(plain, optimizer, 2)
    check_same(weights(model), weights(plain), 1e-6)


@pytest.mark.parametrize(("kind", "then"), [*((kind, "step") for kind in GRADIENTS), ("float64", "backward"), ("float64", "clip")])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_were_replaced_are_not_stepped(world_size: int, kind: str, then: str, ranks: Ranks) -> None:
    ranks(world_size).run(lost_gradients, kind, None, then)


@pytest.mark.parametrize("then", ["step", "backward", "clip"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_that_one_rank_lost_is_an_error_on_all(world_size: int, then: str, ranks: Ranks) -> None:
    ranks(world_size).run(lost_gradients, "float64", 0, then)


def gradients_written_in_place() -> None:
    """The tensor that is handed out stays this rank's piece, also after gradients were cleared and added to."""
    found = []
    for sharded in (False, True):
        model, optimizer = made(sharded)
        for step in range(4):
            backward(model, step)
            for parameter in model.parameters():
                gradient = parameter.grad
                if gradient is None:
                    continue
                if step == 0:
                    paddle.assign(gradient * 2, gradient)
                elif step == 1:
                    parameter.grad = gradient * 3
                elif step == 2:
                    gradient.set_value(gradient * 0.5)
                else:
                    parameter.grad.set_value(parameter.grad.astype("float64").astype("float32") + 0.25)
            backward(model, step + 10)
            optimizer.step()
            if step != 2:
                optimizer.clear_grad(set_to_zero=step == 0)
        found.append(weights(model))
    check_same(found[1], found[0], 1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_are_changed_in_place_are_stepped(world_size: int, ranks: Ranks) -> None:
    ranks(world_size).run(gradients_written_in_place)
