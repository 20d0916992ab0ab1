"""Plain models beside sharded ones, master weights, param groups, several optimizers; run on the ranks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import paddle
import pytest
from checkpoint_cases import GLOBAL_BATCH, MODELS, OPTIMIZERS, VOCABULARY, Outcome, Tied, held, train
from paddle import nn
from strict_cases import changes, copied, snapshot

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import named_buffers, named_parameters, runtime_of
from paddle_fsdp_ckpt.subjects import check_subjects

Truth = dict[str, np.ndarray]


def truth_of(model: nn.Layer) -> Truth:
    found = {name: named.parameter.numpy().copy() for named in named_parameters(model) for name in named.names}
    return found | {name: buffer.numpy().copy() for name, buffer in named_buffers(model)}


def plain_train(model: nn.Layer, optimizer: Any, first: int, last: int) -> list[float]:
    """Train a plain model over the whole batch, whatever the number of ranks."""
    losses = []
    for step in range(first, last):
        tokens = paddle.to_tensor(np.random.RandomState(step).randint(0, VOCABULARY, [GLOBAL_BATCH, 5]))
        loss = nn.functional.cross_entropy(model(tokens).reshape([-1, VOCABULARY]), tokens.reshape([-1]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses


def save_plain(model: str, path: str, steps: int = 2, more: int = 2) -> tuple[Truth, Truth, list[float]]:
    """Train and save unsharded: weights and states, and how it goes on."""
    paddle.seed(1)
    made = MODELS[model]()
    stepper = OPTIMIZERS["adamw"](made)
    plain_train(made, stepper, 0, steps)
    before = snapshot(made, stepper)
    ckpt.save(path, model=made, optimizer=stepper, step=steps)
    assert changes(before, snapshot(made, stepper)) == []
    names = {one.parameter.name: one.slot.name for one in check_subjects(made, [stepper]).steppers[0].parameters}
    states = {f"{names[owner]}.{acc}_0": t.numpy().copy() for acc, tensors in stepper._accumulators.items() for owner, t in tensors.items()}
    truth = truth_of(made)
    return truth, states, plain_train(made, stepper, steps, steps + more)


def save_given(path: str) -> tuple[list[float], list[float]]:
    """Save states that came by ``set_state_dict``, before any step: how the first run goes on, and how what loads them does."""
    with paddle.utils.unique_name.guard():  # as in a process of its own, where Paddle's names are these too
        made = MODELS["tied"]()
        stepper = OPTIMIZERS["adamw"](made)
        plain_train(made, stepper, 0, 2)
        weights, states = ({key: paddle.assign(one) for key, one in held.state_dict().items()} for held in (made, stepper))
        losses = plain_train(made, stepper, 2, 4)
    with paddle.utils.unique_name.guard():
        given = MODELS["tied"]()
        waiting = OPTIMIZERS["adamw"](given)
        given.set_state_dict(weights)
        waiting.set_state_dict(states)
        ckpt.save(path, model=given, optimizer=waiting, step=2)
    waiting.set_state_dict(waiting.state_dict())  # which Paddle keeps aside; a load replaces it
    plain_train(given, waiting, 7, 9)
    assert ckpt.load(path, model=given, optimizer=waiting).is_exact
    return losses, plain_train(given, waiting, 2, 4)


def refuse_given_of_others(path: str) -> list[str]:
    """Save an optimizer that was given another model's states, and return the error's text and what is there then."""
    with paddle.utils.unique_name.guard():
        first, second = MODELS["tied"](), MODELS["tied"]()
        steppers = [OPTIMIZERS["adamw"](model) for model in (first, second)]
        plain_train(first, steppers[0], 0, 1)
        steppers[1].set_state_dict(steppers[0].state_dict())
        with pytest.raises(ckpt.ShardingError) as caught:
            ckpt.save(path, model=second, optimizer=steppers[1])
    return [str(caught.value), *os.listdir(os.path.dirname(path))]


def load_sharded(model: str, path: str, weights_only: bool, steps: int = 2, more: int = 2) -> tuple[Outcome, list[float]]:
    paddle.seed(8)
    made = MODELS[model]()
    stepper = OPTIMIZERS["adamw"](made)
    ckpt.fully_shard(made, optimizer=stepper)
    report = ckpt.load(path, model=made, optimizer=None if weights_only else stepper)
    outcome = Outcome([], held(made, stepper), report)
    return outcome, train(made, stepper, steps, steps + more)


def load_plain(model: str, path: str, weights_only: bool, steps: int = 2, more: int = 2) -> tuple[Truth, Truth, list[float], Any]:
    paddle.seed(9)
    made = MODELS[model]()
    stepper = OPTIMIZERS["adamw"](made)
    report = ckpt.load(path, model=made, optimizer=None if weights_only else stepper)
    names = {one.parameter.name: one.slot.name for one in check_subjects(made, [stepper]).steppers[0].parameters}
    states = {f"{names[owner]}.{acc}_0": t.numpy().copy() for acc, tensors in stepper._accumulators.items() for owner, t in tensors.items()}
    return truth_of(made), states, plain_train(made, stepper, steps, steps + more), report


def grouped(unit_layers: list[str] | None, path: str, save: bool) -> Outcome:
    """Save, or load, a model that is gathered in other units."""
    paddle.seed(1 if save else 7)
    made = Tied()
    stepper = OPTIMIZERS["adamw"](made)
    ckpt.fully_shard(made, optimizer=stepper, unit_layers=unit_layers)
    train(made, stepper, 0, 2)
    if save:
        ckpt.save(path, model=made, optimizer=stepper)
    else:
        ckpt.load(path, model=made, optimizer=stepper)
    return Outcome([], held(made, stepper))


def frozen_later(path: str) -> tuple[Outcome, Outcome]:
    """Case 3: trained for two steps, then frozen; its state survives."""
    results = []
    for seed in (1, 5):
        paddle.seed(seed)
        made = Tied()
        stepper = OPTIMIZERS["adamw"](made)
        ckpt.fully_shard(made, optimizer=stepper)
        if seed == 1:
            train(made, stepper, 0, 2)
        for parameter in made.blocks[0].parameters():
            parameter.stop_gradient = True
        if seed == 1:
            train(made, stepper, 2, 3)
            ckpt.save(path, model=made, optimizer=stepper)
        else:
            report = ckpt.load(path, model=made, optimizer=stepper)
            assert report.without_state == []
        results.append(Outcome([], held(made, stepper)))
        assert any(key.startswith("blocks.0.") and key.endswith("moment1_0") for key in results[-1].state)
    return results[0], results[1]


def _ordered_groups(model: nn.Layer, backwards: bool) -> Any:
    parameters = model.parameters()
    groups = [
        {"params": parameters[:3], "weight_decay": 0.3, "learning_rate": 0.5},
        {"params": []},
        {"params": parameters[3:], "weight_decay": 0.0, "beta1": 0.8},
    ]
    return paddle.optimizer.AdamW(0.01, parameters=groups[::-1] if backwards else groups)


def reordered(path: str) -> tuple[list[float], list[float], bool]:
    """Case 8: the groups stand in another order when loaded, and one is empty."""
    runs = []
    for backwards in (False, True):
        paddle.seed(1 + backwards)
        made = Tied()
        stepper = _ordered_groups(made, backwards)
        ckpt.fully_shard(made, optimizer=stepper)
        if not backwards:
            train(made, stepper, 0, 2)
            ckpt.save(path, model=made, optimizer=stepper)
        else:
            ckpt.load(path, model=made, optimizer=stepper)
        runs.append((train(made, stepper, 2, 5), held(made, stepper)))
    same = runs[0][1].keys() == runs[1][1].keys() and all(
        np.array_equal(runs[0][1][key].values, runs[1][1][key].values) for key in runs[0][1]
    )
    return runs[0][0], runs[1][0], same


def _halves(model: nn.Layer) -> list[Any]:
    parameters = model.parameters()
    half = len(parameters) // 2
    return [paddle.optimizer.AdamW(0.01, parameters=parameters[:half]), paddle.optimizer.Momentum(0.05, parameters=parameters[half:])]


class _Both:
    """Two optimizers that step together."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for one in self._optimizers:
            one.step()

    def clear_grad(self) -> None:
        for one in self._optimizers:
            one.clear_grad()


def two_optimizers(path: str) -> tuple[list[float], list[float], str]:
    """Case 13: two optimizers over two halves of one model, given in another order when loaded."""
    losses = []
    for seed in (1, 2):
        paddle.seed(seed)
        made = Tied()
        steppers = _halves(made)
        ckpt.fully_shard(made, optimizer=steppers)
        both = _Both(steppers)
        if seed == 1:
            train(made, both, 0, 2)
            ckpt.save(path, model=made, optimizer=steppers)
        else:
            ckpt.load(path, model=made, optimizer=steppers[::-1])
        losses.append(train(made, both, 2, 5))
    try:
        ckpt.load(path, model=made, optimizer=steppers[0])
        message = "nothing was raised"
    except ckpt.MismatchError as error:
        message = str(error)
    return losses[0], losses[1], message


def two_models(paths: list[str]) -> bool:
    """Case 13: two models of one class in one process, each with its own checkpoint."""
    made = []
    for seed in (1, 2):
        paddle.seed(seed)
        model = Tied()
        stepper = OPTIMIZERS["adamw"](model)
        ckpt.fully_shard(model, optimizer=stepper)
        train(model, stepper, 10 * seed, 10 * seed + 2)
        made.append((model, stepper))
    before = [held(*one) for one in made]
    for path, (model, stepper) in zip(paths, made, strict=True):
        ckpt.save(path, model=model, optimizer=stepper)
    for path, (model, stepper) in zip(paths[::-1], made, strict=True):
        ckpt.load(path, model=model, optimizer=stepper)
    after = [held(*one) for one in made]
    return all(
        mine.keys() == other.keys() and all(np.array_equal(mine[key].values, other[key].values) for key in mine)
        for mine, other in zip(after, before[::-1], strict=True)
    )


def _low_precision() -> tuple[nn.Layer, Any]:
    made = Tied()
    made.to(dtype="bfloat16")
    stepper = paddle.optimizer.AdamW(0.01, parameters=made.parameters(), multi_precision=True)
    ckpt.fully_shard(made, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    return made, stepper


def _bytes_by_key(model: nn.Layer, stepper: Any) -> dict[str, bytes | None]:
    weights = {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(stepper)}
    return {key: copied(weight.local_tensor) for key, weight in weights.items()}


def masters(path: str) -> dict[str, bool]:
    """Cases 6, 7 and 10: bfloat16 weights and float32 masters. A CPU can't step these; states are filled instead."""
    paddle.seed(1)
    made, stepper = _low_precision()
    for number, (key, weight) in enumerate(sorted(ckpt.optimizer_sharded_state_dict(stepper).items())):
        tensor = weight.local_tensor
        if key.endswith(".w_0"):
            # What a bfloat16 can't hold.
            paddle.assign(tensor + 1e-4 * paddle.rand(tensor.shape), tensor)
        else:
            paddle.assign(paddle.rand(tensor.shape) + float(number), tensor)
    saved = _bytes_by_key(made, stepper)
    ckpt.save(path, model=made, optimizer=stepper)
    found = {
        "saving changes nothing": _bytes_by_key(made, stepper) == saved,
        "there are masters": any(key.endswith(".w_0") for key in saved),
    }
    paddle.seed(2)
    made, stepper = _low_precision()
    before = _bytes_by_key(made, stepper)
    report = ckpt.load(path, model=made)
    after = _bytes_by_key(made, stepper)
    found["weights are loaded"] = all(after[key] == saved[key] for key in ckpt.sharded_state_dict(made))
    states = [key for key in after if key.endswith("_0") and not key.endswith(".w_0")]
    found["states stay"] = bool(states) and all(after[key] == before[key] for key in states)
    runtime = runtime_of(made)
    assert runtime is not None
    found["masters follow"] = all(
        after[f"{shard.slot.name}.w_0"] == copied(shard.local.astype("float32")) for shard in runtime.shards if shard.range.numel
    )
    found["reported"] = set(states) <= set(report.not_asked_for)
    ckpt.load(path, model=made, optimizer=stepper)
    found["all is loaded"] = _bytes_by_key(made, stepper) == saved
    # An optimizer without masters can't take them.
    paddle.seed(3)
    plain = Tied()
    plain.to(dtype="bfloat16")
    without = paddle.optimizer.AdamW(0.01, parameters=plain.parameters())
    ckpt.fully_shard(plain, optimizer=without)
    before = snapshot(plain, without)
    try:
        ckpt.load(path, model=plain, optimizer=without)
    except ckpt.CheckpointError:
        found["refused without masters"] = changes(before, snapshot(plain, without)) == []
    return found


def fresh_optimizer(path: str) -> tuple[list[str], int, list[float], list[float]]:
    """Case 5: saved before the first step. Saving makes no states; a resumed run is the uninterrupted one."""
    losses: list[list[float]] = []
    changed: list[str] = []
    for seed in (1, 2):
        paddle.seed(seed)
        made = Tied()
        stepper = OPTIMIZERS["adamw"](made)
        ckpt.fully_shard(made, optimizer=stepper)
        if seed == 1:
            before = snapshot(made, stepper)
            ckpt.save(path, model=made, optimizer=stepper)
            changed = changes(before, snapshot(made, stepper))
        else:
            train(made, stepper, 60, 62)
            report = ckpt.load(path, model=made, optimizer=stepper)
        losses.append(train(made, stepper, 0, 3))
    return changed, len(report.without_state), losses[0], losses[1]


class Odd(nn.Layer):
    """Tensors of odd kinds: a strided buffer, one without elements, integers, a scalar, a tied buffer, bool."""

    def __init__(self, seed: int, strided: bool) -> None:
        super().__init__()
        values = np.random.RandomState(seed)
        self.weight = self.create_parameter([])
        self.matrix = self.create_parameter([3, 1, 2])
        if strided:
            self.register_buffer("empty", paddle.zeros([0, 3]))
            self.register_buffer("transposed", paddle.to_tensor(values.rand(4, 3).astype("float32")).t())
            self.register_buffer("every_second", paddle.to_tensor(values.rand(4, 6).astype("float32"))[:, ::2])
            self.register_buffer("half_second", paddle.to_tensor(values.rand(4, 6).astype("float32")).astype("bfloat16")[:, ::2])
        self.register_buffer("count", paddle.to_tensor(values.randint(0, 100), dtype="int64"))
        self.register_buffer("flags", paddle.to_tensor(values.rand(5) > 0.5))
        self.register_buffer("one", paddle.to_tensor(values.rand(2).astype("float64")))
        self.register_buffer("other", self.one)
        self.register_buffer("not_saved", paddle.zeros([2]), persistable=False)


def odd_tensors(path: str, sharded: bool) -> tuple[Truth, Truth, list[str]]:
    runs = []
    for seed in (1, 2):
        paddle.seed(seed)
        made = Odd(seed, strided=not sharded)
        if sharded:
            ckpt.fully_shard(made, optimizer=None)
        strides = {name: tuple(buffer.strides) for name, buffer in made.named_buffers()}
        if seed == 1:
            ckpt.save(path, model=made)
        else:
            ckpt.load(path, model=made)
        wrong = [name for name, buffer in made.named_buffers() if strides[name] != tuple(buffer.strides)]
        runs.append({name: buffer.numpy().copy() for name, buffer in named_buffers(made)})
    return runs[0], runs[1], wrong


def truth_on_ranks(model: str, path: str) -> Outcome:
    paddle.seed(1)
    made = MODELS[model]()
    stepper = OPTIMIZERS["adamw"](made)
    ckpt.fully_shard(made, optimizer=stepper)
    train(made, stepper, 0, 2)
    ckpt.save(path, model=made, optimizer=stepper, step=2)
    return Outcome(train(made, stepper, 2, 4), held_now(made, stepper, path))


def held_now(model: nn.Layer, stepper: Any, path: str) -> Any:
    """What is in the checkpoint, since the model has gone on: loaded back."""
    ckpt.load(path, model=model, optimizer=stepper)
    return held(model, stepper)


def optimizer_alone(model: str, path: str) -> tuple[bool, bool, bool]:
    """Load the optimizer without the model, then the model; the same as both together."""
    paddle.seed(1)
    made = MODELS[model]()
    stepper = OPTIMIZERS["adamw"](made)
    ckpt.fully_shard(made, optimizer=stepper)
    train(made, stepper, 0, 2)
    ckpt.save(path, model=made, optimizer=stepper)
    saved = _bytes_by_key(made, stepper)
    train(made, stepper, 5, 6)
    now = _bytes_by_key(made, stepper)
    report = ckpt.load(path, optimizer=stepper)
    after = _bytes_by_key(made, stepper)
    weights = ckpt.sharded_state_dict(made)
    stayed = all(after[key] == now[key] for key in weights)
    loaded = all(after[key] == saved[key] for key in after if key not in weights)
    assert set(weights) <= set(report.not_asked_for)
    ckpt.load(path, model=made)
    return stayed, loaded, _bytes_by_key(made, stepper) == saved


def inside_local_parameters(path: str) -> bool:
    """Save and load while the parameters are shown local; they stay so."""
    paddle.seed(1)
    made = Tied()
    stepper = OPTIMIZERS["adamw"](made)
    ckpt.fully_shard(made, optimizer=stepper)
    train(made, stepper, 0, 2)
    saved = _bytes_by_key(made, stepper)
    with ckpt.local_parameters(made):
        ckpt.save(path, model=made, optimizer=stepper)
        for parameter in made.parameters():
            if parameter.size:
                paddle.assign(parameter + 1.0, parameter)
        ckpt.load(path, model=made, optimizer=stepper)
        ckpt.init_optimizer_state(stepper)
        shown = all(list(parameter.shape) == [parameter._shard.range.numel] for parameter in made.parameters())
    same = _bytes_by_key(made, stepper) == saved
    train(made, stepper, 2, 3)
    return shown and same


class Named(nn.Layer):
    """Names that mean something to others."""

    NAMES = ("w_0", "moment1_0", "naïve 名", "a/b", "manifest")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_parameter(name, self.create_parameter([5, 3]))
        self.w_1 = nn.LayerDict({"w_0": nn.Linear(2, 3), "moment1_0": nn.Linear(3, 2)})

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        total = paddle.add_n([getattr(self, name).sum() for name in self.NAMES])
        inner = self.w_1["moment1_0"](self.w_1["w_0"](paddle.ones([1, 2])))
        return total + inner.sum() + paddle.zeros([*tokens.shape, VOCABULARY])


def strange_names(path: str) -> bool:
    states = []
    for seed in (1, 2):
        paddle.seed(seed)
        made = Named()
        stepper = OPTIMIZERS["adamw"](made)
        ckpt.fully_shard(made, optimizer=stepper)
        train(made, stepper, 0, seed)
        if seed == 1:
            ckpt.save(path, model=made, optimizer=stepper)
        else:
            weights_only = ckpt.load(path, model=made)
            assert not set(weights_only.not_asked_for) & set(ckpt.sharded_state_dict(made))
            ckpt.load(path, model=made, optimizer=stepper)
        states.append(_bytes_by_key(made, stepper))
    return states[0] == states[1]
