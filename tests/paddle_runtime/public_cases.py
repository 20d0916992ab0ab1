"""What runs on the ranks to use the package's public functions on a model cut by Paddle's own fully_shard."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from adapter_cases import WithDeepTensor, cut
from fused_cases import EVERY, GLOBAL_BATCH, Held, cut_by_paddle, held, plain_held, plain_model, train
from harness import this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.host_memory import bytes_of
from paddle_fsdp_ckpt.optim import split_weight_decay


def save_and_go_on(optimizer: str, path: str) -> tuple[Held, Held]:
    """Three steps, save, and three more: what was saved, and the uninterrupted run's end."""
    with cut_by_paddle(optimizer) as (model, stepper):
        before = held(model, stepper, train(model, stepper, 0, 3))
        ckpt.save(path, model=model, optimizer=stepper, step=3, extra_state={"epoch": 1})
        after = held(model, stepper)
        for key, piece in before.state.items():
            np.testing.assert_array_equal(piece.values, after.state[key].values, err_msg=f"saving changed {key}")
        return before, held(model, stepper, train(model, stepper, 3, 6))


def load_and_go_on(optimizer: str, path: str, used_steps: int = 0) -> tuple[Held, Held, list[str]]:
    """Other weights, perhaps a few steps, load, and three more steps."""
    with cut_by_paddle(optimizer, seed=99) as (model, stepper):
        train(model, stepper, 50, 50 + used_steps)
        report = ckpt.load(path, model=model, optimizer=stepper)
        assert report.step == 3
        assert report.extra_state == {"epoch": 1}
        loaded = held(model, stepper)
        return loaded, held(model, stepper, train(model, stepper, 3, 6)), report.without_state


def dicts_are_the_adapters() -> None:
    """The public state dicts are views of Paddle's own tensors, and states are made without a step."""
    with cut_by_paddle("adam named") as (model, stepper):
        ckpt.init_optimizer_state(stepper)
        weights, states = ckpt.sharded_state_dict(model), ckpt.optimizer_sharded_state_dict(stepper)
        right = held(model, stepper)
        assert right.state.keys() == weights.keys() | states.keys()
        assert {key.rpartition(".")[2] for key in states} == {"moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"}
        for key, weight in {**weights, **states}.items():
            paddle.assign(paddle.full_like(weight.local_tensor, 0.25), weight.local_tensor)
            assert (held(model, stepper).state[key].values == 0.25).all()


def train_ours(optimizer: str, path: str) -> list[float]:
    """Three steps with our runtime, save, three more: their losses."""
    model, stepper = _ours(optimizer, 1)
    _train_ours(model, stepper, 0, 3)
    ckpt.save(path, model=model, optimizer=stepper, step=3, extra_state={"epoch": 1})
    return _train_ours(model, stepper, 3, 6)


def load_ours(optimizer: str, path: str, again: str) -> list[float]:
    """Load into our runtime, save that again, and three more steps."""
    model, stepper = _ours(optimizer, 99)
    ckpt.load(path, model=model, optimizer=stepper)
    ckpt.save(again, model=model, optimizer=stepper)
    return _train_ours(model, stepper, 3, 6)


def _ours(optimizer: str, seed: int) -> tuple[nn.Layer, Any]:
    model = plain_model(seed)
    stepper = EVERY[optimizer](model)
    ckpt.fully_shard(model, optimizer=stepper)
    return model, stepper


def _train_ours(model: nn.Layer, stepper: Any, first: int, last: int) -> list[float]:
    place = this_rank()
    rows = GLOBAL_BATCH // place.world_size
    losses = []
    for step in range(first, last):
        batch = np.random.RandomState(step).randn(GLOBAL_BATCH, 4).astype("float32")[place.rank * rows :][:rows]
        mine = paddle.to_tensor(batch)
        loss = (model(mine) - mine.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        stepper.step()
        stepper.clear_grad()
        value = loss.detach().clone()
        dist.all_reduce(value)
        losses.append(value.item() / place.world_size)
    return losses


def save_what_paddle_cannot_hold(path: str, what: str) -> None:
    """A run in one process, whose parameters in one of Paddle's buffers differ in what the buffer has once."""
    model = plain_model()
    stepper = EVERY["adamw"](model)
    train(model, stepper, 0, 3)
    name = dict(model.named_parameters())["blocks.0.up.bias"].name
    if what == "differs":
        paddle.assign(paddle.full([1], 0.123), stepper._accumulators["beta1_pow_acc"][name])
    else:
        for tensors in stepper._accumulators.values():
            tensors.pop(name, None)
    ckpt.save(path, model=model, optimizer=stepper)


def save_model_only(path: str) -> None:
    """Without an optimizer."""
    ckpt.save(path, model=plain_model())


def train_plain(optimizer: str, path: str) -> tuple[Held, list[float]]:
    """Three steps in one process, save, three more."""
    model = plain_model()
    stepper = EVERY[optimizer](model)
    train(model, stepper, 0, 3)
    ckpt.save(path, model=model, optimizer=stepper, step=3, extra_state={"epoch": 1})
    saved = plain_held(model, stepper, [])
    return saved, train(model, stepper, 3, 6)


def load_plain(optimizer: str, path: str) -> tuple[Held, list[float]]:
    """Load in one process, and three more steps."""
    model = plain_model(99)
    stepper = EVERY[optimizer](model)
    ckpt.load(path, model=model, optimizer=stepper)
    return plain_held(model, stepper, []), train(model, stepper, 3, 6)


def save_without_states(path: str) -> None:
    """Before the first step there are none; loading into an optimizer that has some lets it have none again."""
    with cut_by_paddle("adamw") as (model, stepper):
        ckpt.save(path, model=model, optimizer=stepper)
        assert not any(stepper._accumulators.values())
        right = train(model, stepper, 0, 3)
    with cut_by_paddle("adamw", seed=99) as (model, stepper):
        train(model, stepper, 50, 52)
        report = ckpt.load(path, model=model, optimizer=stepper)
        assert len(report.without_state) == len(model.parameters())
        assert not any(stepper._accumulators.values())
        assert train(model, stepper, 0, 3) == right


def parts(path: str) -> None:
    """A model without its optimizer, and the reverse."""
    with cut_by_paddle("adamw", seed=99) as (model, stepper):
        train(model, stepper, 50, 52)
        before = held(model, stepper)
        assert ckpt.load(path, model=model).not_asked_for
        after_model = held(model, stepper)
        ckpt.load(path, optimizer=stepper)
        after_both = held(model, stepper)
        for key in before.state:
            first, second, third = (one.state[key].values for one in (before, after_model, after_both))
            if key.endswith("_0"):
                assert (first == second).all()
                assert (second != third).any()
            elif key != "scale":
                assert (first != second).any()
                assert (second == third).all()


def masters_follow(path: str) -> None:
    """bfloat16 parameters loaded without an optimizer: its master weights become their values. The CPU wheel can't train them."""

    def masters(stepper: Any, model: nn.Layer) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        states = {key.removesuffix(".w_0"): one for key, one in ckpt.optimizer_sharded_state_dict(stepper).items() if key.endswith(".w_0")}
        weights = {key: one for key, one in ckpt.sharded_state_dict(model).items() if key in states}
        return _values(states), _values(weights)

    with cut_by_paddle("adamw", seed=1, dtype="bfloat16") as (model, stepper):
        stepper._multi_precision = True
        ckpt.init_optimizer_state(stepper)
        ckpt.save(path, model=model, optimizer=stepper)
        right = masters(stepper, model)[1]
    with cut_by_paddle("adamw", seed=2, dtype="bfloat16") as (model, stepper):
        stepper._multi_precision = True
        ckpt.init_optimizer_state(stepper)
        assert any((one != right[key]).any() for key, one in masters(stepper, model)[0].items())
        ckpt.load(path, model=model)
        for mine in masters(stepper, model):
            assert mine.keys() == right.keys()
            assert mine
            for key, values in mine.items():
                np.testing.assert_array_equal(values, right[key], err_msg=key)


def _values(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: one.local_tensor.astype("float32").numpy().reshape(-1) for key, one in weights.items()}


Refusal = tuple[str, str]


def refused(case: str, path: str) -> Refusal:
    """What a call with something wrong raises on this rank; nothing of model and optimizer may have changed."""
    call, optimizer, blocks = CASES[case]
    with cut_by_paddle(optimizer, seed=99, blocks=blocks) as (model, stepper):
        if case == "loading what differs within a buffer, used" or case.startswith("saving"):
            train(model, stepper, 50, 52)
        before = _contents(model, stepper)
        try:
            call(path, model, stepper)
        except ckpt.CheckpointError as error:
            said = type(error).__name__, str(error)
        else:
            said = "", "nothing was raised"
        assert _contents(model, stepper) == before, "something changed"
        return said


def _contents(model: nn.Layer, stepper: Any) -> dict[str, bytes]:
    tensors = {key: one.local_tensor for key, one in ckpt.sharded_state_dict(model).items()}
    tensors |= {f"{name} {owner}": one for name, many in stepper._accumulators.items() for owner, one in many.items()}
    return {key: bytes(bytes_of(one)) for key, one in tensors.items()}


def _load(path: str, model: nn.Layer, stepper: Any) -> None:
    ckpt.load(path, model=model, optimizer=stepper)


def _other(model: nn.Layer) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=nn.Linear(2, 2).parameters())


def _one_rank_differs(path: str, model: nn.Layer, stepper: Any) -> None:
    ckpt.load(path if this_rank().rank == 0 else str(Path(path) / "nowhere"), model=model, optimizer=stepper)


def _one_rank_cannot_read(path: str, model: nn.Layer, stepper: Any) -> None:
    with _unreadable(model) if this_rank().rank == 1 else _nothing():
        ckpt.load(path, model=model, optimizer=stepper)


@contextmanager
def _unreadable(model: nn.Layer) -> Iterator[None]:
    model.added = nn.Linear(2, 2)
    try:
        yield
    finally:
        del model.added


@contextmanager
def _nothing() -> Iterator[None]:
    yield


CASES: dict[str, tuple[Callable[[str, nn.Layer, Any], Any], str, int]] = {
    "another model": (_load, "adamw", 2),
    "another class": (_load, "momentum", 3),
    "corrupt": (_load, "adamw", 3),
    "nothing there": (_load, "adamw", 3),
    "one rank elsewhere": (_one_rank_differs, "adamw", 3),
    "one rank's model is unreadable": (_one_rank_cannot_read, "adamw", 3),
    "no optimizer saved": (_load, "adamw", 3),
    "loading what differs within a buffer": (_load, "adamw", 3),
    "loading what differs within a buffer, used": (_load, "adamw", 3),
    "loading what is absent within a buffer": (_load, "adamw", 3),
    "a plain optimizer": (lambda path, model, _: ckpt.load(path, model=model, optimizer=_other(model)), "adamw", 3),
    "saving with a plain optimizer": (lambda path, model, _: ckpt.save(f"{path} 2", model=model, optimizer=_other(model)), "adamw", 3),
    "saving with two": (
        lambda path, model, one: ckpt.save(f"{path} 2", model=model, optimizer=[one, EVERY["sgd"](model)]),
        "adamw",
        3,
    ),
    "saving with one of two": (lambda path, model, one: ckpt.save(f"{path} 2", model=model, optimizer=[one, _other(model)]), "adamw", 3),
    "saving a part": (lambda path, model, one: ckpt.save(f"{path} 2", model=model.head, optimizer=one), "adamw", 3),
    "saving with our optimizer": (lambda path, model, _: ckpt.save(f"{path} 2", model=model, optimizer=_ours("sgd", 1)[1]), "adamw", 3),
    "saving our model with its optimizer": (
        lambda path, _, one: ckpt.save(f"{path} 2", model=_ours("sgd", 1)[0], optimizer=one),
        "adamw",
        3,
    ),
    "saving Lamb": (
        lambda path, model, _: ckpt.save(f"{path} 2", model=model, optimizer=paddle.optimizer.Lamb(0.1, parameters=model.parameters())),
        "adamw",
        3,
    ),
    "saving with decay asked by buffers": (
        lambda path, model, _: ckpt.save(f"{path} 2", model=model, optimizer=EVERY["adamw decay"](model)),
        "adamw",
        3,
    ),
}


def deep_tensor(path: str) -> list[str]:
    """What saving warns of, where Paddle cuts as stock Paddle can't read; and our load, which says nothing, restores it."""
    paddle.seed(1)
    model: nn.Layer = WithDeepTensor()
    right = model.deep.numpy().reshape(-1)
    with cut(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(path, model=model)
        said = [str(one.message) for one in caught]
    paddle.seed(2)
    model = WithDeepTensor()
    with cut(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.load(path, model=model)
        warnings.simplefilter("ignore")
        piece = ckpt.sharded_state_dict(model).get("deep")
        assert this_rank().rank or piece
        if piece is not None:
            np.testing.assert_array_equal(piece.local_tensor.numpy(), right[piece.flattened_range])
    return said


def _partly_frozen(seed: int) -> nn.Layer:
    model = plain_model(seed)
    for one in model.blocks[0].parameters():
        one.stop_gradient = True
    return model


def frozen(path: str) -> None:
    """Frozen parameters are saved without states, and move to our runtime and back."""
    with cut(model := _partly_frozen(1)):
        stepper = EVERY["adamw"](model)
        ckpt.init_optimizer_state(stepper)
        right = _values(ckpt.sharded_state_dict(model))
        assert not any(key.startswith("blocks.0.") for key in ckpt.optimizer_sharded_state_dict(stepper))
        ckpt.save(path, model=model, optimizer=stepper)
    model = _partly_frozen(2)
    stepper = EVERY["adamw"](model)
    ckpt.fully_shard(model, optimizer=stepper)
    assert ckpt.load(path, model=model, optimizer=stepper).without_state == []
    ckpt.save(f"{path} 2", model=model, optimizer=stepper)
    with cut(model := _partly_frozen(3)):
        stepper = EVERY["adamw"](model)
        assert ckpt.load(f"{path} 2", model=model, optimizer=stepper).without_state == []
        mine = _values(ckpt.sharded_state_dict(model))
        assert mine.keys() == right.keys()
        for key, values in mine.items():
            np.testing.assert_array_equal(values, right[key], err_msg=key)


def split_is_public() -> bool:
    return ckpt.split_weight_decay is split_weight_decay
